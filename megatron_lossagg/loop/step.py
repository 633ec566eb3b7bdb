"""One schedule call: the losses of its microbatches times K, and the checks when it finishes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.contract.finalize import DivisorCheck
from megatron_lossagg.contract.live import is_rerunning
from megatron_lossagg.contract.outputs import (
    Means,
    Outputs,
    check_names,
    check_scalar,
    outputs,
    shadow_reports,
)
from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.contract.sequence_tracker import SequenceTracker
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.ownership import check_ownership
from megatron_lossagg.loop.first_step import record_first_step
from megatron_lossagg.record.writer import StepRecorder
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.integers import IntsLike, first_few
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.reducer import Reducer
from megatron_lossagg.reduction.step_state import ReducerCall

if TYPE_CHECKING:
    from megatron_lossagg.loop.aggregator import LossAggregator

__all__ = ["MicrobatchLoss", "Step"]


class MicrobatchLoss:
    """The loss of one microbatch on this rank; made by :meth:`Step.microbatch`."""

    def __init__(self, step: Step, reducer: Reducer) -> None:
        self._step = step
        self._reducer = reducer
        self._shadows: dict[str, Tensor] = {}

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self._reducer.layout

    def reduce(self, losses: Tensor, aggregation: Aggregation | str | None = None) -> Tensor:
        """Sum this rank's per-token losses with the step's weights: a 0-dim partial loss.

        ``losses``: in the layout's order; a masked one may be anything. ``aggregation``: another
        mode over the same tokens, without a collective. See :meth:`Reducer.__call__`.

        The first call under the step's own aggregation is what ``Options.shadow`` reports.
        """
        reducer = self._reducer if aggregation is None else self._reducer.under(aggregation)
        partial_loss = reducer(losses)
        if not self._shadows and reducer.plan.aggregation == self._reducer.plan.aggregation:
            self._shadows = self._shadowed(losses)
        return partial_loss

    def outputs(
        self,
        loss: Tensor,
        report: Mapping[str, Tensor] | None = None,
        means: Means | None = None,
    ) -> Outputs:
        """Make what loss_func returns: ``(loss, num_tokens, report)``.

        ``loss``: 0-dim, the sum of all terms' partial losses. ``report``: partial losses by name.
        ``means``: local sums with their counts by name, of what is a mean already (clip fraction,
        reward): Megatron adds both over the step and divides, so one mean over the step is logged.

        The loss is ``loss * K`` in fp32 or better with storage of its own (the schedule scales it
        in place); num_tokens an int32 0-dim tensor on its device; each report a detached
        ``[partial loss * M DP CP, 1]``; each mean a detached ``[sum, count]``. Adds
        ``lossagg/weight_sum`` and ``lossagg/weight_expected``. The weight-sum check sees the
        weights as sliced and masked, not what is done to a partial loss afterwards. No collective,
        no host sync.

        Raises :class:`ContractError` if :meth:`reduce` was not called under the step's aggregation,
        if this is of another step, and if the loss needs no gradient in a training step or one in a
        ``forward_only`` step.
        """
        check_scalar("loss", loss)
        report, means = report or {}, means or {}
        are_pairs = isinstance(means, Mapping) and all(
            getattr(pair, "shape", None) == (2,)
            or (isinstance(pair, (tuple, list)) and len(pair) == 2)
            for pair in means.values()
        )
        if not isinstance(report, Mapping) or not are_pairs:
            raise ContractError(
                f"got report {report!r} and means {means!r}, expected partial losses by name, and "
                "(sum, count) by name"
            )
        check_names([*report, *means])
        made = self._step._outputs(loss, self._reducer, report, means)
        made[2].update(shadow_reports(self._shadows, self._step.scaling))
        return made

    def shadow(self, losses: Tensor) -> dict[str, Tensor]:
        """Report what each mode of ``Options.shadow`` would give for losses that others train.

        In place of :meth:`outputs`: the step checks at its end what it checks of a trained one.
        """
        self._step._note_shadowed(self._reducer)
        return shadow_reports(self._shadowed(losses), self._step.scaling)

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
        aggregator: LossAggregator,
        plan: StepPlan | None,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool = False,
        shadows: Mapping[str, Aggregation] | None = None,
        record: StepRecorder | None = None,
        divisor: DivisorCheck | None = None,
    ) -> None:
        self.num_microbatches = num_microbatches
        """M of this schedule call."""
        self.forward_only = forward_only
        self.is_finished = False
        self._aggregator = aggregator
        self._plan = plan
        self._accumulates = accumulates
        self.shadows = shadows or {}
        """The aggregations whose losses are reported in addition to the trained one, by name."""
        self._record = record
        self._divisor = divisor
        if divisor is not None:  # a step that is given up without its end is collected
            weakref.finalize(self, divisor.end)
        self._tracker = SequenceTracker(
            num_sequences=0 if plan is None else len(plan.active_tokens),
            num_microbatches=num_microbatches,
            is_rerunning=is_rerunning,
        )
        self._trained: list[tuple[int, object]] = []
        """Of each call of loss_func whose loss needs a gradient: its number, its microbatch."""
        self.scaling = Scaling(
            loss_scaling=aggregator.loss_scaling,
            num_microbatches=num_microbatches,
            dp_cp_size=aggregator.dp_cp_size,
            active_tokens=None if plan is None else plan.totals.active_tokens,
        )
        """What Megatron does to this step's loss, and K."""
        if plan is not None:
            plan.state.begin(self._check_layout)

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

        1 on a pipeline stage without counts, and if N is 0.
        """
        return 1 if self._plan is None else self.scaling.k

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
    ) -> MicrobatchLoss:
        """Check and slice a microbatch's mask, and look up its weights; in loss_func.

        ``sequences``, ``mask``, ``token_weights``: as in :meth:`StepPlan.reducer`. One of three
        says which tokens this rank holds. ``cu_seqlens``: padded offsets of packed sequences.
        ``lengths``: of the slices here, with a mask that the framework has sliced. ``layout``: any
        other. Raises :class:`ContractError` for a layout of a different context-parallel rank, or
        of a split that is not the model's. One host sync each for ``sequences``, ``cu_seqlens`` and
        ``lengths`` on CUDA.
        """
        plan = self.plan  # which stages without counts do not have
        given = [one for one in (cu_seqlens, lengths, layout) if one is not None]
        if len(given) != 1:
            raise ContractError(
                f"got {len(given)} of cu_seqlens=, lengths= and layout=: pass exactly one of them, "
                "which says which tokens this rank holds"
            )
        if cu_seqlens is not None:
            layout = self._aggregator.thd(cu_seqlens)
        elif lengths is not None:
            layout = self._aggregator.local(lengths)
        assert layout is not None
        self._check_layout(layout)
        return MicrobatchLoss(
            self, plan.reducer(sequences, mask, layout, token_weights=token_weights)
        )

    def _note_shadowed(self, reducer: Reducer) -> None:
        """Note a microbatch that only shadows are reported of."""
        self._tracker.add(reducer.microbatch.segments.own_sequences)
        reducer.microbatch.note_trained(len(self.plan.active_tokens))

    def _outputs(
        self, loss: Tensor, reducer: Reducer, report: Mapping[str, Tensor], means: Means
    ) -> Outputs:
        """Make what loss_func returns; see :meth:`MicrobatchLoss.outputs`."""
        self._check_source(loss, reducer)
        if self._tracker.is_at_start and not (self.forward_only or self._accumulates):
            self._look_at_gradients()
        self._tracker.add(reducer.microbatch.segments.own_sequences)
        if self._record is not None:
            self._record.add(reducer, is_first=self._tracker.num_calls == 1)
        cp_rank = self._aggregator.cp_rank
        made = outputs(loss, reducer, self.scaling, cp_rank=cp_rank, report=report, means=means)
        if made[0].requires_grad:
            made[0].register_hook(self._note_schedule)  # type: ignore[no-untyped-call]
        if self._divisor is not None:
            self._divisor.add(made[1])
        return made

    def _note_schedule(self, gradient: Tensor) -> None:
        """Note what the schedule multiplies a returned loss by, in its backward pass.

        The schedule multiplies a loss without num_tokens by CP / M.
        """
        expected = torch.ones_like(gradient)
        if self._aggregator.grad_scale_func is not None:
            expected = self._aggregator.grad_scale_func(expected).reshape(())  # Megatron's has [1]
        describe = partial(_describe_schedule, self.scaling.schedule_factor)
        self.plan.state.faults.record([gradient, expected], describe)

    def finish(self) -> None:
        """Check, after the schedule and before the optimizer, that the step is complete.

        Every sequence and microbatch arrived (on the last pipeline stage, the only one that calls
        loss_func). Every loss was trained through its reducer. The schedule scaled each loss as
        Megatron does. Gradients were zero before, and no device found a fault in a mask or loss.
        With context parallelism all ranks train the same step, and each token is trained by one of
        them. Raises :class:`ContractError` or :class:`ReducerError` on this rank. One host sync for
        each device that recorded something; with context parallelism one all-gather over its group;
        with ``Options.record`` one over data- and context-parallel ranks. ``with`` calls it.
        """
        if self.is_finished:
            return
        fault = self._incomplete()
        self.end()
        aggregator = self._aggregator
        if aggregator.cp_size > 1 and self._plan is not None:
            check_ownership(Exchange(aggregator.cp_group), self._plan, has_failed=bool(fault))
        if fault:
            raise ContractError(fault)
        if self._plan is not None:
            self._plan.check()
        if self._record is not None:
            self._record.finish(
                self.plan,
                self.scaling,
                dp_size=aggregator.dp_size,
                cp_size=aggregator.cp_size,
                cp_rank=aggregator.cp_rank,
            )
        record_first_step()

    def end(self) -> None:
        """End the step without a check."""
        self.is_finished = True
        if self._divisor is not None:
            self._divisor.end()
        if self._plan is not None:
            self._plan.state.end()

    def _incomplete(self) -> str:
        """Say what is missing of the step, empty if nothing is."""
        try:
            self._tracker.finish(may_be_empty=not self._aggregator.is_last_stage)
        except ContractError as error:
            return str(error)
        if self._plan is None:
            return ""
        plan, calls = self._plan, self._plan.state.calls or ()
        counts = {call.aggregation.count for call in calls}
        if plan.sequences.token_weight_sums is not None and counts and "weights" not in counts:
            return (
                "got token_weight_sums, and no loss of the step counts them: pass "
                'count="weights" (--loss-aggregation-count weights), or leave them out'
            )
        trained = {
            call.microbatch
            for call in calls
            if call.has_gradient and call.aggregation == plan.aggregation
        }
        for number, microbatch in self._trained:
            if microbatch not in trained:
                return (
                    f"no gradient reached the step's own partial loss in call {number} of "
                    "loss_func: pass mb.outputs what mb.reduce made, and let the schedule run its "
                    "backward pass"
                )
        for call in calls:
            if call.is_late and call.has_gradient:
                return (
                    f"losses of sequences {first_few(call.sequences)} were reduced after loss_func "
                    "had returned for them, and trained: call step.microbatch anew for each "
                    "microbatch, and make the loss with its reduce"
                )
        return ""

    def _check_source(self, loss: Tensor, reducer: Reducer) -> None:
        """Check which reducers made a loss, and whether it is trained as the step declares."""
        if self.is_finished:
            raise ContractError(
                "got a microbatch of a step that has ended: make it with step.microbatch of the "
                "running step"
            )
        state = self.plan.state
        calls = [
            call for call in state.pending if np.array_equal(call.sequences, reducer.sequences)
        ]
        identity = reducer.microbatch.identity
        main = [call for call in calls if call.microbatch is identity]
        if not any(call.aggregation == reducer.plan.aggregation for call in main):
            raise ContractError(
                "mb.reduce was not called under the step's aggregation in this microbatch: call "
                "step.microbatch anew for each microbatch, and make the loss with its reduce"
            )
        self._check_gradient(loss, main)
        if loss.requires_grad:
            self._trained.append((self._tracker.num_calls, identity))
        state.returned.update(call.microbatch for call in calls)
        state.pending = [call for call in state.pending if call not in calls]

    def _check_layout(self, layout: Layout) -> None:
        """Check that a term's losses are split as the model's are, on this rank."""
        aggregator = self._aggregator
        if (layout.cp_size, layout.cp_rank) != (aggregator.cp_size, aggregator.cp_rank):
            raise ContractError(
                f"got a layout of CP rank {layout.cp_rank} of {layout.cp_size}, this rank is "
                f"{aggregator.cp_rank} of {aggregator.cp_size}: pass step.microbatch cu_seqlens= "
                "or lengths=, or make the layout with the aggregator's cp_size and cp_rank"
            )
        split = "contiguous" if aggregator.is_contiguous else "zigzag"
        if layout.cp_size > 1 and layout.split not in (split, None):
            raise ContractError(
                f"got the layout {layout.name}, the model's cp_partition_mode is {split}: pass "
                "step.microbatch cu_seqlens=, which takes the model's; or lengths=, with a mask "
                "and losses that are sliced already; or gathered(sums_gradients=True), if losses "
                "are gathered and the backward pass sums their gradients over the ranks"
            )

    def _check_gradient(self, loss: Tensor, calls: list[ReducerCall]) -> None:
        if self.forward_only and loss.requires_grad:
            raise ContractError(
                "got a loss that requires a gradient in a step with forward_only=True: run an "
                "evaluation under torch.no_grad(), or begin a training step"
            )
        if self.forward_only or loss.requires_grad:
            return
        if self.plan.active_tokens.any() or any(call.requires_grad for call in calls):
            raise ContractError(
                "got a loss that requires no gradient in a training step, so that nothing would "
                "be trained: do not detach it, call mb.reduce outside no_grad and inference_mode, "
                "let a custom reducer keep its graph, or pass forward_only=True"
            )

    def _look_at_gradients(self) -> None:
        """Look at some values of each gradient buffer, which are zero before the first loss."""
        for index, chunk in enumerate(self._aggregator.chunks):
            # Then parameters are gathered into the gradient buffers.
            if getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
                continue
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                data = buffer.grad_data
                if data.numel() and data.untyped_storage().size():
                    some = data[:: -(-data.numel() // _GRADIENTS_LOOKED_AT)]
                    describe = partial(_describe_gradients, index)
                    self.plan.state.faults.record([some.count_nonzero()], describe)


def _describe_schedule(factor: float, values: list[float]) -> str:
    """Compare the gradient of a returned loss with the loss scale times the schedule's factor."""
    gradient, loss_scale = values
    if math.isclose(gradient, loss_scale * factor, rel_tol=1e-5):
        return ""
    return (
        f"a loss that loss_func returned was trained with the gradient {gradient:g}, expected "
        f"{loss_scale * factor:g}: return all three of mb.outputs from loss_func as they are, "
        "(loss, num_tokens, report), and let Megatron's schedule run the backward pass: it "
        "multiplies by the loss scale, and in the average loss scaling by 1/M"
    )


_GRADIENTS_LOOKED_AT = 4096


def _describe_gradients(chunk: int, values: list[float]) -> str:
    if not values[0]:
        return ""
    return (
        f"the gradients of chunk {chunk} were not zero when the step's first loss was returned. "
        "In a loop of your own, call zero_grad_buffer() on every chunk before the schedule, also "
        "after a step that failed. If gradients of several schedule calls are added on purpose, "
        "pass aggregator.step(accumulates=True). In a framework's loop, call the schedule once per "
        "optimizer step, with all its microbatches, and zero the gradients before it"
    )
