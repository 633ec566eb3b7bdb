"""The step's integers, and the one weight per sequence that follows from them.

A step is described by counts that are known before its first forward: n_s active tokens
per sequence, and which sample, prompt and microbatch the sequence belongs to. :func:`plan_step`
counts over the data-parallel group and decides every weight; nothing after it branches
on the mode. Counting communicates; making weights and reducers does not.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import PlanError, message_of
from megatron_lossagg.reduction.aggregation import Aggregation, Options, load_reducer_factory
from megatron_lossagg.reduction.exchange import Exchange, to_begin
from megatron_lossagg.reduction.faults import looks_again
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.sequences import Checked, Sequences
from megatron_lossagg.reduction.step_state import StepState
from megatron_lossagg.reduction.table import (
    StepTotals,
    Table,
    WhichStep,
    check_totals,
    count_step,
    known_step,
)
from megatron_lossagg.reduction.weighted import StepWeights, check_agreement, check_divisor

_DEFAULTS = Options()
_NOTHING = Sequences(active_tokens=[]).checked()
"""What a rank with a fault brings to the gather."""
_steps_with_totals: Counter[tuple[int, ...] | None] = Counter()
"""Steps that were planned with passed totals, of each group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan(StepWeights):
    """One optimizer step under one aggregation: the weights, and what they came from.

    :func:`plan_step` makes it.

    Examples:
        >>> plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[2000, 500, 0]))
        >>> plan.weights.tolist()
        [0.0004, 0.0004, 0.0]
        >>> plan.under("sample_sum").weights.sum().item()  # 1/B of each sequence that has tokens
        0.6666666666666666
    """

    group_ranks: tuple[int, ...] | None
    """Global ranks that were counted over; None if no group was passed."""
    state: StepState = field(repr=False)
    _weights_in: dict[torch.dtype, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def weights(self) -> Tensor:
        """w_s, float64 ``[S]`` on the CPU; 0 for a sequence with no active tokens, never NaN.

        A copy: changing it changes nothing that is trained.

        Raises:
            PlanError: If the mode lacks a total or an id, for ``custom``, and for a weight beyond
                float32.
        """
        return torch.from_numpy(self.weight_S.copy())

    def reducer(
        self,
        sequences: IntsLike,
        mask: Tensor,
        layout: Layout,
        *,
        token_weights: Tensor | None = None,
    ) -> Microbatch:
        """Make one microbatch without a step: check its mask, slice it, look up its weights.

        No collective; no host sync for a CUDA mask, one for CUDA ``sequences``.

        Args:
            sequences: For each segment its position in ``Sequences``, -1 for a padding sequence.
            mask: The microbatch's whole 0/1 loss mask (after rejection, if tokens are rejected),
                packed like its tokens, before slicing for context parallelism (already this rank's
                for ``Layout.local``). ``mask[i]`` belongs to the loss at logit i, the prediction of
                token i + 1: shift it before packing, never after slicing; it is 0 at padding.
            layout: Which of its tokens this rank holds.
            token_weights: v_t of each position of ``mask``, floating or integer, required by
                ``count="weights"``: constants, finite, not negative, 0 where the mask is 0 (unless
                tokens are rejected), and each sequence's sum is the one that was counted.

        Returns:
            The microbatch, to be called with this rank's per-token losses.

        Raises:
            ReducerError: For a mask, sequences or token weights that do not fit what was counted. A
                CUDA mask's faults are raised when the step finishes.
        """
        return Microbatch.of(self, sequences, mask, layout, token_weights)

    def weights_in(self, dtype: torch.dtype) -> tuple[npt.NDArray[Any], Tensor | None]:
        """Return :attr:`weight_S1` in float32 or float64, and w if all that count have one.

        Made once for a dtype.
        """
        made = self._weights_in.get(dtype)
        if made is None:
            weight_S1 = self.weight_S1.astype(str(dtype).removeprefix("torch."))
            value_S = weight_S1[:-1][self.active_tokens > 0]  # what weighs nothing may be kept
            has_one = len(value_S) and value_S.min() == value_S.max()
            single = torch.from_numpy(value_S[0, ...]) if has_one else None
            made = self._weights_in[dtype] = weight_S1, single
        return made

    def check(self) -> None:
        """Raise the first fault that was found on devices in this step, if any.

        Finishing a step calls it; call it yourself without a :class:`LossAggregator`. One host
        sync for each device that recorded something, no collective.

        Raises:
            ReducerError: On this rank only; and in a step ContractError.
        """
        self.state.faults.raise_first()


def plan_step(
    aggregation: Aggregation,
    sequences: Sequences | Callable[[], Sequences],
    *,
    group: ProcessGroup | None = None,
    totals: StepTotals | None = None,
    options: Options = _DEFAULTS,
    fault: str = "",
    forward_only: bool | None = None,
    iteration: int | None = None,
) -> StepPlan:
    """Count the step over ``group`` and decide the weight of every sequence.

    Without totals: one all-gather of 12 integers per rank. A second one, of one number and more
    per sequence, if ids or weights are passed or the mode (or a shadow) needs every sequence; with
    a weights function one of 2 KiB. Each is one host sync. Further ones only bring an error's
    message to every rank. A sample with more active tokens than the divisor of
    ``constant``, and ids that look as if they were not global, give one warning per process, on all
    ranks alike unless totals are passed.

    Args:
        aggregation: Which loss is trained.
        sequences: What this data-parallel rank trains in the step; or a function that makes them,
            whose error every rank raises.
        group: The dense data-parallel group *without* context parallelism, as
            ``LossAggregator.dp_group``; every rank of it calls.
        totals: The step's counts if the caller knows them; then no collective is made, and ids are
            refused. With a group as well, its steps 1, 2, 4, ... and then each 64th are counted all
            the same, and totals that differ from the counts are refused.
        options: The options of the run.
        fault: Why this rank has no counts, if so: the others of the group do not wait for it but
            raise the same message.
        forward_only: Whether it is of an evaluation; ranks that begin a different kind of step are
            refused. None: not known, and not compared.
        iteration: The number of the training step, likewise.

    Returns:
        The plan, whose ``weights`` has w_s of each of this rank's sequences.

    Raises:
        PlanError: For wrong counts or ids, and if the ranks disagree on the aggregation, on an
            option or on the kind or number of the step, with the same message on every rank of the
            group. With totals an error is this rank's only, and names it.

    Examples:
        >>> sequences = Sequences(active_tokens=[2000, 500, 8000])
        >>> plan_step(Aggregation("sample_sum"), sequences).weights.tolist()
        [0.3333333333333333, 0.3333333333333333, 0.3333333333333333]
    """
    if totals is None and group is None and not _is_alone():
        raise PlanError(
            f"this process is one of {dist.get_world_size()} and no group was passed: pass "
            "group=aggregator.dp_group, or totals= if the step's counts are known"
        )
    exchange = Exchange(group, to_begin(forward_only))
    checked, error = _NOTHING, None
    try:
        given = sequences() if callable(sequences) else sequences
        if fault:
            raise PlanError(fault)
        _check_arguments(aggregation, options)
        checked = given.checked()
    except Exception as found:  # of any type: the others of the group hear of it as they count
        error = found
        options = options if isinstance(options, Options) else _DEFAULTS
    which = WhichStep.of(forward_only, iteration)
    settings = [*(f"{name} {value!r}" for name, value in vars(options).items()), f"{totals}"]

    def counted() -> Table:
        shadows = options.shadows.values()
        told = (aggregation, checked, error, exchange, settings, which)
        return count_step(*told, shadows=shadows)

    if totals is None:
        plan = _weighted(aggregation, checked, counted(), exchange, options)
    else:
        if group is not None and looks_again(_steps_with_totals[exchange.ranks] + 1):
            check_totals(totals, counted().totals)
        _steps_with_totals[exchange.ranks] += 1  # on all ranks: what raises below may be one's
        try:
            if error is not None:
                raise PlanError(message_of(error)) from error
            known_size = exchange.size if group is not None or _is_alone() else None
            table = known_step(checked, totals, known_size)
            plan = _weighted(aggregation, checked, table, exchange, options)
        except PlanError as found:
            raise PlanError(f"{exchange.name()}: {found}") from found.__cause__
    if plan.counts.is_empty:
        # If all are left out, another term may count them: no error.
        _empty_step(replace(options, empty_step="zero") if plan.totals.active_tokens else options)
    check_divisor(plan)
    return plan


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _weighted(
    aggregation: Aggregation,
    sequences: Checked,
    table: Table,
    exchange: Exchange,
    options: Options,
) -> StepPlan:
    """Make the plan and all weights of the run: what a mode lacks raises before any forward."""
    plan = StepPlan(
        aggregation=aggregation,
        sequences=sequences,
        table=table,
        group_ranks=exchange.ranks,
        state=StepState(rejects_tokens=options.rejects_tokens),
    )
    if aggregation.weights_function is not None:
        check_agreement(plan, exchange)
    for one in (plan, *(plan.under(shadow) for shadow in options.shadows.values())):
        one.weigh()
    return plan


def _check_arguments(aggregation: Aggregation, options: Options) -> None:
    if not isinstance(aggregation, Aggregation):
        raise PlanError(f"got {aggregation!r}, expected an Aggregation")
    if aggregation.reducer_path is not None:
        load_reducer_factory(aggregation.reducer_path)
    if not isinstance(options, Options):
        raise PlanError(f"got {options!r}, expected Options")


def _empty_step(options: Options) -> None:
    message = "the plan counts no active tokens: its loss and gradient are zero"
    if options.empty_step == "error":
        raise PlanError(
            f"{message}; --loss-aggregation-empty-step error (Options.empty_step) was set: "
            "set zero to continue"
        )
    warnings.warn(message, RuntimeWarning, stacklevel=3)
