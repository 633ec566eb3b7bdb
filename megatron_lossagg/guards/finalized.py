"""Whether a step's gradients were finalized: reduced over ranks and, per-token, divided by N."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from megatron_lossagg.contract.finalize import hook_of, is_same_function, own_finalize
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.faults import warn_once

__all__ = ["Finalized"]


class Finalized(Guard):
    """Ask, when the step finishes, whether the config's finalize function ran.

    A loop that runs the backward pass by itself may call it after the step, so there it warns. One
    rank alone needs no function in the average loss scaling, but a schedule that gets to it.
    """

    catches = (
        "gradients that nobody reduced or divided: a finalize function that is replaced inside "
        "the step, or an error in the last backward pass that was swallowed"
    )

    def __init__(self, own: Any, *, is_needed: bool) -> None:
        self._own = own
        self._is_needed = is_needed
        self._has_run = False
        self._is_in_schedule = False

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
        """Note that it ran."""
        self._has_run = True

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


def _is_in_schedule() -> bool:
    """Whether one of Megatron-Core's schedules is calling."""
    frame = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("megatron.core.pipeline_parallel"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
