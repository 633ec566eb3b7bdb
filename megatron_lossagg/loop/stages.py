"""A step begins on every pipeline stage and context-parallel rank of a model, or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.contract.waiting import said_if_waiting
from megatron_lossagg.errors import ContractError, message_of
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.exchange import Exchange


def begun_together(
    begin: Callable[[], Step], num_microbatches: int, groups: LiveGroups, *, forward_only: bool
) -> Step:
    """Return what ``begin`` returns, or raise on all ranks if one raises or has another M or kind.

    Tells each stage the last one's sum of weights if side losses follow it. One all-gather over the
    pipeline-parallel group and one over the context-parallel group, if they have several ranks.
    """
    kind = "an evaluation" if forward_only else "a training step"
    what = f"{'evaluate' if forward_only else 'train'} {num_microbatches}"
    step, error = None, None
    with said_if_waiting(kind):
        try:
            step = begin()
        except Exception as found:  # of any type: no rank may leave the others waiting
            error = found
        message = "" if error is None else message_of(error)
        scale = None if step is None else step.side_losses
        weight_sum = "" if scale is None or scale.weight_sum is None else repr(scale.weight_sum)
        of_stages = Exchange(groups.pp_group).messages(f"{what}\n{weight_sum}\n{message}")
        stages = [text.split("\n", 2) for text in of_stages]
        fault = _fault_of("pipeline stage", [(what, text) for what, _, text in stages])
        if groups.cp_group is not None:
            own = "" if step is None else step.own_numbers
            of_ranks = Exchange(groups.cp_group).messages(f"{what}\n{own}\n{fault}")
            ranks = [text.split("\n", 2) for text in of_ranks]
            of_cp = _fault_of("context-parallel rank", [(what, text) for what, _, text in ranks])
            fault = fault or of_cp or _differing([own for _, own, _ in ranks])
    if error is not None:
        raise error
    assert step is not None
    if fault:
        step.end()
        raise ContractError(fault)
    if scale is not None and stages[-1][1]:
        scale.weight_sum = float(stages[-1][1])
    return step


def _differing(of_ranks: Sequence[str]) -> str:
    """Name the first context-parallel rank that passes other numbers than the first, if any."""
    other = next((rank for rank, own in enumerate(of_ranks) if own != of_ranks[0]), None)
    if other is None:
        return ""
    differing = set(of_ranks[0].split()) ^ set(of_ranks[other].split())
    names = " and ".join(sorted({one.partition("=")[0] for one in differing}))
    return (
        f"context-parallel ranks 0 and {other} pass different {names} of the same sequences: pass "
        "equal ones on every rank of a context-parallel group"
    )


def _fault_of(kind: str, found: Sequence[tuple[str, str]]) -> str:
    """Name the first one that failed or begins another step, if one does."""
    first = found[0][0]
    for number, (what, message) in enumerate(found):
        if message:
            return f"{kind} {number}: {message}" if len(found) > 1 else message
        if what != first:
            return (
                f"{kind}s 0 and {number} {first} and {what} microbatches: pass all of them the "
                "same num_microbatches and forward_only"
            )
    return ""
