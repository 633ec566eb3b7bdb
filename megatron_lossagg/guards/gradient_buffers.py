"""Whether gradients were zero before a step's first loss, and whether the step left any."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, ScheduleCalls, StepFacts
from megatron_lossagg.reduction.faults import warn_once

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

    def __init__(
        self, calls: ScheduleCalls, declared: bool | int, *, is_deferred: bool = False
    ) -> None:
        self._is_deferred = is_deferred
        self._calls = calls
        self._declared = declared
        self._left: list[Tensor] = []

    @classmethod
    def of(cls, step: StepFacts) -> GradientBuffers | None:
        """Make it for a training step."""
        if step.forward_only:
            return None
        return cls(step.calls, step.accumulates, is_deferred=step.scaling.is_deferred)

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
