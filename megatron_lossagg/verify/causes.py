"""Known faults of a loss's normalisation, each as the token weights that it would train.

A fault leaves its arithmetic in the gradient: a factor, another denominator, a token with
the weight of another. Each cause predicts the weight of every token in the gradient and in
the reported loss, from the oracle's weights and the factors of ``scaling.py``. The causes
whose predictions agree with every measurement are the likely ones.

Shape suffix: Y = all sequences' tokens and padding, as ``reference_gradient.py`` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.scaling import LossScaling, Scaling
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import BETA, Case, as_reference, reference_options
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import Reference
from megatron_lossagg.verify.sequences import Assignment, TrainingSequence, zigzag

__all__ = ["CAUSES", "MASKED_LOSSES_REACH", "Cause", "Facts", "Weights", "symbols"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """A step as it was assigned and split, and the numbers that faults confuse."""

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
    def per_token(self) -> bool:
        """Whether the loss scaling is per-token."""
        return self.loss_scaling == "per_token"

    @cached_property
    def spans(self) -> list[range]:
        """Each sequence's tokens in Y as this split packs them; the padding sequence's is
        the last.
        """
        lengths = [*map(len, self.reference.sequences), self.parallelism.sequence_multiple]
        padded = map(self.parallelism.padded, lengths)
        starts = self.reference.starts
        return [range(at, at + length) for at, length in zip(starts, padded, strict=True)]

    @cached_property
    def num_counted(self) -> list[int]:
        """n_s of each sequence."""
        return [sum(sequence.counted) for sequence in self.reference.sequences]

    @property
    def n(self) -> int:
        """N."""
        return sum(self.num_counted)

    @property
    def m(self) -> int:
        """M, the same on every rank."""
        return self.assignment.microbatches[0]

    @property
    def idle_sequences(self) -> int:
        """The number of sequences with no counted tokens."""
        return self.num_counted.count(0)

    @property
    def masked(self) -> int:
        """The number of ones in the loss masks as they are passed."""
        return sum(sum(sequence.trained) for sequence in self.reference.sequences)

    def samples(self, aggregation: Aggregation) -> int:
        """Return B, or V with ``count_empty=False``."""
        tokens: dict[int, int] = {}
        for sequence, n in zip(self.reference.sequences, self.num_counted, strict=True):
            tokens[sequence.sample] = tokens.get(sequence.sample, 0) + n
        return sum(aggregation.count_empty or n > 0 for n in tokens.values())

    def token_weights(
        self,
        aggregation: Aggregation,
        *,
        only: Sequence[int] | None = None,
        change: Callable[[int, TrainingSequence], TrainingSequence] = lambda index, sequence: (
            sequence
        ),
    ) -> Tensor:
        """Compute every token's weight with the oracle: float64 ``[Y]``.

        ``only``: take these sequences for the whole step. ``change``: replace each sequence by
        another.
        """
        sequences = self.reference.sequences
        x_Y = torch.zeros_like(self.reference.losses_Y, requires_grad=True)
        step = []
        for index in range(len(sequences)) if only is None else only:
            sequence = as_reference(change(index, sequences[index]), self.assignment.keys[index])
            step.append(
                {**sequence, "x": [x_Y[at] for at in self.spans[index][: len(sequences[index])]]}
            )
        options = reference_options(aggregation, self.assignment.microbatches)
        loss = reference_loss.step_loss(aggregation.mode, step, **options)
        if not loss.requires_grad:  # nothing is trained
            return torch.zeros_like(self.reference.losses_Y)
        (weight_Y,) = torch.autograd.grad(loss, x_Y)
        return weight_Y

    def sequence_weights(self, aggregation: Aggregation) -> list[float]:
        """Return w_s of each sequence; 0 where it has no counted tokens."""
        weight_Y = self.token_weights(
            aggregation, change=lambda _, sequence: replace(sequence, trained=sequence.counted)
        )
        spans = self.spans[:-1]
        return [weight_Y[span.start : span.stop].max().item() for span in spans]

    def slope(self, case: Case, first_Y: Tensor, second_Y: Tensor | None) -> Tensor:
        """Compute d loss / d y of a case whose terms have these token weights."""
        slope_Y = first_Y * self._coefficient_Y
        if case.second is not None and second_Y is not None:
            slope_Y = slope_Y + 2 * BETA * second_Y * self.reference.losses_Y
        return slope_Y

    def loss(self, case: Case, first_Y: Tensor, second_Y: Tensor | None) -> float:
        """Compute the loss of a case whose terms have these token weights."""
        y_Y = self.reference.losses_Y
        loss = (first_Y * self._coefficient_Y * y_Y).sum()
        if case.second is not None and second_Y is not None:
            loss = loss + BETA * (second_Y * y_Y * y_Y).sum()
        return loss.item()

    @cached_property
    def _coefficient_Y(self) -> Tensor:
        coefficient_Y = torch.ones_like(self.reference.losses_Y)  # 1 at padding
        for sequence, span in zip(self.reference.sequences, self.spans, strict=False):
            begin = span.start
            coefficient_Y[begin : begin + len(sequence)] = torch.tensor(
                sequence.coefficient, dtype=torch.float64
            )
        coefficient_Y[self.spans[-1].start :] = 2.0
        return coefficient_Y


Weights = tuple[Tensor, Tensor]
"""Of every token: in the gradient, in the reported loss; float64 ``[Y]`` each."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A fault: its name, what happened, and the weights it would train."""

    name: str
    what: str
    weights: Callable[[Facts, Aggregation], Weights]

    def predict(self, facts: Facts, case: Case) -> tuple[Tensor, float]:
        """Return d loss / d y of the gradient that would be trained, and the reported loss."""
        first = self.weights(facts, case.aggregation)
        second = self.weights(facts, case.second) if case.second else (None, None)
        return facts.slope(case, first[0], second[0]), facts.loss(case, first[1], second[1])


def _factor(
    gradient: Callable[[Facts], Fraction | float], report: Callable[[Facts], Fraction | float]
) -> Callable[[Facts, Aggregation], Weights]:
    """Make the weights that are multiples of the right ones, in the gradient and the report."""

    def weights(facts: Facts, aggregation: Aggregation) -> Weights:
        right_Y = facts.token_weights(aggregation)
        return float(gradient(facts)) * right_Y, float(report(facts)) * right_Y

    return weights


def _scaled_as(wrong: Callable[[Facts], Scaling]) -> Callable[[Facts, Aggregation], Weights]:
    """Make the weights where K and the report are computed with other sizes."""
    return _factor(
        lambda facts: Fraction(wrong(facts).k, facts.scaling.k),
        lambda facts: Fraction(wrong(facts).report_factor, facts.scaling.report_factor),
    )


def _instead(
    where: str, wrong: Callable[[Facts], Fraction]
) -> Callable[[Facts, Aggregation], Weights]:
    """Make the weights where Megatron has another factor at a place; the report is right."""

    def gradient(facts: Facts) -> Fraction:
        (right,) = (place.factor for place in facts.scaling.factors() if place.where == where)
        return wrong(facts) / right

    return _factor(gradient, _one)


def _only_per_token(
    factor: Callable[[Facts], Fraction],
) -> Callable[[Facts, Aggregation], Weights]:
    """Make the weights of a fault that only the per-token loss scaling has; the report is right."""
    return _factor(lambda facts: factor(facts) if facts.per_token else Fraction(1), _one)


def _one(facts: Facts) -> Fraction:
    return Fraction(1)


def _both(weight_Y: Tensor) -> Weights:
    return weight_Y, weight_Y


def _rank_local(facts: Facts, aggregation: Aggregation) -> Weights:
    gradient_Y = torch.zeros_like(facts.reference.losses_Y)
    reported_Y = torch.zeros_like(facts.reference.losses_Y)
    for rank in range(facts.parallelism.dp):
        sequences = facts.assignment.of_rank(rank)
        n = sum(facts.num_counted[index] for index in sequences)
        if not n:
            continue
        local_Y = facts.token_weights(aggregation, only=sequences)
        if aggregation.mode == "microbatch_token_mean":
            local_Y = local_Y * facts.parallelism.dp  # a rank alone is DP = 1
        reported_Y += local_Y
        gradient_Y += local_Y * (n / facts.n if facts.per_token else 1.0)
    return gradient_Y, reported_Y


def _phantom_tokens(facts: Facts, aggregation: Aggregation) -> Weights:
    grown = (facts.n + facts.idle_sequences) / facts.n
    right_Y = facts.token_weights(aggregation)
    if aggregation.mode == "token_mean":
        right_Y = right_Y / grown
    return right_Y * (grown if facts.per_token else 1.0), right_Y


def _without_batch(facts: Facts, aggregation: Aggregation) -> Weights:
    factor = facts.samples(aggregation) if aggregation.mode == "constant" else 1
    return _both(factor * facts.token_weights(aggregation))


def _empty_leave(facts: Facts, aggregation: Aggregation) -> Weights:
    return _both(facts.token_weights(replace(aggregation, count_empty=False)))


def _sequence_means(facts: Facts, aggregation: Aggregation) -> Weights:
    right_Y = facts.token_weights(aggregation)
    if aggregation.mode != "sample_mean":
        return _both(right_Y)
    by_sequence_Y = facts.token_weights(
        replace(aggregation, count_empty=True),
        change=lambda index, sequence: replace(sequence, sample=index),
    )
    return _both(by_sequence_Y * (len(facts.reference.sequences) / facts.samples(aggregation)))


def _training_mask_counts(facts: Facts, aggregation: Aggregation) -> Weights:
    return _both(
        facts.token_weights(
            aggregation, change=lambda _, sequence: replace(sequence, counted=sequence.trained)
        )
    )


def _microbatch_means(facts: Facts, aggregation: Aggregation) -> Weights:
    return _both(facts.token_weights(Aggregation("microbatch_token_mean")))


def _of_the_sequence_before(facts: Facts, aggregation: Aggregation) -> Weights:
    weight_Y = torch.zeros_like(facts.reference.losses_Y)
    sequence_weights = facts.sequence_weights(aggregation)
    before: dict[tuple[int, int], float] = {}  # the last segment is padding, of weight 0
    for index, sequence in enumerate(facts.reference.sequences):
        key = facts.assignment.keys[index]
        weight = before.get(key, 0.0)
        for at, kept in zip(facts.spans[index], sequence.trained, strict=False):
            weight_Y[at] = weight * kept
        before[key] = sequence_weights[index]
    return _both(weight_Y)


def _mask_held(
    order: Callable[[Parallelism, int], list[int]],
) -> Callable[[Facts, Aggregation], Weights]:
    """Make the weights where a rank slices its mask by other chunks than its tokens."""

    def weights(facts: Facts, aggregation: Aggregation) -> Weights:
        cp = facts.parallelism.cp
        if cp == 1 or facts.parallelism.packing == "local":
            return _both(facts.token_weights(aggregation))
        weight_Y = torch.zeros_like(facts.reference.losses_Y)
        weight_S = facts.sequence_weights(aggregation)
        sequences = zip(facts.reference.sequences, facts.spans[:-1], weight_S, strict=True)
        for sequence, span, weight in sequences:
            mask = sequence.trained + [0] * (len(span) - len(sequence))
            size = len(span) // (2 * cp)
            for rank in range(cp):
                taken = [
                    mask[chunk * size + i]
                    for chunk in order(facts.parallelism, rank)
                    for i in range(size)
                ]
                for at, kept in zip(zigzag([0, len(span)], cp, rank), taken, strict=True):
                    weight_Y[span[at]] += weight * kept
        return _both(weight_Y)

    return weights


def _swapped(parallelism: Parallelism, rank: int) -> list[int]:
    chunks = [rank, 2 * parallelism.cp - 1 - rank]
    return chunks[::-1] if rank == 1 else chunks


def _neighbours(parallelism: Parallelism, rank: int) -> list[int]:
    return [2 * rank, 2 * rank + 1]


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="times_cp",
        what="the loss is multiplied by CP once more, and nothing in Megatron divides by it",
        weights=_factor(lambda f: f.parallelism.cp, _one),
    ),
    Cause(
        name="over_m",
        what="Megatron's mean over microbatches is not compensated (K lacks M)",
        weights=_scaled_as(lambda f: replace(f.scaling, num_microbatches=1)),
    ),
    Cause(
        name="without_cp",
        what="DDP averages over DP * CP and K compensates only DP",
        weights=_scaled_as(lambda f: replace(f.scaling, dp_cp_size=f.parallelism.dp)),
    ),
    Cause(
        name="without_dp",
        what="DDP averages over DP * CP and K compensates only CP",
        weights=_scaled_as(lambda f: replace(f.scaling, dp_cp_size=f.parallelism.cp)),
    ),
    Cause(
        name="times_dp",
        what="a data-parallel mean is compensated where the loss scaling has none",
        weights=_only_per_token(lambda f: Fraction(f.parallelism.dp)),
    ),
    Cause(
        name="num_tokens_on_every_cp_rank",
        what="every CP rank returns the whole count and Megatron adds them over DP * CP",
        weights=_only_per_token(lambda f: Fraction(1, f.parallelism.cp)),
    ),
    Cause(
        name="num_tokens_of_the_training_mask",
        what="num_tokens counts the ones of the training masks, padding too, not the planned N",
        weights=_only_per_token(lambda f: Fraction(f.n, f.masked)),
    ),
    Cause(
        name="report_without_m",
        what="the report lacks M: Megatron averages it over microbatches",
        weights=_factor(_one, lambda f: Fraction(1, f.m)),
    ),
    Cause(
        name="schedule_without_m",
        what="the schedule no longer divides by M (a patched Megatron)",
        weights=_instead("schedule", _one),
    ),
    Cause(
        name="reduced_by_sum",
        what="gradients are summed over ranks where the loss scaling averages them",
        weights=_instead("DDP", _one),
    ),
    Cause(
        name="reduced_by_mean",
        what="gradients are averaged over ranks where the loss scaling sums them",
        weights=_instead("DDP", lambda f: Fraction(1, f.parallelism.dp_cp)),
    ),
    Cause(
        name="not_divided_by_n",
        what="finalize_model_grads does not divide by num_tokens",
        weights=_instead("finalize_model_grads", _one),
    ),
    Cause(
        name="rank_local_counts",
        what="N, B and P are those of a data-parallel rank, not of the step",
        weights=_rank_local,
    ),
    Cause(
        name="phantom_token",
        what="every fully masked sequence adds a token to N (clamped per sample)",
        weights=_phantom_tokens,
    ),
    Cause(
        name="constant_without_batch",
        what="constant divides by L and forgets B",
        weights=_without_batch,
    ),
    Cause(
        name="empty_samples_leave",
        what="fully masked samples and prompts are not counted although count_empty is on",
        weights=_empty_leave,
    ),
    Cause(
        name="mean_of_sequence_means",
        what="a sample that was split into sequences is averaged sequence by sequence",
        weights=_sequence_means,
    ),
    Cause(
        name="training_mask_counts",
        what="the denominators count the training mask, not the counting mask",
        weights=_training_mask_counts,
    ),
    Cause(
        name="microbatch_means",
        what="the mean of microbatch means is trained, whatever mode is configured",
        weights=_microbatch_means,
    ),
    Cause(
        name="weights_of_neighbours",
        what="a packed sequence's weight is applied to the next sequence's tokens",
        weights=_of_the_sequence_before,
    ),
    Cause(
        name="chunks_swapped",
        what="CP rank 1 takes its two zigzag chunks of the mask in the wrong order",
        weights=_mask_held(_swapped),
    ),
    Cause(
        name="contiguous_chunks",
        what="a CP rank takes two neighbouring chunks of the mask, and zigzag chunks of its tokens",
        weights=_mask_held(_neighbours),
    ),
)
"""Every cause that is recognised by its weights."""

MASKED_LOSSES_REACH = Cause(
    name="mask_by_multiplication",
    what="a masked token's inf or NaN reaches the loss (inf * 0 is NaN): replace, do not multiply",
    weights=lambda facts, aggregation: _both(facts.token_weights(aggregation)),
)
"""Recognised by a gradient that is right only where the masked losses are finite."""


def symbols(factor: float, facts: Facts, *, tolerance: float) -> list[str]:
    """Name the sizes of the step that equal a measured factor: ``1/(M DP)``."""
    sizes = {"M": facts.m, "DP": facts.parallelism.dp, "CP": facts.parallelism.cp}
    sizes |= {"TP": facts.parallelism.tp, "PP": facts.parallelism.pp}
    powers: dict[str, float] = {"N": facts.n}
    names = [name for name, size in sizes.items() if size > 1]
    for bits in range(1, 2 ** len(names)):
        chosen = [name for place, name in enumerate(names) if bits >> place & 1]
        product = 1
        for name in chosen:
            product *= sizes[name]
        powers[" ".join(chosen)] = product
    found = [name for name, value in powers.items() if abs(factor / value - 1) < tolerance]
    inverse = [
        f"1/({name})" if " " in name else f"1/{name}"
        for name, value in powers.items()
        if abs(factor * value - 1) < tolerance
    ]
    return sorted(found + inverse, key=len)
