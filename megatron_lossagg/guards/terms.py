"""Whether the aggregations of a step's terms fit its plan."""

from __future__ import annotations

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.step_state import Line, Term


class Terms(Guard):
    """In a deferred step, compare the mode's total of each trained term with the step's.

    And refuse, when the step finishes, sums of token weights that no loss counts.
    """

    catches = (
        "in a deferred step: a term under a mode with another total than the step's, such as "
        "token_mean (N) next to sample_mean (B); token_weight_sums that no loss of the step "
        "counts: tokens would all weigh 1"
    )

    @classmethod
    def of(cls, step: StepFacts) -> Terms | None:
        """Make it for a call of a deferred step, and for a plan with sums of token weights."""
        has_sums = step.plan.sequences.token_weight_sums is not None
        return cls() if has_sums or step.scaling.is_deferred else None

    def on_unusual_term(self, step: StepFacts, line: Line, term: Term) -> None:
        """Refuse a term with another total in a deferred step."""
        own, other = step.plan.aggregation, term.aggregation
        if step.scaling.is_deferred and term.can_be_trained and own.total != other.total:
            raise ContractError(
                f"got a term under {other} in a deferred step under {own}: one number divides all "
                "terms; name a mode with the same total and counts, or train in one schedule call"
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
