"""A step begins on every rank of a model, or on none.

The counts that a loop passes are those of the tensor-parallel group's first rank; pipeline stages
and context-parallel ranks begin together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.exchange import TP_RANK, together
from megatron_lossagg.reduction.integers import is_integer
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Sequences, check_constant, columns_of
from megatron_lossagg.reduction.waiting import to_begin

if TYPE_CHECKING:
    from megatron_lossagg.loop.aggregator import LossAggregator


def plan_of_rank(
    run: LossAggregator,
    sequences: Sequences,
    num_microbatches: int,
    forward_only: bool,
    iteration: int | None,
) -> StepPlan:
    """Plan a step of the run from what this rank passes to :meth:`LossAggregator.step`.

    On all ranks of a tensor-parallel group it is its first rank's: one all-gather if it
    has several. ``forward_only``: must be the same on them.
    """
    names = columns_of(type(sequences))
    given = {n: getattr(sequences, n) for n in names if getattr(sequences, n) is not None}

    def of_first_rank() -> Sequences:
        columns = _of_first_rank(given, run.tp_group, forward_only=forward_only)
        return type(sequences)(**_checked(columns, num_microbatches))

    return plan_step(
        run.aggregation,
        of_first_rank,
        group=run.dp_group,
        options=run.options.of_step(forward_only),
        forward_only=forward_only,
        iteration=iteration,
    )


def _checked(given: dict[str, Any], num_microbatches: int) -> dict[str, Any]:
    """Return the columns of a step with its M; raises :class:`PlanError`."""
    if not is_integer(num_microbatches, lowest=1):
        raise PlanError(
            f"got num_microbatches {num_microbatches!r}, expected an integer from 1: pass what the "
            "schedule gets"
        )
    own_m = given.get("num_microbatches", num_microbatches)
    if not (is_integer(own_m) and own_m == num_microbatches):
        raise PlanError(
            f"got num_microbatches {num_microbatches} and Sequences(num_microbatches={own_m!r}): "
            "leave that of the sequences out"
        )
    if "active_tokens" not in given:
        raise PlanError(
            "got no counts: pass active_tokens=, at least on the first tensor-parallel rank"
        )
    return given | {"num_microbatches": num_microbatches}


def _of_first_rank(
    given: dict[str, Any], tp_group: ProcessGroup, *, forward_only: bool
) -> dict[str, Any]:
    if tp_group.size() == 1:
        return given
    kind = "an evaluation" if forward_only else "a training step"
    with together(tp_group, to_begin(forward_only), named=TP_RANK, raises=PlanError) as ranks:
        ranks.own = kind, {name: _listed(name, value) for name, value in given.items()}
    kinds, (first, *others) = zip(*ranks.of_ranks, strict=True)
    rank = next((rank for rank, each in enumerate(kinds) if each != kinds[0]), None)
    if rank is not None:
        raise PlanError(
            f"tensor-parallel rank 0 begins {kinds[0]}, rank {rank} {kinds[rank]}: begin the same "
            "steps on all of them, in the same order"
        )
    other = next((n for n, each in enumerate(others, 1) if each not in ({}, first)), None)
    if other is not None:
        raise PlanError(
            f"tensor-parallel ranks 0 and {other} pass different counts: give both the same "
            f"data, or leave the counts of rank {other} out"
        )
    return dict(first)


def _listed(name: str, value: Any) -> Any:
    """Return an argument without tensors and arrays."""
    if name != "active_tokens":  # of a mask, which may be any tensor
        check_constant(name, value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _listed(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    return [one.item() if isinstance(one, Tensor) else one for one in value]


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
