"""One step under one aggregation: the weight of each sequence, and what ranks compare of it.

The counts are those of ``table.py``, the formula is the mode's in ``modes.py``. Imports NumPy and
no torch.

Shape suffixes: S = sequences of this data-parallel rank in the step; A = of the table: all ranks',
or this rank's; W = ranks of the group; I = distinct ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import Ints, IntsLike
from megatron_lossagg.reduction.modes import CUSTOM, MODES
from megatron_lossagg.reduction.sequences import Checked, Floats
from megatron_lossagg.reduction.table import Counted, StepCounts, StepTotals, Table

if TYPE_CHECKING:
    from megatron_lossagg.reduction.exchange import Exchange

_Weights = TypeVar("_Weights", bound="StepWeights")
_Numbers = TypeVar("_Numbers", Ints, Floats)
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepWeights:
    """One optimizer step under one aggregation: the part of a :class:`StepPlan` that is NumPy."""

    aggregation: Aggregation
    sequences: Checked
    """What was planned, as read-only arrays ``[S]``."""
    table: Table = field(repr=False)
    num_calls: int = field(default=1, repr=False)
    """Schedule calls of one optimizer step, each planned by itself, which train their mean."""
    total: float | None = None
    """What stands in place of the mode's own :attr:`Mode.total`: 1 in a call of a deferred step,
    whose gradients are divided at its end. None: what the plan counts."""
    _under: dict[Aggregation, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def totals(self) -> StepTotals:
        """Counts of the whole step in tokens, with what is left out."""
        return self.table.totals

    @property
    def counted_table(self) -> Table:
        """The rows that the aggregation counts: without what is left out, if it does that."""
        return self.table if self.aggregation.count_left_out else self.table.kept

    @property
    def counted(self) -> Counted:
        """What the step counted, in numbers over all ranks."""
        return self.counted_table.counted

    @cached_property
    def counts(self) -> StepCounts:
        """The step's counts as the aggregation counts them.

        Raises :class:`PlanError` if it counts weights and none were passed.
        """
        return StepCounts(self.table, self.aggregation)

    @cached_property
    def counted_total(self) -> float:
        """What the plan counts for the mode's :attr:`Mode.total`, 1 if it has none.

        Raises :class:`PlanError` if it is not known.
        """
        total = MODES[self.aggregation.mode].total
        return 1.0 if total is None else float(getattr(self.counts, total))

    @property
    def active_tokens(self) -> Ints:
        """n_s, int64 ``[S]``."""
        n_S: Ints = self.sequences.active_tokens
        return n_S

    @cached_property
    def active_tokens_S1(self) -> Ints:
        """:attr:`active_tokens` and a 0: what a padding sequence has, which is -1."""
        return _and_zero(self.active_tokens)

    @property
    def is_left_out_S(self) -> npt.NDArray[np.bool_] | None:
        """Which of this rank's sequences leave the counts; None if the aggregation counts all."""
        return None if self.aggregation.count_left_out else self.sequences.left_out

    @property
    def counted_sequences(self) -> Checked:
        """This rank's sequences without them."""
        return self.sequences if self.is_left_out_S is None else self.sequences.kept

    @cached_property
    def weight_A(self) -> Floats:
        """w_s of every counted row, not over :attr:`num_calls`; 0 for no active tokens.

        What all ranks know is checked alike, so that none waits for another.
        """
        aggregation, counts, rows = self.aggregation, self.counts, self.counted_table.rows
        mode, function = MODES[aggregation.mode], aggregation.weights_function
        if mode.name == CUSTOM:
            raise PlanError(
                f"{aggregation}: only the custom reducer knows its weights; for those of "
                "a mode use plan.under(mode).weights"
            )
        if mode.needs_all:
            what = (
                "lengths of all ranks' samples" if mode.has_exponent else "sequences of all ranks"
            )
            counts.every(f"the {what}")
        if self.total is not None:
            counts = StepCounts(self.table, aggregation, {str(mode.total): self.total})
        weighs_A = counts.n_s > 0
        if function is not None:
            weight_A = function(counts, weighs_A)
            weighs_A = weight_A > 0
        else:
            assert mode.denominator is not None
            with np.errstate(all="ignore"):  # n_b, n_mb and k_c of an empty one are 0
                value_A = np.asarray(mode.denominator(counts), dtype=np.float64)
                weight_A = np.where(weighs_A, 1.0 / value_A, 0.0)
            if value_A.ndim == 0 and value_A > 0:  # also on ranks without sequences
                self._check_size(1.0 / value_A[None])
        if rows.sequence_weight is not None:
            weight_A = weight_A * rows.sequence_weight
            weighs_A = weighs_A & (rows.sequence_weight > 0)
        self._check_size(weight_A[weighs_A])
        weight_A.flags.writeable = False
        return weight_A

    @cached_property
    def weight_S(self) -> Floats:
        """w_s, float64 ``[S]``, a read-only array, computed once; 0 for no active tokens.

        Raises :class:`PlanError` as :attr:`StepPlan.weights` does.
        """
        weight_S: Floats = self.weight_A[self.counted_table.own] / self.num_calls
        if self.is_left_out_S is not None:
            kept_S, weight_S = weight_S, np.zeros(len(self.active_tokens))
            weight_S[~self.is_left_out_S] = kept_S
        weight_S.flags.writeable = False
        return weight_S

    @cached_property
    def weight_S1(self) -> Floats:
        """:attr:`weight_S` and a 0, likewise."""
        return _and_zero(self.weight_S)

    @cached_property
    def expected_weight(self) -> float | None:
        """The sum over all active tokens of w m v by the plan's counts; None if not known.

        1 for a mean (V/B or Q/P of it if empty ones count), N/(B L), N/B or N/C for a
        sum over a constant; over :attr:`num_calls`.
        """
        mode = MODES[self.aggregation.mode]
        if mode.name == CUSTOM:
            return None
        try:
            counts = self.counts
            if counts.is_empty:
                return 0.0
            if mode.expected is not None and self.sequences.sequence_weight is None:
                over = 1.0 if self.total is None else self.counted_total / self.total
                return float(mode.expected(counts)) * over / self.num_calls
            counts.every()
            return math.fsum(self.weight_A * counts.n_s) / self.num_calls
        except (PlanError, ZeroDivisionError):  # of totals that no weight of this rank needs
            return None

    def weigh(self) -> Floats | None:
        """Make the weights, for what a mode lacks raises here; None of a custom reducer.

        Raises :class:`PlanError`.
        """
        return None if self.aggregation.mode == CUSTOM else self.weight_S

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
            plan = replace(self, aggregation=aggregation, total=self._total_under(aggregation))
            check_divisor(plan)
            self._under[aggregation] = plan
        planned: _Weights = self._under[aggregation]
        return planned

    def _total_under(self, aggregation: Aggregation) -> float | None:
        """Return :attr:`total` for a term: a C of its own is in proportion to the step's."""
        if self.total is None or MODES[aggregation.mode].total != "L":
            return self.total
        return self.total * (aggregation.divisor or 1.0) / (self.aggregation.divisor or 1.0)

    def _check_size(self, weights: Floats) -> None:
        """Refuse weights beyond float32."""
        beyond = weights[~((weights >= _LEAST) & (weights <= _MOST))]
        if len(beyond) and not self.counts.is_empty:
            own = self.aggregation.weights_function
            what = f"the weights function {own.path}" if own else self.aggregation
            raise PlanError(
                f"got the weight {beyond[0]} of a sequence, beyond what float32 holds, from "
                f"{what}: change the divisor, the exponent or the weights"
            )


def _and_zero(values_S: _Numbers) -> _Numbers:
    """Append what a padding sequence has, which is -1."""
    values_S1: _Numbers = np.append(values_S, np.zeros(1, dtype=values_S.dtype))
    values_S1.flags.writeable = False
    return values_S1


SAME_SUMS = 1e-9
"""By how much, relatively, sums of the same weights may differ between ranks."""


def sums_of(weights: Floats) -> list[float]:
    """Return two sums, by which ranks compare weights that may differ by rounding."""
    drawn = np.random.default_rng(0).random(len(weights))
    return [math.fsum(weights), math.fsum(weights * drawn)]


def check_agreement(plan: StepWeights, exchange: Exchange) -> None:
    """Refuse own weights that are not the same on all ranks; raises :class:`PlanError` on all.

    A function may be another one on a node with an older file, and may fail on one rank only. One
    all-gather, and one for a long message of an error.
    """
    with exchange.together(None if exchange.size > 1 else "") as ranks:
        ranks.own = sums_of(plan.weight_A)
    sums_W2 = np.array(ranks.of_ranks)
    is_other_W = ~np.isclose(sums_W2, sums_W2[0], rtol=SAME_SUMS, atol=0).all(axis=1)
    if is_other_W.any():
        raise PlanError(
            f"{plan.aggregation}: {exchange.name(int(is_other_W.argmax()))} computes other weights "
            "than rank 0: install the same code on every node, and compute from the counts only"
        )


def check_divisor(plan: StepWeights) -> None:
    """Warn once if ``constant`` divides by less than the longest sample."""
    divisor = plan.aggregation.divisor
    if plan.aggregation.mode == "constant" and divisor is not None:  # constant requires one
        table = plan.counted_table
        samples: Any = table.ids("sample")
        lengths_I = samples.sums(table.rows.active_tokens)
        longest = [table.longest, int(lengths_I.max(initial=0))]
        warn_of_divisor(divisor, longest)


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
