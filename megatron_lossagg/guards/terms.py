"""Whether the aggregations of a step's terms fit its plan."""

from __future__ import annotations

from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.reducer import Reducer


class Terms(Guard):
    """In a deferred step, compare the mode's total of each trained term with the step's.

    And refuse, when the step finishes, sums of token weights that no loss counts.
    """

    catches = (
        "in a deferred step: a term under a mode with another total than the step's, such as "
        "token_mean (N) next to sample_mean (B); token_weight_sums that no loss of the step "
        "counts: tokens would all weigh 1"
    )

    def __init__(self) -> None:
        self._counts: set[str] = set()

    @classmethod
    def of(cls, step: StepFacts) -> Terms | None:
        """Make it for a call of a deferred step, and for a plan with sums of token weights."""
        has_sums = step.plan.sequences.token_weight_sums is not None
        return cls() if has_sums or step.scaling.is_deferred else None

    def on_reduce(
        self, step: StepFacts, reducer: Reducer, losses: Tensor, partial_loss: Tensor
    ) -> None:
        """Note what the reducer's aggregation counts; refuse a term with another total."""
        own, other = step.plan.aggregation, reducer.plan.aggregation
        self._counts.add(other.count)
        is_divided_once = step.scaling.is_deferred and partial_loss.requires_grad
        if is_divided_once and own.total != other.total:
            raise ContractError(
                f"got a term under {other} in a deferred step under {own}: one number divides all "
                "terms; name a mode with the same total and counts, or train in one schedule call"
            )

    def on_finish(self, step: StepFacts) -> str:
        """Name sums of token weights if losses were reduced, and none counts them."""
        has_sums = step.plan.sequences.token_weight_sums is not None
        if not (has_sums and self._counts) or "weights" in self._counts:
            return ""
        return (
            "got token_weight_sums, and no loss of the step counts them: pass "
            'count="weights" (--loss-aggregation-count weights), or leave them out'
        )
