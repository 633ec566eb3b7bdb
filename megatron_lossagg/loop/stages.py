"""A step begins on every stage of a pipeline, or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError, message_of
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.exchange import Exchange

__all__ = ["begun_on_all_stages"]


def begun_on_all_stages(
    begin: Callable[[], Step], num_microbatches: int, pp_group: ProcessGroup, *, forward_only: bool
) -> Step:
    """Return what ``begin`` returns, or raise on all stages if one raises or has another M or kind.

    Tells each stage the last one's sum of weights if side losses follow it. One all-gather over the
    pipeline-parallel group if it has several ranks.
    """
    step, error = None, None
    try:
        step = begin()
    except Exception as found:  # of any type: no stage may leave the others waiting
        error = found
    message = "" if error is None else message_of(error)
    what = f"{'evaluate' if forward_only else 'train'} {num_microbatches}"
    scale = None if step is None else step.side_losses
    weight_sum = "" if scale is None or scale.weight_sum is None else repr(scale.weight_sum)
    of_stages = Exchange(pp_group).messages(f"{what}\n{weight_sum}\n{message}")
    if error is not None:
        raise error
    assert step is not None
    stages = [text.split("\n", 2) for text in of_stages]
    fault = _fault_of_stages(stages)
    if fault:
        step.end()
        raise ContractError(fault)
    if scale is not None and stages[-1][1]:
        scale.weight_sum = float(stages[-1][1])
    return step


def _fault_of_stages(found: Sequence[Sequence[str]]) -> str:
    """Name the first pipeline stage that failed or begins another step, if one does."""
    for stage, (what, _, message) in enumerate(found):
        if message:
            return f"pipeline stage {stage}: {message}"
        if what != found[0][0]:
            return (
                f"pipeline stages 0 and {stage} {found[0][0]} and {what} microbatches: pass every "
                "stage of a pipeline the same num_microbatches and forward_only"
            )
    return ""
