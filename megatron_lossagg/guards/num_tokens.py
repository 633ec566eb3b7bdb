"""Whether Megatron divides a step's gradients by the num_tokens that the step returned.

Only in the per-token loss scaling, in which the schedule adds up what loss_func returned and passes
the sum to ``config.finalize_model_grads_func``, which divides by it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_lossagg.contract.outputs import Outputs
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts

__all__ = ["NumTokens"]


class NumTokens(Guard):
    """Compare the num_tokens that finalize gets with those that ``mb.outputs`` returned."""

    catches = (
        "per-token: num_tokens that loss_func changed or dropped, two schedule calls in one step, "
        "two steps at once"
    )
    costs = "one copy of a scalar a microbatch"

    def __init__(self) -> None:
        self._returned: list[Tensor] = []

    @classmethod
    def of(cls, step: StepFacts) -> NumTokens | None:
        """Make it for a training step in the per-token loss scaling."""
        is_divided = step.scaling.loss_scaling == "per_token" and not step.forward_only
        return cls() if is_divided else None

    def on_return(self, step: StepFacts, returned: Outputs) -> None:
        """Note what loss_func is to return for a microbatch; a copy, which nobody changes."""
        self._returned.append(returned[1].clone())

    def on_finalize(self, step: StepFacts, num_tokens: Tensor | None) -> None:
        """Compare; the values are read when the step finishes."""
        returned, self._returned = self._returned, []
        describe = partial(_describe, len(returned), step.scaling.num_microbatches)
        # A copy: Megatron reduces num_tokens over ranks in place.
        found = torch.zeros(()) if num_tokens is None else num_tokens.clone()
        faults = step.plan.state.faults
        faults.record([found, *returned], describe, error=ContractError)


def _describe(num_returned: int, num_microbatches: int, values: list[float]) -> str:
    found, *returned = map(int, values)
    if num_returned != num_microbatches:
        return (
            f"the schedule divided gradients after {num_returned} of the {num_microbatches} "
            "microbatches of the step: run all of them in one schedule call"
        )
    if found != sum(returned):
        return (
            f"the schedule got {found} tokens of this rank to divide by, mb.outputs returned "
            f"{sum(returned)}: return all three of mb.outputs from loss_func as they are, (loss, "
            "num_tokens, report), and train one step at a time"
        )
    return ""
