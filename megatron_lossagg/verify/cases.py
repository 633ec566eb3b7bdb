"""The aggregations that a verification trains, and the reference's values for each.

Shape suffixes, as in ``reference_gradient.py``: Y = all sequences' tokens and padding; P =
parameters of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import mul
from typing import TYPE_CHECKING, Any
from zlib import crc32

from megatron_lossagg.reduction.aggregation import Aggregation, WeightsFunction
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.reduction.table import StepCounts
from megatron_lossagg.verify.step_data import Assignment, TrainingSequence

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_lossagg.verify.reference_gradient import Reference

BETA = 0.3
"""Weight of a case's second term."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss: x = coefficient * y under one aggregation, and y^2 under a second, if any."""

    aggregation: Aggregation
    second: Aggregation | None = None
    weighs_sequences: bool = False
    """Whether each sequence has a weight, ``Sequences(sequence_weight=...)``."""
    leaves_out: bool = False
    """Whether sequences leave the counts, ``Sequences(left_out=...)``."""

    def __str__(self) -> str:
        """Mode, what differs from its default, and the second term."""
        name = str(self.aggregation.reducer_path or self.aggregation.mode)
        if self.aggregation.count != "mask":
            name += f", count={self.aggregation.count}"
        if not self.aggregation.count_empty:
            name += ", count_empty=False"
        if self.weighs_sequences:
            name += ", sequence_weight"
        if self.leaves_out:
            name += ", left_out"
        return name if self.second is None else f"{name} + {self.second.mode}"

    @property
    def is_custom(self) -> bool:
        """Whether it is a reducer of one's own, which has no formula and no weight sum."""
        return self.aggregation.mode == CUSTOM

    @property
    def formula(self) -> str:
        """w_s of each term, with the divisor's value: ``1/(B 40), 1/N``."""
        terms = [self.aggregation] if self.second is None else [self.aggregation, self.second]
        return ", ".join(term.formula for term in terms)


MASK_CASES: tuple[Case, ...] = (
    Case(aggregation=Aggregation("token_mean")),
    Case(aggregation=Aggregation("sample_mean")),
    Case(aggregation=Aggregation("sample_mean", count_empty=False)),
    Case(aggregation=Aggregation("prompt_mean")),
    Case(aggregation=Aggregation("prompt_mean", count_empty=False)),
    Case(aggregation=Aggregation("constant", divisor=40.0)),
    Case(aggregation=Aggregation("constant", divisor=40.0, count_empty=False)),
    Case(aggregation=Aggregation("constant", divisor=40.0), second=Aggregation("token_mean")),
    Case(aggregation=Aggregation("sample_sum")),
    Case(aggregation=Aggregation("token_sum", divisor=7.0)),
    Case(aggregation=Aggregation("length_power", exponent=0.5)),
    Case(aggregation=Aggregation("balanced")),
    Case(aggregation=Aggregation("balanced", count_empty=False)),
    Case(aggregation=Aggregation("row_mean")),
    Case(aggregation=Aggregation("row_mean", count_empty=False)),
    Case(aggregation=Aggregation("microbatch_token_mean")),
)
"""Every mode of the table, with both ways to count empty samples, and a sum of two modes."""

WEIGHT_CASES: tuple[Case, ...] = (
    Case(aggregation=Aggregation("token_mean", count="weights")),
    Case(aggregation=Aggregation("sample_mean", count_empty=False, count="weights")),
    Case(aggregation=Aggregation("constant", divisor=40.0, count="weights")),
)
"""Token weights in the losses and in the denominators."""


def mean_of_prompts(counts: StepCounts) -> Any:
    """Weigh by the mean over prompts of the mean over samples of their rows' token means."""
    return 1 / (counts.P * counts.k_p * counts.R_b * counts.n_s)


OWN_CASES: tuple[Case, ...] = (
    Case(aggregation=Aggregation(weights=mean_of_prompts)),
    Case(aggregation=Aggregation("sample_mean"), weighs_sequences=True),
    Case(aggregation=Aggregation("sample_mean"), leaves_out=True),
)
"""A weights function, a weight of each sequence, and sequences that leave the counts."""

CASES = (*MASK_CASES, *WEIGHT_CASES, *OWN_CASES)
"""What ``lossagg verify`` verifies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """The reference's values for a step, in float64."""

    loss: float
    slope_Y: Tensor
    """d loss / d y."""
    gradient_P: Tensor
    """d loss / d theta."""
    weight_sum: float | None
    """None for a reducer of one's own, whose weights only it knows, as the next."""
    weight_expected: float | None


def expected(case: Case, reference: Reference, assignment: Assignment) -> Expected:
    """Compute a step's loss and its derivative by every token's loss with the reference."""
    import torch

    from megatron_lossagg.verify import reference_loss
    from megatron_lossagg.verify.own_reducer import loss_of_whole

    y_Y = reference.losses_Y.clone().requires_grad_()

    def reference_sequences(
        aggregation: Aggregation, term: Callable[[Tensor, float], Tensor]
    ) -> list[dict[str, Any]]:
        sequences = zip(reference.sequences, assignment.keys, reference.starts[:-1], strict=True)
        return [
            {
                **as_reference(sequence, key, aggregation, case.weighs_sequences),
                "left_out": case.leaves_out and sequence.left_out,
                "x": [term(y_Y[at], c) for at, c in enumerate(sequence.coefficient, start)],
            }
            for sequence, key, start in sequences
        ]

    weight_sum = weight_expected = None
    if case.is_custom:
        loss = loss_of_whole(case.aggregation, reference, y_Y)
    else:
        mode, linear = case.aggregation.mode, reference_sequences(case.aggregation, mul)
        options = reference_options(case.aggregation, assignment.microbatches)
        loss = reference_loss.step_loss(mode, linear, **options)
        counted = [{**sequence, "trained": sequence["counted"]} for sequence in linear]
        weight_sum = reference_loss.weight_sum(mode, linear, **options)
        weight_expected = reference_loss.weight_sum(mode, counted, **options)
    if case.second is not None:
        second = reference_options(case.second, assignment.microbatches)
        squares = reference_sequences(case.second, lambda y, c: y * y)
        loss = loss + BETA * reference_loss.step_loss(case.second.mode, squares, **second)
    (slope_Y,) = torch.autograd.grad(loss, y_Y)
    return Expected(
        loss=loss.item(),
        slope_Y=slope_Y,
        gradient_P=slope_Y @ reference.gradients_YP,
        weight_sum=weight_sum,
        weight_expected=weight_expected,
    )


def columns_of(
    sequences: Sequence[TrainingSequence], aggregation: Aggregation
) -> dict[str, list[float]]:
    """Draw the columns that a weights function reads: whole numbers from 1 to 4."""
    own = aggregation.weights_function
    names = [] if own is None else _columns_read(own)
    return {name: [_drawn(name, one) for one in sequences] for name in names}


def _drawn(name: str, sequence: TrainingSequence) -> float:
    return 1.0 + crc32(f"{name} {sequence.sample} {len(sequence)}".encode()) % 4


@cache
def _columns_read(own: WeightsFunction) -> list[str]:
    """Return the names of the columns that a function reads of one sequence's counts."""
    from megatron_lossagg.verify.reference_loss import counts_of_one

    counts = counts_of_one()
    with suppress(Exception):  # the step itself raises it
        own.function(counts)
    return list(counts.columns)


def as_reference(
    sequence: TrainingSequence,
    key: tuple[int, int],
    aggregation: Aggregation,
    weighs_sequences: bool = False,
) -> dict[str, Any]:
    """Write a sequence as ``reference_loss.py`` reads it, without its losses."""
    written: dict[str, Any] = {
        "counted": sequence.counted,
        "trained": sequence.trained,
        "sample": sequence.sample,
        "prompt": sequence.prompt,
        "group": sequence.group,
        "microbatch": key,
    }
    if aggregation.weights_function is not None:
        names = _columns_read(aggregation.weights_function)
        written["columns"] = {name: _drawn(name, sequence) for name in names}
    if weighs_sequences:
        written["sequence_weight"] = sequence.sequence_weight
    return written | ({"weight": sequence.weight} if aggregation.count == "weights" else {})


def reference_options(aggregation: Aggregation, microbatches: Sequence[int]) -> dict[str, Any]:
    """Write an aggregation as ``reference_loss.py`` reads it."""
    own = aggregation.weights_function
    return {
        "divisor": aggregation.divisor,
        "exponent": aggregation.exponent,
        "count_empty": aggregation.count_empty,
        "count_left_out": aggregation.count_left_out,
        "microbatches": list(microbatches),
        "weights": None if own is None else own.function,
    }
