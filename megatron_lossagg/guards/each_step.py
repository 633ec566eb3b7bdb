"""The guards that need no file of their own, and what an evaluation does with its loss.

:class:`Split`: are losses split over context-parallel ranks as the model is, zigzag or contiguous?
:class:`Terms`: do the aggregations of terms fit the plan and its schedule calls?
:class:`GradientBuffers`: were gradients zero before the first loss, and did the step leave any?
:class:`Finalized`: were they reduced over ranks and, per-token, divided by N? Only in that loss
scaling the schedule adds up the num_tokens that loss_func returned and passes the sum to
``config.finalize_model_grads_func``, which divides by it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.contract.finalize import hook_of, is_same_function, own_finalize
from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.before import check_accumulated, check_total
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.modes import OWN_WEIGHTS
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.step_state import Line, Term

_OF_WHOLE_SEQUENCES = ("microbatch_token_mean", "row_mean", OWN_WEIGHTS)


def check_parts(groups: LiveGroups, aggregation: Aggregation) -> None:
    """Refuse weights that follow from whole sequences if each rank counts parts of them.

    As with dynamic context parallelism. Raises :class:`ContractError`. No collective.
    """
    if groups.is_dynamic and aggregation.mode in _OF_WHOLE_SEQUENCES:
        raise ContractError(
            f"got {aggregation.mode} with dynamic_context_parallel, expected a mode whose weights "
            "do not depend on the sequences of a sample or microbatch: each rank counts parts of "
            "them; choose another --loss-aggregation"
        )


def check_split(groups: LiveGroups, layout: Layout) -> None:
    """Refuse a layout of a different context-parallel rank, or of another split.

    Raises :class:`ContractError`. No collective.
    """
    if (layout.cp_size, layout.cp_rank) != (groups.cp_size, groups.cp_rank):
        raise ContractError(
            f"got a layout of CP rank {layout.cp_rank} of {layout.cp_size}, this rank is "
            f"{groups.cp_rank} of {groups.cp_size}: pass step.microbatch cu_seqlens= "
            "or lengths=, or make the layout with the aggregator's cp_size and cp_rank"
        )
    if layout.cp_size > 1 and layout.split not in (groups.split, None):
        raise ContractError(
            f"got the layout {layout.name}, the model's cp_partition_mode is {groups.split}: "
            "pass step.microbatch cu_seqlens=, which takes the model's; or lengths=, with a "
            "mask and losses that are sliced already; or gathered(sums_gradients=True), if "
            "losses are gathered and the backward pass sums their gradients over the ranks"
        )


class Split(Guard):
    """Refuse a layout of a different context-parallel rank, or of another split, immediately.

    ``step.microbatch`` checks the layouts that it gets, this those of ``StepPlan.reducer``. And it
    refuses a mode that cannot be counted in parts, if the ranks count parts of sequences.
    """

    catches = (
        "a layout of another rank or split: one sequence's weight on another one's tokens; a mode "
        "that needs whole sequences, of which ranks count parts"
    )

    may_only_warn = False

    def on_unusual_term(self, step: StepFacts, line: Line, term: Term, plan: StepPlan) -> None:
        """Check a term's mode, and the layout of what is trained; a metric may have any."""
        check_parts(step.groups, term.aggregation)
        if term.can_be_trained and not line.is_of_step:
            check_split(step.groups, line.layout)


class Terms(Guard):
    """In one of several schedule calls, refuse a trained term that the calls do not add up to.

    And refuse, when the step finishes, sums of token weights that no loss counts.
    """

    catches = (
        "in a deferred step: a term under a mode with another total than the step's, such as "
        "token_mean (N) next to sample_mean (B); with accumulates=: a term whose calls do not add "
        "up to its loss; in both: a reducer of the plan that the call was begun with; "
        "token_weight_sums that no loss of the step counts: tokens would all weigh 1"
    )

    def on_unusual_term(self, step: StepFacts, line: Line, term: Term, plan: StepPlan) -> None:
        """Refuse a term of another division."""
        if step.forward_only or not term.can_be_trained:
            return
        if step.scaling.is_deferred:
            check_total(step.plan.aggregation, term.aggregation, "term")
        check_accumulated(step.accumulates, term.aggregation.mode)
        own, other = ((one.total is None, one.num_calls) for one in (step.plan, plan))
        if own != other:
            raise ContractError(
                "got a reducer of the plan that a schedule call was begun with, whose weights know "
                "nothing of the other calls: take step.plan.under(...), or mb.reduce(losses, mode)"
            )

    def on_finish(self, step: StepFacts) -> str:
        """Name sums of token weights if losses were reduced, and none counts them."""
        has_sums = step.plan.sequences.token_weight_sums is not None
        counts = {term.aggregation.count for line in step.log.lines for term in line.terms}
        if not (has_sums and counts) or "weights" in counts:
            return ""
        return (
            "got token_weight_sums, and no loss of the step counts them: pass "
            'count="weights" (--loss-aggregation-count weights), or leave them out'
        )


_LOOKED_AT = 4096
"""Values of a buffer, at equal distances."""


class GradientBuffers(Guard):
    """Look at some values of each gradient buffer, before the first loss and at the end.

    Gradients that are not zero before are refused, unless they may be those of the declared calls
    of the same optimizer step. If they are zero before these calls are complete, it warns; between
    calls of a deferred step it refuses them. If
    tokens were trained and all gradients are zero at the end it warns too: advantages may all be 0.
    Not where each rank adds up a shard of the gradients: those of other ranks may not be.
    """

    catches = (
        "gradients that an earlier schedule call left, with a factor of their own; as warnings, a "
        "loss that reaches no parameter of this model (if a rank adds up whole gradients), and an "
        "optimizer step of fewer schedule calls than it declares"
    )
    costs = "two strided counts of at most 4,096 values of each gradient buffer, once a step"

    def __init__(self, step: StepFacts) -> None:
        self._is_deferred = step.scaling.is_deferred
        self._calls = step.calls
        self._declared = step.accumulates
        self._left: list[Tensor] = []

    @classmethod
    def of(cls, step: StepFacts) -> GradientBuffers | None:
        """Make it for a training step."""
        return None if step.forward_only else cls(step)

    def on_first_outputs(self, step: StepFacts) -> None:
        """Look at the buffers before the first loss of a pass."""
        counts = dict(_nonzero(step))
        found = partial(self._found, list(counts))
        step.plan.state.faults.record(
            list(counts.values()), found, error=ContractError, guard=self.name
        )

    def on_finalize(self, step: StepFacts, num_tokens: Tensor | None) -> None:
        """Look once more: the loop may zero gradients before it leaves the step."""
        self._left = [count for _, count in _nonzero(step)]

    def on_finish(self, step: StepFacts) -> str:
        """Look at the end, if nothing was finalized."""
        if step.trains:
            left = self._left or [count for _, count in _nonzero(step)]
            has_shards = any(engine_of(chunk).adds_up_shards for chunk in step.chunks)
            is_due = bool(step.plan.active_tokens.any()) and not has_shards
            step.plan.state.faults.record(left, partial(self._leaves, is_due))
        return ""

    def _found(self, buffers: list[tuple[int, int]], values: list[float]) -> str:
        calls, declared = self._calls, self._declared
        chunk = next((at for (at, _), value in zip(buffers, values, strict=True) if value), None)
        if self._is_deferred and calls.number:
            if chunk is None and calls.left_some:
                return (
                    f"gradients were zeroed after {calls.number} schedule calls of a deferred "
                    "step, which divides those of all calls: zero them before aggregator.deferred()"
                )
            return ""
        if chunk is None:
            if calls.left_some and calls.number < calls.declared:
                warn_once(
                    "schedule calls",
                    f"gradients were zeroed after {calls.number} schedule calls with "
                    f"accumulates={calls.declared}, which train {calls.number}/{calls.declared} of "
                    "their mean: pass the number of the calls; ignore this if that step of the "
                    "optimizer was skipped",
                )
            calls.number = 0
            return ""
        continues = calls.number > 0 and calls.declared == declared
        if declared is True or (continues and calls.number < declared):
            return ""
        return (
            f"the gradients of chunk {chunk} were not zero when the step's first loss was returned"
            f"{f', after {calls.number} schedule calls' if continues and declared else ''}. "
            "In a loop of your own, call zero_grad_buffer() on every chunk before the schedule, "
            "also after a step that failed. If gradients of several schedule calls are added on "
            "purpose, pass each of them aggregator.step(accumulates=) with their number. In a "
            "framework's loop, call the schedule once per optimizer step, with all its "
            "microbatches, and zero the gradients before it"
        )

    def _leaves(self, is_due: bool, values: list[float]) -> str:
        calls = self._calls
        calls.number += 1
        calls.declared, calls.left_some = self._declared, any(values)
        if is_due and values and not calls.left_some:
            warn_once(
                "zero gradients",
                "tokens were trained, and every gradient of the model that was looked at is 0: "
                "pass mb.reduce losses of this model's output, which are not detached; ignore this "
                "if all losses of the step are constant (advantages of 0) or all its tokens were "
                "rejected",
            )
        return ""


def _nonzero(step: StepFacts) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Count the values that are not zero in a part of each gradient buffer, by chunk and number."""
    for index, chunk in enumerate(step.chunks):
        for number, data in enumerate(engine_of(chunk).gradients()):
            if data.numel() and data.untyped_storage().size():
                some = data[:: -(-data.numel() // _LOOKED_AT)]
                yield (index, number), some.count_nonzero()


class Finalized(Guard):
    """Ask, when the step finishes, whether the config's finalize function ran, and with what.

    Per-token, the num_tokens that it gets are those that ``mb.outputs`` returned. A loop that runs
    the backward pass by itself may call it after the step, so there it warns. A single rank
    needs no function in the average loss scaling, but its schedule must get that far.
    """

    catches = (
        "gradients that nobody reduced or divided: a finalize function that is replaced inside "
        "the step, or an error in the last backward pass that was swallowed; per-token: num_tokens "
        "that loss_func changed or dropped, two schedule calls in one step, two steps at once"
    )

    costs = "per-token: a copy of num_tokens, read when the step ends"

    def __init__(self, own: Any, *, is_needed: bool) -> None:
        self._own = own
        self._is_needed = is_needed
        self._has_run = False
        self._is_in_schedule = False
        self._num_compared = 0
        """Of the microbatches that returned: how many have been compared."""

    @classmethod
    def of(cls, step: StepFacts) -> Finalized | None:
        """Make it for a training step."""
        config, is_per_token = step.config, step.scaling.loss_scaling == "per_token"
        is_alone = step.groups.dp_cp_size == 1 and (
            config.tensor_model_parallel_size * config.pipeline_model_parallel_size == 1
        )
        if step.forward_only or step.accumulates:
            return None
        return cls(own_finalize(config), is_needed=is_per_token or not is_alone)

    def on_first_outputs(self, step: StepFacts) -> None:
        """Look, before the first loss, who runs loss_func."""
        self._is_in_schedule = _is_in_schedule()

    def on_finalize(self, step: StepFacts, num_tokens: Tensor | None) -> None:
        """Note that it ran; compare what it divides by, which is read when the step finishes."""
        self._has_run = True
        lines = step.log.returned[self._num_compared :]
        self._num_compared += len(lines)
        if step.scaling.loss_scaling == "per_token" and step.groups.is_last_stage:
            counts = (line.known.counted_tokens for line in lines)
            returned = [step.scaling.num_tokens(one, step.groups.cp_rank) for one in counts]
            describe = partial(_divided_by, returned, step.scaling.num_microbatches)
            # A copy: Megatron reduces num_tokens over ranks in place.
            found = torch.zeros(()) if num_tokens is None else num_tokens.clone()
            step.plan.state.faults.record([found], describe, error=ContractError, guard=self.name)

    def on_finish(self, step: StepFacts) -> str:
        """Name the function that stands in its place, or the error that it missed."""
        now = step.config.finalize_model_grads_func
        is_set_again = hook_of(now) is None and is_same_function(now, self._own)
        if self._has_run or is_set_again or not step.trains:
            return ""
        if not self._is_needed and (now is None or not self._is_in_schedule):
            return ""
        if not self._is_in_schedule:
            warn_once(
                "finalize",
                "the step finished before its gradients were finalized: call "
                "config.finalize_model_grads_func before the optimizer's step; it reduces them "
                "over ranks and, per-token, divides them by N",
            )
            return ""
        return (
            "config.finalize_model_grads_func did not run in the step, so that gradients are not "
            "those of the loss: let no error of the backward pass end inside the with block, and "
            "set the function before the step"
        )


def _divided_by(returned: list[int], num_microbatches: int, values: list[float]) -> str:
    found = int(values[0])
    if len(returned) != num_microbatches:
        return (
            f"the schedule divided gradients after {len(returned)} of the {num_microbatches} "
            "microbatches of the step: run all of them in one schedule call"
        )
    if found != sum(returned):
        return (
            f"the schedule got {found} tokens of this rank to divide by, mb.outputs returned "
            f"{sum(returned)}: return all three of mb.outputs from loss_func as they are, (loss, "
            "num_tokens, report), and train one step at a time"
        )
    return ""


def _is_in_schedule() -> bool:
    """Whether one of Megatron-Core's schedules is calling."""
    frame = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("megatron.core.pipeline_parallel"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def without_gradient(loss: Tensor) -> Tensor:
    """Detach the loss of a step with ``forward_only=True``; say so once per process."""
    warn_once(
        "a gradient in an evaluation",
        "a step with forward_only=True got a loss that requires a gradient, and detached it: run "
        "evaluations under torch.no_grad(), which keeps no activations",
    )
    return loss.detach()


def refuse_training(num_tokens: Tensor | None) -> NoReturn:
    """Raise :class:`ContractError`: gradients of such a step are finalized."""
    raise ContractError(
        "the schedule trains in a step with forward_only=True, which detached its losses: pass "
        "the schedule forward_only=True too, or begin a training step"
    )
