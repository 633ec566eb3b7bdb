"""A rank that waits for others longer than half a minute says for whom, and goes on waiting."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_lossagg.errors import ContractError, say

_PATIENCE = 30.0
"""Seconds after which a rank that waits for others says so."""
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Of each exchange."""


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
def named_if_late(waits: str, never: str) -> Iterator[None]:
    """Say which ranks have not come to an exchange after a while, or why it has failed.

    ``waits``: what they are waited for to do, and what makes them; ``never``: what they did not do.
    It goes on waiting; a :class:`ContractError` if the exchange fails and some have not come.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        yield
        return
    # No collective: each rank leaves its number in the store, and the first looks for the others'.
    store = dist.distributed_c10d._get_default_store()
    prefix = f"lossagg/{waits}/{next(_calls[waits])}"
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
            say(f"rank {rank} has waited {_PATIENCE:g} s for {ranks}{waits}")

    try:
        with _after_a_while(report):
            yield
    except RuntimeError as error:
        if ranks := late():
            raise ContractError(f"{ranks} {never}") from error
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
