"""The counts that a loop passes for a step: those of the tensor-parallel group's first rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import message_of
from megatron_lossagg.reduction.exchange import gather_counts
from megatron_lossagg.reduction.integers import is_integer
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Sequences, check_constant, columns_of

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

    On all ranks of a tensor-parallel group it is its first rank's: one ``all_gather_object`` if it
    has several. ``forward_only``: must be the same on them.
    """
    names = columns_of(type(sequences))
    given = {n: getattr(sequences, n) for n in names if getattr(sequences, n) is not None}
    kind = "an evaluation" if forward_only else "a training step"
    given, fault = _of_first_rank(given, run.tp_group, kind=kind)
    own_m = given.get("num_microbatches", num_microbatches)
    if not is_integer(num_microbatches, lowest=1) and not fault:
        fault = (
            f"got num_microbatches {num_microbatches!r}, expected an integer from 1: pass what the "
            "schedule gets"
        )
    if not (is_integer(own_m) and own_m == num_microbatches) and not fault:
        fault = (
            f"got num_microbatches {num_microbatches} and Sequences(num_microbatches={own_m!r}): "
            "leave that of the sequences out"
        )
    if "active_tokens" not in given and not fault:
        fault = "got no counts: pass active_tokens=, at least on the first tensor-parallel rank"
    of_rank = {"active_tokens": []} if fault else given
    return plan_step(
        run.aggregation,
        type(sequences)(**of_rank | {"num_microbatches": num_microbatches}),
        group=run.dp_group,
        options=run.options.of_step(forward_only),
        fault=fault,
        forward_only=forward_only,
        iteration=iteration,
    )


def _of_first_rank(
    given: dict[str, Any], tp_group: ProcessGroup, *, kind: str
) -> tuple[dict[str, Any], str]:
    if tp_group.size() == 1:
        return given, ""
    own, fault = {}, ""
    try:
        own = {name: _listed(name, value) for name, value in given.items()}
    except Exception as error:  # of any type: no rank may leave the others waiting
        fault = message_of(error)
    gathered, fault = gather_counts((kind, own), fault, tp_group)
    (kinds, (first, *others)) = zip(*gathered, strict=True)
    rank = next((rank for rank, each in enumerate(kinds) if each != kinds[0]), None)
    if not fault and rank is not None:
        fault = (
            f"tensor-parallel rank 0 begins {kinds[0]}, rank {rank} {kinds[rank]}: begin the same "
            "steps on all of them, in the same order"
        )
    other = next((n for n, each in enumerate(others, 1) if each not in ({}, first)), None)
    if not fault and other is not None:
        fault = (
            f"tensor-parallel ranks 0 and {other} pass different counts: give both the same "
            f"data, or leave the counts of rank {other} out"
        )
    return first, fault


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
