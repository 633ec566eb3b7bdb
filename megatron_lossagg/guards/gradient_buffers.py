"""Whether gradients were zero before a step's first loss, and whether the step left any."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.reducer import Reducer

__all__ = ["GradientBuffers"]

_LOOKED_AT = 4096
"""Values of a buffer, at equal distances."""


class GradientBuffers(Guard):
    """Look at some values of each gradient buffer, before the first loss and at the end.

    Gradients that are not zero before are refused. If tokens were trained and all gradients are
    zero at the end it warns: advantages may all be 0.
    """

    catches = (
        "gradients that an earlier schedule call left, with a factor of their own; a loss that "
        "reaches no parameter of this model (a warning)"
    )
    costs = "two strided counts of at most 4,096 values of each gradient buffer, once a step"

    @classmethod
    def of(cls, step: StepFacts) -> GradientBuffers | None:
        """Make it for a training step that keeps no gradients of an earlier one."""
        return None if step.forward_only or step.may_find_gradients else cls()

    def on_outputs(
        self, step: StepFacts, reducer: Reducer, loss: Tensor, coefficient: float
    ) -> None:
        """Look at the buffers before the first loss of a pass."""
        if step.tracker.is_at_start:
            for chunk, some in _samples(step):
                describe = partial(_describe, chunk)
                faults = step.plan.state.faults
                faults.record([some.count_nonzero()], describe, error=ContractError)

    def on_finish(self, step: StepFacts) -> str:
        """Look at the buffers once more, if this rank counted tokens."""
        if step.trains and step.plan.active_tokens.any():
            values = [some.count_nonzero() for _, some in _samples(step)]
            if values:
                step.plan.state.faults.record(values, _warn_of_zeros)
        return ""


def _samples(step: StepFacts) -> Iterator[tuple[int, Tensor]]:
    """Yield a chunk's number and some values of one of its gradient buffers."""
    for index, chunk in enumerate(step.chunks):
        # Then parameters are gathered into the gradient buffers.
        if getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            data = buffer.grad_data
            if data.numel() and data.untyped_storage().size() and not _is_left(buffer):
                yield index, data[:: -(-data.numel() // _LOOKED_AT)]


def _is_left(buffer: Any) -> bool:
    """Whether the parameters were wrapped anew, so that their gradients are in another buffer."""
    found = getattr(next(iter(getattr(buffer, "params", ())), None), "main_grad", None)
    address = buffer.grad_data.untyped_storage().data_ptr()
    return found is not None and found.untyped_storage().data_ptr() != address


def _describe(chunk: int, values: list[float]) -> str:
    if not values[0]:
        return ""
    return (
        f"the gradients of chunk {chunk} were not zero when the step's first loss was returned. "
        "In a loop of your own, call zero_grad_buffer() on every chunk before the schedule, also "
        "after a step that failed. If gradients of several schedule calls are added on purpose, "
        "pass each of them aggregator.step(accumulates=) with their number. In a framework's loop, "
        "call the schedule once per optimizer step, with all its microbatches, and zero the "
        "gradients before it"
    )


def _warn_of_zeros(values: list[float]) -> str:
    if not any(values):
        warn_once(
            "zero gradients",
            "tokens were trained, and every gradient of the model that was looked at is 0: pass "
            "mb.reduce losses of this model's output, which are not detached; ignore this if all "
            "losses of the step are constant (advantages of 0) or all its tokens were rejected",
        )
    return ""
