"""A step's sequences and totals under one aggregation; keeps the weights that ``weights.py`` makes.

It imports NumPy and no torch.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.counted import Counted
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import Ints, IntsLike
from megatron_lossagg.reduction.mode_counts import ModeCounts
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.sequences import CheckedSequences, Floats
from megatron_lossagg.reduction.totals import StepTotals
from megatron_lossagg.reduction.weights import weight_sum, weights_of_all, weights_of_rank

_Weights = TypeVar("_Weights", bound="StepWeights")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepWeights:
    """One optimizer step under one aggregation: the part of a :class:`StepPlan` that is NumPy."""

    aggregation: Aggregation
    sequences: CheckedSequences
    """What was planned, as read-only arrays ``[S]``."""
    totals: StepTotals
    num_calls: int = field(default=1, repr=False)
    """Schedule calls of one optimizer step, each planned by itself, which train their mean."""
    total: float | None = None
    """What stands in place of the mode's own :attr:`Mode.total`: 1 in a call of a deferred step,
    whose gradients are divided at its end. None: what the plan counts."""
    _under: dict[Aggregation, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def active_tokens(self) -> Ints:
        """n_s, int64 ``[S]``."""
        return self.sequences.active_tokens

    @cached_property
    def active_tokens_S1(self) -> Ints:
        """:attr:`active_tokens` and a 0: what a padding sequence has, which is -1."""
        counted_S1 = np.append(self.active_tokens, 0)
        counted_S1.flags.writeable = False
        return counted_S1

    @property
    def counted(self) -> Counted:
        """What the step counted, in numbers over all ranks."""
        return self.counted_totals.counted or Counted.of_known(self.totals)

    @property
    def counted_totals(self) -> StepTotals:
        """The totals that the aggregation counts: without what is left out, if it does that."""
        kept = None if self.aggregation.count_left_out else self.totals.kept
        return kept or self.totals

    @property
    def is_left_out_S(self) -> npt.NDArray[np.bool_] | None:
        """Which of this rank's sequences leave the counts; None if the aggregation counts all."""
        return None if self.aggregation.count_left_out else self.sequences.left_out

    @property
    def counted_sequences(self) -> CheckedSequences:
        """This rank's sequences without them."""
        return self.sequences if self.is_left_out_S is None else self.sequences.kept

    @cached_property
    def counts(self) -> ModeCounts:
        """The step's counts as the aggregation counts them.

        Raises :class:`PlanError` if it counts weights and none were passed.
        """
        return ModeCounts.of(
            self.aggregation, self.counted_totals, self.sequences.num_microbatches or 1
        )

    @cached_property
    def counts_of_weights(self) -> ModeCounts:
        """The counts that the weights are over: :attr:`counts` with :attr:`total` in its place."""
        return self.counts if self.total is None else self.counts.with_total(self.total)

    @cached_property
    def counted_total(self) -> float:
        """What the plan counts for the mode's :attr:`Mode.total`, 1 if it has none.

        Raises :class:`PlanError` if it is not known.
        """
        total = MODES[self.aggregation.mode].total
        return 1.0 if total is None else float(getattr(self.counts, total))

    @property
    def counted_S(self) -> Ints | Floats:
        """What the aggregation counts of each counted sequence: n_s, or its token weights' sum.

        Raises :class:`PlanError` if it counts weights and none were passed.
        """
        if self.aggregation.count != "weights":
            return self.counted_sequences.active_tokens
        self.counts  # noqa: B018  raises
        return cast(Floats, self.counted_sequences.token_weight_sums)

    @cached_property
    def weight_S(self) -> Floats:
        """w_s, float64 ``[S]``, a read-only array, computed once; 0 for no active tokens.

        Raises :class:`PlanError` as :attr:`StepPlan.weights` does.
        """
        weight_S = weights_of_rank(self) / self.num_calls
        if self.is_left_out_S is not None:
            counted_S, weight_S = weight_S, np.zeros(len(self.active_tokens))
            weight_S[~self.is_left_out_S] = counted_S
        weight_S.flags.writeable = False
        return weight_S

    @cached_property
    def weight_S1(self) -> Floats:
        """:attr:`weight_S` and a 0, likewise."""
        weight_S1 = np.append(self.weight_S, 0.0)
        weight_S1.flags.writeable = False
        return weight_S1

    @cached_property
    def weight_A(self) -> Floats:
        """w_s of every counted sequence of all ranks, ``[A]``, if gathered.

        Not over :attr:`num_calls`.
        """
        weight_A = weights_of_all(self)
        weight_A.flags.writeable = False
        return weight_A

    @cached_property
    def expected_weight(self) -> float | None:
        """The sum over all active tokens of w m v by the plan's counts; None if not known.

        1 for a mean (V/B or Q/P of it if empty ones count), N/(B L), N/B or N/C for a
        sum over a constant; over :attr:`num_calls`.
        """
        total = weight_sum(self)
        return None if total is None else total / self.num_calls

    @property
    def planned(self: _Weights) -> list[_Weights]:
        """This plan, and each under another aggregation: of terms, of shadows, of their terms."""
        others = list(self._under.values())
        return [self, *(one for other in others for one in other.planned)]

    def under(self: _Weights, aggregation: Aggregation | str) -> _Weights:
        """Plan the same step under a different aggregation, without a collective; made once.

        Args:
            aggregation: An :class:`Aggregation`, or a mode's name, which counts what this plan
                counts, empty samples and prompts included or not.

        Returns:
            The plan, with the same sequences and totals.

        Raises:
            PlanError: For any other type.
        """
        if not isinstance(aggregation, (Aggregation, str)):
            raise PlanError(f"got {aggregation!r}, expected an Aggregation or the name of a mode")
        if isinstance(aggregation, str):
            own = self.aggregation
            counts_empty = own.count_empty if aggregation in MODES else None  # an alias says so
            aggregation = Aggregation(
                aggregation,
                count=own.count,
                count_empty=counts_empty,
                count_left_out=own.count_left_out,
            )
        if aggregation not in self._under:
            plan = replace(self, aggregation=aggregation)
            check_divisor(plan)
            self._under[aggregation] = plan
        planned: _Weights = self._under[aggregation]
        return planned


def check_divisor(plan: StepWeights) -> None:
    """Warn once if ``constant`` divides by less than the longest sample."""
    if plan.aggregation.mode == "constant":
        warn_of_divisor(plan.aggregation.divisor or 1.0, [plan.counted_totals.longest_sample or 0])


def warn_of_divisor(divisor: float, tokens: IntsLike) -> None:
    """Warn, once per process, if L is below the longest of some responses."""
    longest = int(np.max(tokens, initial=0))
    if longest > divisor:
        warn_once(
            "divisor",
            f"constant divides by {divisor:g}, and a sample has {longest} tokens: the divisor L is "
            "the longest response that generation allows, and the gradient grows with its inverse; "
            "check --loss-aggregation-divisor (divisor=)",
        )
