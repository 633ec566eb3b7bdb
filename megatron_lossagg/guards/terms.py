"""Whether the aggregations of a step's terms fit its plan, and its schedule calls."""

from __future__ import annotations

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.before import check_accumulated, check_total
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.step_state import Line, Term


class Terms(Guard):
    """In one of several schedule calls, refuse a trained term that the calls do not add up to.

    And refuse, when the step finishes, sums of token weights that no loss counts.
    """

    catches = (
        "in a deferred step: a term under a mode with another total than the step's, such as "
        "token_mean (N) next to sample_mean (B); with accumulates=: a term whose calls do not add "
        "up to its loss; in both: a reducer of the plan that the call was begun with; "
        "token_weight_sums that no loss of the step counts: tokens would all weigh 1"
    )

    @classmethod
    def of(cls, step: StepFacts) -> Terms | None:
        """Make it for one of several schedule calls, and for a plan with sums of token weights."""
        has_sums = step.plan.sequences.token_weight_sums is not None
        return cls() if has_sums or step.scaling.is_deferred or step.accumulates else None

    def on_unusual_term(self, step: StepFacts, line: Line, term: Term, plan: StepPlan) -> None:
        """Refuse a term of another division."""
        if step.forward_only or not term.can_be_trained:
            return
        if step.scaling.is_deferred:
            check_total(step.plan.aggregation, term.aggregation, "term")
        check_accumulated(step.accumulates, term.aggregation.mode)
        own, other = ((one.total is None, one.num_calls) for one in (step.plan, plan))
        if own != other:
            raise ContractError(
                "got a reducer of the plan that a schedule call was begun with, whose weights know "
                "nothing of the other calls: take step.plan.under(...), or mb.reduce(losses, mode)"
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
