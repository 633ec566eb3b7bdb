"""One schedule call: the losses of its microbatches times K, and the guards around them.

Once in a run it is said what was counted, and that the first step has ended.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.contract.finalize import FinalizeHook
from megatron_lossagg.contract.model import LiveGroups, is_rerunning
from megatron_lossagg.contract.outputs import (
    StepOutputs,
    check_coefficient,
    check_reported,
    check_scalar,
)
from megatron_lossagg.contract.scaling import LossScaling, Scaling
from megatron_lossagg.contract.side_losses import SideLossScale, weight_sum_of
from megatron_lossagg.errors import ContractError, say
from megatron_lossagg.guards import guards_of
from megatron_lossagg.guards.each_step import check_split, refuse_training, without_gradient
from megatron_lossagg.guards.guard import (
    Guard,
    ScheduleCalls,
    SequenceTracker,
    StepFacts,
    StepGuards,
)
from megatron_lossagg.record.writer import StepRecorder
from megatron_lossagg.reduction.aggregation import Aggregation, Guards
from megatron_lossagg.reduction.checks import check_positions
from megatron_lossagg.reduction.faults import first_time
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.microbatch import Means, Microbatch, Outputs
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.step_state import StepLog, Term
from megatron_lossagg.reduction.table import Counted
from megatron_lossagg.reduction.untraced import untraced
from megatron_lossagg.reduction.weighted import StepWeights
from megatron_lossagg.weigh.listen import listening, tell

_Plan = TypeVar("_Plan", bound=StepWeights)

FIRST_STEP_FILE = "LOSSAGG_FIRST_STEP_FILE"
"""The environment variable in which a launcher names a file."""


def record_first_step() -> None:
    """Write the launcher's file, if it named one, after the first step of this process."""
    if path := os.environ.pop(FIRST_STEP_FILE, None):
        with suppress(OSError):  # the launcher's loss, not the run's
            Path(path).touch()


def say_counted(
    plan: _Plan,
    *,
    is_first: bool | None = None,
    sample: str = "",
    leave_out: str = "",
    counted: Counted | None = None,
) -> _Plan:
    """Print what the first training step under an aggregation counted, on one rank of the job.

    ``is_first``: whether it is this one; None: the first rank of the last pipeline stage, which
    counts in every framework. ``sample``: what a sample is, in words. ``leave_out``: the setting
    that takes empty samples and prompts out of the counts. ``counted``: of a step of several
    plans. Returns the plan. No collective.
    """
    is_new = first_time(f"counts of {plan.aggregation!r}")
    if is_new and (_is_first() if is_first is None else is_first):
        of_sample = sample and f"; a sample is {sample}"
        say(f"{plan.aggregation}; its first step counted {counted or plan.counted}{of_sample}")
    if leave_out:
        kind = _counted_empty(plan.aggregation)
        number = plan.counted.get(f"empty_{kind}")
        say_empty(plan.aggregation, number or 0, leave_out, is_first=is_first)
    return plan


def say_empty(
    aggregation: Aggregation, number: int, leave_out: str, *, is_first: bool | None = None
) -> None:
    """Print, in the first step that has some, that empty samples or prompts are counted.

    ``leave_out``: the setting that takes them out; ``is_first`` as of :func:`say_counted`.
    """
    kind = _counted_empty(aggregation)
    is_new = bool(kind and number) and first_time(f"empty of {aggregation!r}")
    if is_new and (_is_first() if is_first is None else is_first):
        counted = f"{kind} without an active token, {number} here"
        say(f"{aggregation} counts {counted}; {leave_out} takes them out")


def _counted_empty(aggregation: Aggregation) -> str:
    """Name what a mode counts even if it is empty: ``samples``, ``prompts``, or nothing."""
    counts = MODES[aggregation.mode].weight if aggregation.count_empty else ""
    return "prompts" if "{P}" in counts else "samples" if "{B}" in counts else ""


def _is_first() -> bool:
    if not dist.is_initialized():
        return True
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return dist.get_rank() == 0
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


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
        self._made = StepOutputs(self.scaling, cp_rank=groups.cp_rank)
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
                log=StepLog(plan.aggregation, trains=not forward_only),
                forward_only=forward_only,
                accumulates=accumulates,
                calls=calls or ScheduleCalls(),
                is_weighed=is_weighed,
            )
            self._guards = self._watch(self._facts, guards)

    def _watch(self, facts: StepFacts, kind: Guards | None) -> StepGuards:
        """Let the microbatches write the log, and the guards hear of the finalize function."""
        found = [] if kind is None else guards_of(facts)
        guards = StepGuards(found, facts, only_warns=kind == "warn")
        facts.plan.state.log = facts.log
        if kind is not None and not self.forward_only:
            self._listen_to_finalize(partial(guards.tell, Guard.on_finalize))
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
    ) -> Microbatch:
        """Check and slice a microbatch's mask, and look up its weights; in loss_func.

        ``sequences``, ``mask``, ``token_weights``: as in :meth:`StepPlan.reducer`. One of three
        says which tokens this rank holds. ``cu_seqlens``: padded offsets of packed sequences.
        ``lengths``: of the slices here, with a mask that the framework has sliced. ``layout``: any
        other. ``positions``: the position ids of this rank's tokens, which are compared with the
        layout's; for a loop that slices them by hand, whose order no other check sees. Raises
        :class:`ContractError` for a layout of a different context-parallel rank, or of a split that
        is not the model's. One host sync each for ``sequences``, ``cu_seqlens`` and ``lengths`` on
        CUDA.
        """
        if torch.compiler.is_compiling():
            return _microbatch_untraced(
                self,
                sequences,
                mask,
                cu_seqlens=cu_seqlens,
                lengths=lengths,
                layout=layout,
                token_weights=token_weights,
                positions=positions,
            )
        plan = self._plan or self.plan  # which stages without counts do not have
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
        else:
            assert layout is not None
            check_split(self._groups, layout)
        microbatch = Microbatch.of(plan, sequences, mask, layout, token_weights, self)
        if listening and not self.forward_only:
            tell(plan, microbatch, sequences)
        if positions is not None:
            past_end, faults = microbatch.num_past_end, plan.state.faults
            check_positions(positions, microbatch.keep, microbatch.line, past_end, faults)
        return microbatch

    def _only_shadowed(self, microbatch: Microbatch) -> None:
        """Note a microbatch that only shadows are reported of."""
        line, log = microbatch.line, self._facts.log
        self._tracker.add(line.known.own)
        term = Term(
            aggregation=log.aggregation, is_recomputed=False, num_returned=len(log.returned)
        )
        log.add(line, term, microbatch.plan)

    def _shadow_reports(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plans = {name: self.plan.under(self.shadows[name]) for name in losses}
        totals = {name: self._total_of(plan) for name, plan in plans.items()}
        return self._made.of_shadows(losses, totals)

    def _outputs(
        self,
        microbatch: Microbatch,
        loss: Tensor,
        report: Mapping[str, Tensor],
        means: Means,
        coefficient: float,
    ) -> Outputs:
        """Make what loss_func returns; see :meth:`Microbatch.outputs`."""
        if type(loss) is not Tensor or loss.dim() or not loss.dtype.is_floating_point:
            check_scalar("loss", loss)
        if type(coefficient) is not float or coefficient != 1:
            check_coefficient(coefficient)
        if means or type(report) is not dict:
            check_reported(report, means)
        if self.is_finished:
            raise ContractError(
                "got a microbatch of a step that has ended: make it with step.microbatch of the "
                "running step"
            )
        if microbatch.plan is not self._plan:
            raise ContractError(
                f"got outputs under {microbatch.plan.aggregation}, expected the step's "
                f"{self.plan.aggregation}: call outputs of what step.microbatch returned, and not "
                "of its under(...)"
            )
        if self.forward_only and loss.requires_grad:
            loss = self._detached(loss)
        if torch._C._current_graph_task_id() < 0:  # else a checkpoint calls loss_func again
            self._note(microbatch, loss, coefficient)
        if not self.evaluates:
            return self._made.of(microbatch, loss, report, means)
        total, others = self._total_of(microbatch.plan), microbatch.others_in(report)
        return self._made.of(microbatch, loss, report, means, total, others)

    def _note(self, microbatch: Microbatch, loss: Tensor, coefficient: float) -> None:
        """Write into the log that loss_func returns for a microbatch."""
        tracker, log, line = self._tracker, self._facts.log, microbatch.line
        if tracker.num_calls in (0, self.num_microbatches) and tracker.is_at_start:
            log.pass_began = len(log.returned)
            self._guards.tell(Guard.on_first_outputs)
        if not (loss.requires_grad and line.is_reduced and line.number is None):
            self._guards.tell(Guard.on_unusual_outputs, line, loss)
        tracker.add(line.known.own)
        line.number, line.loss, line.coefficient = len(log.returned), loss.detach(), coefficient
        line.version, line.num_early = line.loss._version, len(line.heard)
        log.returned.append(line)
        if self._recorder is not None:
            is_first = tracker.num_calls == 1 and not self.scaling.is_deferred
            self._recorder.add(microbatch, is_first=is_first)

    def _total_of(self, plan: StepPlan) -> float:
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


_microbatch_untraced = untraced(Step.microbatch)


def __getattr__(name: str) -> object:
    if name != "MicrobatchLoss":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "megatron_lossagg.loop.step.MicrobatchLoss is now reduction.microbatch.Microbatch",
        DeprecationWarning,
        stacklevel=2,
    )
    return Microbatch
