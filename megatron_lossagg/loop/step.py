"""One schedule call: the losses of its microbatches times K, and the guards around them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megatron_lossagg.contract.finalize import FinalizeHook
from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.contract.live import is_rerunning
from megatron_lossagg.contract.outputs import (
    Means,
    Outputs,
    check_coefficient,
    check_reported,
    check_scalar,
    outputs,
    shadow_reports,
)
from megatron_lossagg.contract.scaling import LossScaling, Scaling
from megatron_lossagg.contract.sequence_tracker import SequenceTracker
from megatron_lossagg.contract.side_loss_scale import SideLossScale, weight_sum_of
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards import guards_of
from megatron_lossagg.guards.evaluation import refuse_training, without_gradient
from megatron_lossagg.guards.guard import ScheduleCalls, StepFacts
from megatron_lossagg.guards.step_guards import StepGuards
from megatron_lossagg.loop.first_step import record_first_step
from megatron_lossagg.record.writer import StepRecorder
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.checks.positions import check_positions
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.options import Guards
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.reducer import Reducer
from megatron_lossagg.weigh.listen import is_in_backward
from megatron_lossagg.weigh.told import tell

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    """Let a compiled loss_func call it as it is: it reads counts, masks and where tensors lie."""
    return cast(_Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class MicrobatchLoss:
    """The loss of one microbatch on this rank; made by :meth:`Step.microbatch`."""

    def __init__(self, step: Step, reducer: Reducer) -> None:
        self._step = step
        self._reducer = reducer
        self._shadows: dict[str, Tensor] = {}
        self._others: list[Tensor] = []
        """Partial losses of an evaluation under another aggregation than the step's."""

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self._reducer.layout

    @_untraced
    def reduce(self, losses: Tensor, aggregation: Aggregation | str | None = None) -> Tensor:
        """Sum this rank's per-token losses with the step's weights: a 0-dim partial loss.

        ``losses``: in the layout's order; a masked one may be anything. ``aggregation``: another
        mode over the same tokens, without a collective. See :meth:`Reducer.__call__`.

        The first call under the step's own aggregation is what ``Options.shadow`` reports.
        """
        reducer = self._reducer if aggregation is None else self._reducer.under(aggregation)
        partial_loss = reducer(losses)
        if reducer.plan.aggregation != self._reducer.plan.aggregation:
            if self._step.evaluates:
                self._others.append(partial_loss)
        elif self._step.shadows and not self._shadows:
            self._shadows = self._shadowed(losses)
        return partial_loss

    @_untraced
    def outputs(
        self,
        loss: Tensor,
        report: Mapping[str, Tensor] | None = None,
        means: Means | None = None,
        *,
        coefficient: float = 1.0,
    ) -> Outputs:
        """Make what loss_func returns: ``(loss, num_tokens, report)``.

        ``loss``: 0-dim, the sum of all terms' partial losses. ``report``: partial losses by name.
        ``means``: local sums with their counts by name, of what is a mean already (clip fraction,
        reward): Megatron adds both over the step and divides, so one mean over the step is logged.
        ``coefficient``: what multiplies the partial loss under the step's own aggregation in
        ``loss``, such as 0.5 for ``0.5 * mb.reduce(value_losses)``. It changes no number: the step
        refuses a partial loss that arrives in the backward pass with another one. Do not divide by
        M, DP, CP or a number of tokens: K compensates what Megatron does.

        The loss is ``loss * K`` in fp32 or better with storage of its own (the schedule scales it
        in place); num_tokens an int32 0-dim tensor on its device; each report a detached
        ``[partial loss, 1 / (M DP CP)]``; each mean a detached ``[sum, count]``. Adds
        ``lossagg/weight_sum`` and ``lossagg/weight_expected``. The weight-sum check sees the
        weights as sliced and masked, not what is done to a partial loss afterwards. No collective,
        no host sync.

        In a ``forward_only`` step both entries of a report are times D, the total of the step's
        mode (N, B, P or Z): added over evaluation steps they divide to the mode's loss over all
        that was evaluated. D is 1 for a mode without a total, and for what :meth:`reduce` returned
        under another aggregation: that is a mean over the steps, as under ``token_sum``.

        Raises :class:`ContractError` if :meth:`reduce` was not called under the step's aggregation
        for a microbatch with tokens, if this is of another step, and if the loss needs no gradient
        in a training step. In a ``forward_only`` step it is detached.
        """
        check_scalar("loss", loss)
        check_coefficient(coefficient)
        report, means = report or {}, means or {}
        check_reported(report, means)
        others = [name for name, value in report.items() if self._is_other(value)]
        made = self._step._outputs(loss, self._reducer, report, means, coefficient, others)
        made[2].update(self._shadow_reports(self._shadows))
        return made

    @_untraced
    def shadow(self, losses: Tensor) -> dict[str, Tensor]:
        """Report what each mode of ``Options.shadow`` would give for losses that others train.

        In place of :meth:`outputs`: the step checks at its end what it checks of a trained one.
        """
        shadows = self._shadowed(losses)
        self._step._note_shadows(self._reducer, losses, shadows)
        return self._shadow_reports(shadows)

    def _is_other(self, value: object) -> bool:
        """Whether it is a partial loss under another aggregation, detached or not."""
        return isinstance(value, Tensor) and any(
            value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            for other in self._others
        )

    def _shadow_reports(self, shadows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plan, modes = self._reducer.plan, self._step.shadows
        totals = {name: self._step.total_of(plan.under(modes[name])) for name in shadows}
        return shadow_reports(shadows, totals, self._step.scaling)

    def _shadowed(self, losses: Tensor) -> dict[str, Tensor]:
        """Sum the losses under each shadow's mode."""
        shadows = self._step.shadows.items()
        return {name: self._reducer.shadow(losses, mode) for name, mode in shadows}


class Step:
    """One schedule call, begun by :meth:`LossAggregator.step`.

    A context manager: leaving it finishes the step, before the optimizer's. An exception inside
    goes through unchanged, and nothing is checked then.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[Any],
        groups: LiveGroups,
        loss_scaling: LossScaling,
        plan: StepPlan | None,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool | int = False,
        calls: ScheduleCalls | None = None,
        shadows: Mapping[str, Aggregation] | None = None,
        follows: bool = False,
        recorder: StepRecorder | None = None,
        guards: Guards | None = "error",
        is_weighed: bool = False,
    ) -> None:
        self.num_microbatches = num_microbatches
        """M of this schedule call."""
        self.forward_only = forward_only
        self.evaluates = forward_only
        """Whether its reports add up over steps; not if it only shadows what is trained."""
        self.is_finished = False
        self.has_passed = False
        """Whether it has finished, with nothing wrong."""
        self.is_weighed = is_weighed
        """Whether what costs is looked at too: in some training steps of a run."""
        self.recorded: Mapping[str, Any] = {}
        """What its guards found for the record."""
        self.shadows = shadows or {}
        """The aggregations whose losses are reported in addition to the trained one, by name."""
        self.scaling = Scaling(
            loss_scaling=loss_scaling,
            num_microbatches=num_microbatches,
            dp_cp_size=groups.dp_cp_size,
            active_tokens=None if plan is None else plan.totals.active_tokens,
            is_deferred=plan is not None and plan.total is not None,
        )
        """What Megatron does to this step's loss, and K."""
        self._groups = groups
        self._plan = plan
        self._recorder = recorder
        self._tracker = SequenceTracker(
            num_sequences=0 if plan is None else len(plan.active_tokens),
            num_microbatches=num_microbatches,
            is_rerunning=is_rerunning,
        )
        self._finalize: FinalizeHook | None = None
        self.side_losses: SideLossScale | None = None
        """The scale of MoE and MTP losses; None if it stays Megatron's."""
        if follows and not forward_only:
            weight_sum = None if plan is None else weight_sum_of(plan)
            self.side_losses = SideLossScale(chunks[0], weight_sum)
            weakref.finalize(self, self.side_losses.end)
        if plan is not None:
            self._facts = StepFacts(
                chunks=chunks,
                groups=groups,
                scaling=self.scaling,
                plan=plan,
                tracker=self._tracker,
                forward_only=forward_only,
                accumulates=accumulates,
                calls=calls or ScheduleCalls(),
                is_weighed=is_weighed,
            )
            self._guards = self._watch(self._facts, guards)

    def _watch(self, facts: StepFacts, kind: Guards | None) -> StepGuards:
        """Let the guards hear of reducers and of the finalize function."""
        found = [] if kind is None else guards_of(facts)
        guards = StepGuards(found, facts, only_warns=kind == "warn")
        facts.plan.state.begin(_untraced(partial(guards.tell, "on_reduce")))
        if kind is not None and not self.forward_only:
            self._listen_to_finalize(partial(guards.tell, "on_finalize"))
        return guards

    def _listen_to_finalize(self, hears: Callable[[Tensor | None], None]) -> None:
        self._finalize = FinalizeHook(self._facts.config, hears)
        # A step that is given up without its end is collected.
        weakref.finalize(self, self._finalize.end)

    def __enter__(self) -> Step:
        """Return the step."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the step, unless an exception ends it."""
        if kind is None:
            self.finish()
        self.end()

    @property
    def plan(self) -> StepPlan:
        """The plan; :class:`ContractError` on a pipeline stage that gave no counts."""
        if self._plan is None:
            raise ContractError(
                "this pipeline stage computes no loss and began the step without counts: call "
                "step.microbatch in loss_func, which runs on the last stage"
            )
        return self._plan

    @property
    def k(self) -> int:
        """K: M DP CP in the average loss scaling, N in the per-token loss scaling.

        1 on a pipeline stage without counts, if N is 0, and per-token in a deferred step.
        """
        return 1 if self._plan is None else self.scaling.k

    @property
    def own_numbers(self) -> str:
        """What context-parallel ranks must pass alike and no count shows, as ``name=hash``."""
        return "" if self._plan is None else self._plan.sequences.own

    @property
    def is_left_open(self) -> bool:
        """Whether loss_func ran for it, on this rank, and nothing has finished it."""
        return self._tracker.num_calls > 0 and not self.is_finished

    @_untraced
    def microbatch(
        self,
        sequences: IntsLike,
        mask: Tensor,
        *,
        cu_seqlens: IntsLike | None = None,
        lengths: IntsLike | None = None,
        layout: Layout | None = None,
        token_weights: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> MicrobatchLoss:
        """Check and slice a microbatch's mask, and look up its weights; in loss_func.

        ``sequences``, ``mask``, ``token_weights``: as in :meth:`StepPlan.reducer`. One of three
        says which tokens this rank holds. ``cu_seqlens``: padded offsets of packed sequences.
        ``lengths``: of the slices here, with a mask that the framework has sliced. ``layout``: any
        other. ``positions``: the position ids of this rank's tokens, which are compared with the
        layout's; None compares nothing. Raises :class:`ContractError` for a layout of a different
        context-parallel rank, or of a split that is not the model's. One host sync each for
        ``sequences``, ``cu_seqlens`` and ``lengths`` on CUDA.
        """
        plan = self.plan  # which stages without counts do not have
        num_given = (cu_seqlens is not None) + (lengths is not None) + (layout is not None)
        if num_given != 1:
            raise ContractError(
                f"got {num_given} of cu_seqlens=, lengths= and layout=: pass exactly one of them, "
                "which says which tokens this rank holds"
            )
        if cu_seqlens is not None:
            layout = self._groups.thd(cu_seqlens)
        elif lengths is not None:
            layout = self._groups.local(lengths)
        assert layout is not None
        self._guards.tell("on_microbatch", layout)
        reducer = plan.reducer(sequences, mask, layout, token_weights=token_weights)
        if not self.forward_only:
            tell(plan.aggregation, plan.sequences, sequences)
        if positions is not None:
            found = reducer.microbatch
            past_end, faults = found.num_past_end, plan.state.faults
            check_positions(positions, found.keep, found.segments, past_end, faults)
        return MicrobatchLoss(self, reducer)

    def _note_shadows(
        self, reducer: Reducer, losses: Tensor, shadows: Mapping[str, Tensor]
    ) -> None:
        """Note a microbatch that only shadows are reported of."""
        self._tracker.add(reducer.microbatch.segments.own_sequences)
        for partial_loss in shadows.values():
            self._guards.tell("on_reduce", reducer, losses, partial_loss)

    def _outputs(
        self,
        loss: Tensor,
        reducer: Reducer,
        report: Mapping[str, Tensor],
        means: Means,
        coefficient: float,
        others: Collection[str],
    ) -> Outputs:
        """Make what loss_func returns; see :meth:`MicrobatchLoss.outputs`."""
        if self.is_finished:
            raise ContractError(
                "got a microbatch of a step that has ended: make it with step.microbatch of the "
                "running step"
            )
        if self.forward_only and loss.requires_grad:
            loss = self._detached(loss)
        cp_rank = self._groups.cp_rank
        is_recomputed = is_in_backward()  # a checkpoint calls loss_func again
        if not is_recomputed:
            if self._tracker.is_at_start:
                self._guards.tell("on_first_outputs")
            self._guards.tell("on_outputs", reducer, loss, coefficient)
            self._tracker.add(reducer.microbatch.segments.own_sequences)
            if self._recorder is not None:
                is_first = self._tracker.num_calls == 1 and not self.scaling.is_deferred
                self._recorder.add(reducer, is_first=is_first)
        return outputs(
            loss,
            reducer,
            self.scaling,
            cp_rank=cp_rank,
            report=report,
            means=means,
            total=self.total_of(reducer.plan),
            without_total=others,
        )

    def total_of(self, plan: StepPlan) -> float:
        """D: what both entries of a report under a plan are times; 1 in a training step."""
        return plan.counted_total if self.evaluates else 1.0

    def _detached(self, loss: Tensor) -> Tensor:
        """Detach an evaluation's loss; a schedule that trains it is refused when it finalizes."""
        if self._finalize is None:
            self._listen_to_finalize(refuse_training)
        return without_gradient(loss)

    def finish(self) -> None:
        """Check, after the schedule and before the optimizer, that the step is complete.

        Every sequence and microbatch arrived (on the last pipeline stage, the only one that calls
        loss_func), no guard of :data:`megatron_lossagg.guards.GUARDS` and no check on a device
        found a fault: ``docs/reference/checks.md`` lists them all. Raises :class:`ContractError` or
        :class:`ReducerError` on this rank. One host sync for each device that recorded something;
        with context parallelism one all-gather over its group; with ``Options.record`` one over
        data- and context-parallel ranks. ``with`` calls it.
        """
        if self.is_finished:
            return
        fault = self._fault()
        self.end()
        if self._plan is not None:
            self._guards.together(has_failed=bool(fault))
        if fault:
            raise ContractError(fault)
        if self._plan is not None:
            self._plan.check()
        if self._recorder is not None:
            self.recorded = self._guards.recorded()
            if not self.scaling.is_deferred:
                self._recorder.finish([self.plan], self.scaling, self._groups, self.recorded)
        self.has_passed = True
        record_first_step()

    def _fault(self) -> str:
        """Say what is wrong on this rank, empty if nothing is."""
        try:
            self._tracker.finish(may_be_empty=not self._groups.is_last_stage)
        except ContractError as error:
            return str(error)
        return "" if self._plan is None else self._guards.finish()

    def end(self) -> None:
        """End the step without a check."""
        self.is_finished = True
        if self._finalize is not None:
            self._finalize.end()
        if self.side_losses is not None:
            self.side_losses.end()
        if self._plan is not None:
            self._plan.state.end()
            self._guards.end()
