"""The weight of each sequence, and their sum over the step's active tokens: the division.

``modes.py`` has the denominators, ``mode_counts.py`` the counts in them (``counts.py`` gathers
those), and ``step_weights.py`` keeps what is computed here.

Shape suffixes: S = sequences of this data-parallel rank in the step; A = of all ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from megatron_lossagg.errors import LossAggregationError, PlanError
from megatron_lossagg.reduction.modes import CUSTOM, MODES
from megatron_lossagg.reduction.own_weights import StepCounts
from megatron_lossagg.reduction.sequences import Floats

if TYPE_CHECKING:
    from megatron_lossagg.reduction.exchange import Exchange
    from megatron_lossagg.reduction.integers import Ints
    from megatron_lossagg.reduction.mode_counts import ModeCounts
    from megatron_lossagg.reduction.step_weights import StepWeights

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def weights_of_rank(plan: StepWeights) -> Floats:
    """Compute w_s of this rank's sequences, ``[S]``; see ``StepPlan.weights``."""
    aggregation, omega_S = plan.aggregation, plan.counted_sequences.sequence_weight
    if aggregation.mode == CUSTOM:
        raise PlanError(
            f"{aggregation}: only the custom reducer knows its weights; for those of "
            "a mode use plan.under(mode).weights"
        )
    if MODES[aggregation.mode].expected is None:
        own: slice = plan.counts.table.own
        return plan.weight_A[own]
    # What all ranks know is checked, so that none waits for another.
    _check_size(plan, _by_denominator(plan, plan.counts_of_weights.of_all_samples(), None))
    weight_S = _by_denominator(plan, plan.counts_of_weights, plan.counted_S)
    if omega_S is None:
        return weight_S
    is_of_all = aggregation.mode != "microbatch_token_mean"  # n_mb of other ranks is not gathered
    if is_of_all and plan.counts.known("table") is not None:
        plan.weight_A  # noqa: B018  raises for the weights of all ranks
    weighted_S = weight_S * omega_S
    _check_size(plan, weighted_S[(weight_S > 0) & (omega_S > 0)])
    return weighted_S


def weights_of_all(plan: StepWeights) -> Floats:
    """Compute w_s of every sequence of the step, ``[A]``, the same on every rank."""
    every, table = plan.counts_of_weights.of_all_sequences(), plan.counts.table
    function = plan.aggregation.weights_function
    if function is not None:
        base_A = function(StepCounts(every), table.counted_A > 0)
        weighs_A = base_A > 0
    else:
        base_A = _by_denominator(plan, every, table.counted_A)
        weighs_A = table.counted_A > 0
    if table.sequence_weight_A is None:
        _check_size(plan, base_A[weighs_A])
        return base_A
    weight_A: Floats = base_A * table.sequence_weight_A
    _check_size(plan, weight_A[weighs_A & (table.sequence_weight_A > 0)])
    return weight_A


def weight_sum(plan: StepWeights) -> float | None:
    """Sum w_s n_s over the step; None for a custom reducer, and without a total that it needs."""
    mode = MODES[plan.aggregation.mode]
    if mode.name == CUSTOM:
        return None
    try:
        if plan.counts.is_empty:
            return 0.0
        if mode.expected is not None and plan.sequences.sequence_weight is None:
            over = 1.0 if plan.total is None else plan.counted_total / plan.total
            return float(mode.expected(plan.counts)) * over
        return math.fsum(plan.weight_A * plan.counts.table.counted_A)
    except PlanError:  # a total that is not needed for a weight
        return None


def _by_denominator(plan: StepWeights, counts: ModeCounts, counted: Ints | Floats | None) -> Floats:
    """Divide 1 by a mode's denominators; 0 for what has nothing to weigh.

    ``counted``: what the aggregation counts of each sequence; None: one weight per denominator.
    """
    denominator = MODES[plan.aggregation.mode].denominator
    assert denominator is not None
    with np.errstate(all="ignore"):  # n_b, n_mb and k_c of an empty one are 0
        value = np.asarray(denominator(counts), dtype=np.float64)
        if counted is None:
            return 1.0 / value[value > 0]
        return np.where(counted > 0, 1.0 / value, 0.0)


def _check_size(plan: StepWeights, weights: Floats) -> None:
    """Refuse weights beyond float32."""
    beyond = weights[~((weights >= _LEAST) & (weights <= _MOST))]
    if len(beyond) and not plan.counts.is_empty:
        own = plan.aggregation.weights_function
        what = f"the weights function {own.path}" if own else plan.aggregation
        raise PlanError(
            f"got the weight {beyond[0]} of a sequence, beyond what float32 holds, from {what}: "
            "change the divisor, the exponent or the weights"
        )


SAME_SUMS = 1e-9
"""By how much, relatively, sums of the same weights may differ between ranks."""


def sums_of(weights: Floats) -> list[float]:
    """Return two sums, by which ranks compare weights that may differ by rounding."""
    drawn = np.random.default_rng(0).random(len(weights))
    return [math.fsum(weights), math.fsum(weights * drawn)]


def check_agreement(plan: StepWeights, exchange: Exchange) -> None:
    """Refuse own weights that are not the same on all ranks; raises :class:`PlanError` on all.

    A function may be another one on a node with an older file, and may fail on one rank only. One
    all-gather of three numbers, and one for an error's message.
    """
    fault: LossAggregationError | None = None
    sums = [0.0, 0.0]
    try:
        sums = sums_of(plan.weight_A)
    except LossAggregationError as error:
        fault = error
    own = np.array([fault is not None, *sums], dtype=np.float64).view(np.int64)
    of_ranks = np.ascontiguousarray(exchange.integers(own)).view(np.float64)
    if fault is not None and exchange.size == 1:
        raise fault
    if of_ranks[:, 0].any():
        for rank, text in enumerate(exchange.messages("" if fault is None else str(fault))):
            if text:
                raise PlanError(f"{exchange.name(rank)}: {text}") from fault
    sums_W2 = of_ranks[:, 1:]
    is_other_W = ~np.isclose(sums_W2, sums_W2[0], rtol=SAME_SUMS, atol=0).all(axis=1)
    if is_other_W.any():
        raise PlanError(
            f"{plan.aggregation}: {exchange.name(int(is_other_W.argmax()))} computes other weights "
            "than rank 0: install the same code on every node, and compute from the counts only"
        )
