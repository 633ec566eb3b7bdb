"""Whether all terms of a deferred step are divided by the number that it is divided by."""

from __future__ import annotations

from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.reducer import Reducer

__all__ = ["OneTotal"]


class OneTotal(Guard):
    """Compare the mode's total of each term that can be trained with the step's."""

    catches = (
        "in a deferred step: a term under a mode with another total than the step's, such as "
        "token_mean (N) next to sample_mean (B)"
    )

    @classmethod
    def of(cls, step: StepFacts) -> OneTotal | None:
        """Make it for a call of a deferred step."""
        return cls() if step.scaling.is_deferred else None

    def on_reduce(
        self, step: StepFacts, reducer: Reducer, losses: Tensor, partial_loss: Tensor
    ) -> None:
        """Refuse a term with another one."""
        own, other = step.plan.aggregation, reducer.plan.aggregation
        if partial_loss.requires_grad and own.total != other.total:
            raise ContractError(
                f"got a term under {other} in a deferred step under {own}: one number divides all "
                "terms; name a mode with the same total and counts, or train in one schedule call"
            )
