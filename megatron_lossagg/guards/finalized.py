"""Whether a step's gradients were finalized: reduced over ranks and, per-token, divided by N.

Only in the per-token loss scaling the schedule adds up the num_tokens that loss_func returned and
passes the sum to ``config.finalize_model_grads_func``, which divides by it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.contract.finalize import hook_of, is_same_function, own_finalize
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.faults import warn_once


class Finalized(Guard):
    """Ask, when the step finishes, whether the config's finalize function ran, and with what.

    Per-token, the num_tokens that it gets are those that ``mb.outputs`` returned. A loop that runs
    the backward pass by itself may call it after the step, so there it warns. One rank alone needs
    no function in the average loss scaling, but a schedule that gets to it.
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
        if step.scaling.loss_scaling == "per_token":
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
