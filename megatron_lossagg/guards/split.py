"""Whether losses are split over context-parallel ranks as the model is, zigzag or contiguous.

With dynamic context parallelism: whether a mode's weights follow from parts of sequences. A split
that no layout here has is an option of the model: ``contract/megatron_options.py``.
"""

from __future__ import annotations

from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.modes import OWN_WEIGHTS
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.step_state import Line, Term

_OF_WHOLE_SEQUENCES = ("microbatch_token_mean", "row_mean", OWN_WEIGHTS)


def check_parts(groups: LiveGroups, aggregation: Aggregation) -> None:
    """Refuse weights that follow from whole sequences if each rank counts parts of them.

    As with dynamic context parallelism. Raises :class:`ContractError`. No collective.
    """
    if groups.is_dynamic and aggregation.mode in _OF_WHOLE_SEQUENCES:
        raise ContractError(
            f"got {aggregation.mode} with dynamic_context_parallel, expected a mode whose weights "
            "do not depend on the sequences of a sample or microbatch: each rank counts parts of "
            "them; choose another --loss-aggregation"
        )


def check_split(groups: LiveGroups, layout: Layout) -> None:
    """Refuse a layout of a different context-parallel rank, or of another split.

    Raises :class:`ContractError`. No collective.
    """
    if (layout.cp_size, layout.cp_rank) != (groups.cp_size, groups.cp_rank):
        raise ContractError(
            f"got a layout of CP rank {layout.cp_rank} of {layout.cp_size}, this rank is "
            f"{groups.cp_rank} of {groups.cp_size}: pass step.microbatch cu_seqlens= "
            "or lengths=, or make the layout with the aggregator's cp_size and cp_rank"
        )
    if layout.cp_size > 1 and layout.split not in (groups.split, None):
        raise ContractError(
            f"got the layout {layout.name}, the model's cp_partition_mode is {groups.split}: "
            "pass step.microbatch cu_seqlens=, which takes the model's; or lengths=, with a "
            "mask and losses that are sliced already; or gathered(sums_gradients=True), if "
            "losses are gathered and the backward pass sums their gradients over the ranks"
        )


class Split(Guard):
    """Refuse a layout of a different context-parallel rank, or of another split, immediately.

    ``step.microbatch`` checks the layouts that it gets, this those of ``StepPlan.reducer``. And it
    refuses a mode that cannot be counted in parts, if the ranks count parts of sequences.
    """

    catches = (
        "a layout of another rank or split: one sequence's weight on another one's tokens; a mode "
        "that needs whole sequences, of which ranks count parts"
    )

    may_only_warn = False

    def on_unusual_term(self, step: StepFacts, line: Line, term: Term, plan: StepPlan) -> None:
        """Check a term's mode, and the layout of what is trained; a metric may have any."""
        check_parts(step.groups, term.aggregation)
        if term.can_be_trained and not line.is_of_step:
            check_split(step.groups, line.layout)
