"""Whether a loss counts the token weights that were passed."""

from __future__ import annotations

from torch import Tensor

from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.reducer import Reducer

__all__ = ["TokenWeights"]


class TokenWeights(Guard):
    """Refuse, when the step finishes, sums of token weights that no loss counts."""

    catches = "token_weight_sums that no loss of the step counts: tokens would all weigh 1"

    def __init__(self) -> None:
        self._counts: set[str] = set()

    @classmethod
    def of(cls, step: StepFacts) -> TokenWeights | None:
        """Make it for a plan with sums of token weights."""
        return None if step.plan.sequences.token_weight_sums is None else cls()

    def on_reduce(
        self, step: StepFacts, reducer: Reducer, losses: Tensor, partial_loss: Tensor
    ) -> None:
        """Note what the reducer's aggregation counts."""
        self._counts.add(reducer.plan.aggregation.count)

    def on_finish(self, step: StepFacts) -> str:
        """Name them if losses were reduced, and none counts them."""
        if not self._counts or "weights" in self._counts:
            return ""
        return (
            "got token_weight_sums, and no loss of the step counts them: pass "
            'count="weights" (--loss-aggregation-count weights), or leave them out'
        )
