"""A step begins on every pipeline stage and context-parallel rank of a model, or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.errors import ContractError
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.exchange import together
from megatron_lossagg.reduction.waiting import to_begin


def begun_together(
    begin: Callable[[], Step], num_microbatches: int, groups: LiveGroups, *, forward_only: bool
) -> Step:
    """Return what ``begin`` returns, or raise on all ranks if one raises or has another M or kind.

    Tells each stage the last one's sum of weights if side losses follow it. One all-gather over the
    pipeline-parallel group and one over the context-parallel group, if they have several ranks.
    """
    doing = to_begin(forward_only)
    what = f"{'evaluate' if forward_only else 'train'} {num_microbatches}"
    step: Step | None = None
    fault: Exception | None = None
    try:
        with together(groups.cp_group, doing, named="context-parallel rank {}") as ranks:
            with together(groups.pp_group, doing, named="pipeline stage {}") as stages:
                step = begin()
                scale = step.side_losses
                stages.own = what, None if scale is None else scale.weight_sum
            _check_same("pipeline stage", [what for what, _ in stages.of_ranks])
            ranks.own = what, step.own_numbers
        _check_same("context-parallel rank", [what for what, _ in ranks.of_ranks])
        _check_numbers([own for _, own in ranks.of_ranks])
    except ContractError as error:
        fault = stages.error or error  # of the type that begin() raised, on its own rank
    if fault is not None:
        if step is not None:
            step.end()
        raise fault
    assert step is not None
    if scale is not None and stages.of_ranks[-1][1] is not None:
        scale.weight_sum = stages.of_ranks[-1][1]
    return step


def _check_numbers(of_ranks: Sequence[str]) -> None:
    """Name the first context-parallel rank that passes other numbers than the first, if any."""
    other = next((rank for rank, own in enumerate(of_ranks) if own != of_ranks[0]), None)
    if other is None:
        return
    differing = set(of_ranks[0].split()) ^ set(of_ranks[other].split())
    names = " and ".join(sorted({one.partition("=")[0] for one in differing}))
    raise ContractError(
        f"context-parallel ranks 0 and {other} pass different {names} of the same sequences: pass "
        "equal ones on every rank of a context-parallel group"
    )


def _check_same(kind: str, begun: Sequence[str]) -> None:
    """Name the first one that begins another step than the first, if one does."""
    for number, what in enumerate(begun):
        if what != begun[0]:
            raise ContractError(
                f"{kind}s 0 and {number} {begun[0]} and {what} microbatches: pass all of them the "
                "same num_microbatches and forward_only"
            )
