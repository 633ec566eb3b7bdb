"""Known ways in which a Megatron scales a loss differently, and what weights show of a step.

Each :class:`Cause` predicts the gradient and the reported loss of every case. The causes that
agree with all cases of a layout are printed. ``tests/wrong_factors`` adds the causes that only an
edit of this package's own source can produce. :func:`weights_error` compares the weights that
arrived at the losses of a step, as they were weighed, with d loss / d y.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from torch import Tensor

from megatron_lossagg.contract.scaling import LossScaling, Scaling
from megatron_lossagg.verify.cases import Case, Expected
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import Reference, relative
from megatron_lossagg.verify.step_data import Assignment
from megatron_lossagg.weigh.causes import equal_to
from megatron_lossagg.weigh.compare import WeighedSequence


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """A step as it was assigned and split, and its sizes."""

    reference: Reference
    assignment: Assignment
    parallelism: Parallelism
    loss_scaling: LossScaling

    @cached_property
    def scaling(self) -> Scaling:
        """The factors that are right for this step."""
        return Scaling(
            loss_scaling=self.loss_scaling,
            num_microbatches=self.m,
            dp_cp_size=self.parallelism.dp_cp,
            active_tokens=self.n,
        )

    @property
    def n(self) -> int:
        """N."""
        return sum(sum(sequence.counted) for sequence in self.reference.sequences)

    @property
    def m(self) -> int:
        """M of the first rank."""
        return self.assignment.microbatches[0]


Prediction = tuple[Tensor, float]
"""d loss / d y of the gradient that a fault would train, and the loss that it would report."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A fault: its name, what happened, and what it would train."""

    name: str
    what: str
    predict: Callable[[Facts, Case, Expected], Prediction]


def _instead(where: str, wrong: Callable[[Facts], Fraction]) -> Callable[..., Prediction]:
    """Predict what a different factor of Megatron's trains; the report is right."""

    def predict(facts: Facts, case: Case, wanted: Expected) -> Prediction:
        (right,) = (place.factor for place in facts.scaling.factors() if place.where == where)
        return float(wrong(facts) / right) * wanted.slope_Y, wanted.loss

    return predict


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="schedule_without_m",
        what="the schedule no longer divides by M (a patched Megatron)",
        predict=_instead("schedule", lambda facts: Fraction(1)),
    ),
    Cause(
        name="reduced_by_sum",
        what="gradients are summed over ranks while the loss scaling averages them",
        predict=_instead("DDP", lambda facts: Fraction(1)),
    ),
    Cause(
        name="reduced_by_mean",
        what="gradients are averaged over ranks while the loss scaling sums them",
        predict=_instead("DDP", lambda facts: Fraction(1, facts.parallelism.dp_cp)),
    ),
    Cause(
        name="not_divided_by_n",
        what="finalize_model_grads does not divide by num_tokens",
        predict=_instead("finalize_model_grads", lambda facts: Fraction(1)),
    ),
)

MASKED_LOSSES_REACH = {
    "mask_by_multiplication": "a masked token's inf or NaN reaches the loss (inf * 0 is NaN): "
    "replace, do not multiply"
}
"""Recognised by a gradient that is right only if the masked losses are finite."""

FORWARD_ONLY = {"forward_only": "only a forward-only step reports it, the training step is right"}
"""Recognised by a training step that is right."""

EXPERTS_APART = (
    "with fewer expert-parallel than tensor-parallel ranks stock Megatron-Core (0.16.1) does not "
    "sum the experts' gradients over TP ranks (NVIDIA/Megatron-LM#5916), with any loss: take ep = "
    "tp"
)
"""Not a factor of the gradient: only the experts' parameters differ."""


def symbols(factor: float, facts: Facts, *, tolerance: float) -> list[str]:
    """Name the sizes of the step that equal a measured factor: ``1/(M DP)``."""
    split = facts.parallelism
    sizes = {"M": facts.m, "DP": split.dp, "CP": split.cp, "TP": split.tp, "PP": split.pp}
    return equal_to(factor, sizes, {"N": facts.n}, tolerance=tolerance)


def weights_error(weighed: Sequence[WeighedSequence], facts: Facts, slope_Y: Tensor) -> float:
    """Return the largest relative error of a sequence's sum of weights.

    ``slope_Y``: d loss / d y by the reference. An error is relative to the sum of the sequence's
    absolute weights, of which rounding is a part also where they cancel, or, if that is small, to
    a thousandth of the largest one.
    """
    starts, assignment = facts.reference.starts, facts.assignment
    found = {(one.dp_rank, one.microbatch, one.sequence): one.weight_sum for one in weighed}
    wanted: dict[tuple[int, int, int], float] = {}
    sizes: dict[tuple[int, int, int], float] = {}
    places: Counter[tuple[int, int]] = Counter()
    for index, key in enumerate(assignment.keys):  # in their microbatch as in the step
        place, own_Y = (*key, places[key]), slope_Y[starts[index] : starts[index + 1]]
        wanted[place], sizes[place] = float(own_Y.sum()), float(own_Y.abs().sum())
        places[key] += 1
    floor = 1e-3 * max(sizes.values(), default=0.0)
    return max(
        relative(found.get(place, 0.0), wanted.get(place, 0.0), max(floor, sizes.get(place, 0.0)))
        for place in wanted.keys() | found.keys()
    )
