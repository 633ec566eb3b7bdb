"""The counts that a loop passes for a step: those of the tensor-parallel group's first rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import PlanError
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
