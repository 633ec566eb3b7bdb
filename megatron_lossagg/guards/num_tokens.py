"""Whether Megatron divides a step's gradients by the num_tokens that the step returned.

Only in the per-token loss scaling, in which the schedule adds up what loss_func returned and passes
the sum to ``config.finalize_model_grads_func``, which divides by it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.reducer import Reducer

__all__ = ["NumTokens"]


class NumTokens(Guard):
    """Compare the num_tokens that finalize gets with those that ``mb.outputs`` returned."""

    catches = (
        "per-token: num_tokens that loss_func changed or dropped, two schedule calls in one step, "
        "two steps at once"
    )

    def __init__(self) -> None:
        self._returned: list[int] = []

    @classmethod
    def of(cls, step: StepFacts) -> NumTokens | None:
        """Make it for a training step in the per-token loss scaling."""
        is_divided = step.scaling.loss_scaling == "per_token" and not step.forward_only
        return cls() if is_divided else None

    def on_outputs(
        self, step: StepFacts, reducer: Reducer, loss: Tensor, coefficient: float
    ) -> None:
        """Note what loss_func is to return for a microbatch."""
        counted, cp_rank = reducer.counted_tokens, step.groups.cp_rank
        self._returned.append(step.scaling.num_tokens(counted, cp_rank))

    def on_finalize(self, step: StepFacts, num_tokens: Tensor | None) -> None:
        """Compare; the values are read when the step finishes."""
        returned, self._returned = self._returned, []
        describe = partial(_describe, returned, step.scaling.num_microbatches)
        # A copy: Megatron reduces num_tokens over ranks in place.
        found = torch.zeros(()) if num_tokens is None else num_tokens.clone()
        step.plan.state.faults.record([found], describe, error=ContractError, guard=self.name)


def _describe(returned: list[int], num_microbatches: int, values: list[float]) -> str:
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
