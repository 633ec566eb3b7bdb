"""Whether all ranks run the same: the same Megatron-Core, loss scaling, options and aggregation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_lossagg.errors import ContractError, say

_PATIENCE = 30.0
"""Seconds after which a rank that waits for others says so."""
_calls = itertools.count()


def agree(fault: str, settings: str) -> None:
    """Raise one :class:`ContractError` on every rank of the world, or on none.

    A rank that waits for another one longer than half a minute names it, and goes on waiting.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    with _named_if_late():
        dist.all_gather_object(gathered, (fault, settings))
    for rank, (fault_of_rank, _) in enumerate(gathered):
        if fault_of_rank:
            raise ContractError(f"rank {rank}: {fault_of_rank}")
    first = gathered[0][1]
    for rank, (_, settings_of_rank) in enumerate(gathered):
        if settings_of_rank != first:
            raise ContractError(
                f"ranks disagree: rank 0 has {first}, rank {rank} has {settings_of_rank}: start "
                "all ranks with the same flags and versions"
            )


@contextmanager
def said_if_waiting(kind: str) -> Iterator[None]:
    """Say which step this rank begins if the others do not come to it in half a minute.

    A rank that repeats or evaluates a step alone waits here, and the others in the model.
    """
    if dist.get_world_size() == 1:
        yield
        return
    line = (
        f"rank {dist.get_rank()} has waited {_PATIENCE:g} s for other ranks to begin {kind}: a "
        "step that one rank begins alone, as after an error that it caught, never ends; begin it "
        "on all ranks, or let the error end the run"
    )
    with _after_a_while(say, line):
        yield


@contextmanager
def _named_if_late() -> Iterator[None]:
    """Say which ranks have not come to an exchange after a while, or why it has failed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        yield
        return
    # No collective: each rank leaves its number in the store, and the first looks for the others'.
    store = dist.distributed_c10d._get_default_store()
    prefix = f"lossagg/{next(_calls)}"
    try:
        store.set(f"{prefix}/{rank}", "")
        is_first = store.add(prefix, 1) == 1
    except RuntimeError:  # a store that keeps nothing
        is_first = False
    if not is_first:
        yield
        return

    def late() -> str:
        own = getattr(store, "clone", lambda: store)()  # the backend may wait in it
        return _named([other for other in range(size) if not own.check([f"{prefix}/{other}"])])

    def report() -> None:
        if ranks := late():
            say(
                f"rank {rank} has waited {_PATIENCE:g} s for {ranks} to begin the loss "
                "aggregation; a rank without the flags of --loss-aggregation never does"
            )

    try:
        with _after_a_while(report):
            yield
    except RuntimeError as error:
        if ranks := late():
            raise ContractError(
                f"{ranks} began no loss aggregation, expected every rank to: start all ranks with "
                "the same flags of --loss-aggregation"
            ) from error
        raise


@contextmanager
def _after_a_while(do: Callable[..., None], *arguments: str) -> Iterator[None]:
    """Call a function on a thread of its own if this takes long."""
    timer = threading.Timer(_PATIENCE, do, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _named(ranks: list[int]) -> str:
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
