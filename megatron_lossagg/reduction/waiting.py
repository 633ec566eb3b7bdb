"""For whom a rank waits: said after half a minute, and by the error of an exchange that failed.

No collective: a rank that has waited a while leaves its number in the process group's store, where
the first that has waited too long looks for the others'. One thread of the process looks at all
waits, so that a wait itself costs no more than an entry of a list.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron_lossagg.errors import ContractError, say

PATIENCE = 30.0
"""Seconds after which a rank that waits for others says so."""
TICK = 1.0
"""Seconds between two looks."""

_numbers: Counter[str] = Counter()
"""Exchanges of each group, by its name: the same on all of its ranks that take part."""
_waits: list[_Wait] = []
_watcher: threading.Thread | None = None


def to_begin(forward_only: bool | None) -> str:
    """Say what ranks begin, for ``doing``, and why one may wait for the others forever."""
    kind = {None: "a step", True: "an evaluation", False: "a training step"}[forward_only]
    return (
        f"begin {kind}; a step that one rank begins alone, as after an error that it caught, never "
        "ends: begin it on all ranks, or let the error end the run"
    )


@contextmanager
def waiting(group: dist.ProcessGroup, doing: str) -> Iterator[None]:
    """Name the ranks that do not come to an exchange of ``group``; ``doing``: what for.

    After :data:`PATIENCE` in a line, once, and this rank goes on waiting; if the exchange then
    fails, in a :class:`ContractError`.
    """
    global _watcher
    wait = _Wait(group, doing)
    _waits.append(wait)
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="lossagg-waits", daemon=True)
        _watcher.start()
    try:
        yield
    except RuntimeError as error:
        if names := wait.late():
            raise ContractError(
                f"{names} did not come in time, expected every rank to {doing}"
            ) from error
        raise
    finally:
        _waits.remove(wait)


@dataclass(eq=False)
class _Wait:
    """One exchange of this rank with others."""

    group: dist.ProcessGroup
    doing: str
    began: float = field(default_factory=time.monotonic)
    is_marked: bool = False
    is_said: bool = False

    def __post_init__(self) -> None:
        name = str(getattr(self.group, "group_name", ""))
        _numbers[name] += 1
        self.key = f"lossagg/{name}/{_numbers[name]}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def look(self) -> None:
        """Leave this rank's number in the store after a while, and name the others later."""
        if not self.is_marked and self.seconds > PATIENCE / 6:
            self.is_marked = True
            _store().set(f"{self.key}/{dist.get_rank()}", "")
        if not self.is_said and self.seconds > PATIENCE:
            self.is_said = True
            is_first = _store().add(self.key, 1) == 1
            if is_first and (names := self.late()):
                say(f"rank {dist.get_rank()} has waited {PATIENCE:g} s for {names} to {self.doing}")

    def late(self) -> str:
        """Name the ranks that have not waited here; empty if none, and before it is late."""
        if self.seconds < PATIENCE:
            return ""
        with suppress(RuntimeError):  # a store that is gone
            store, ranks = _store(), dist.get_process_group_ranks(self.group)
            ranks = [one for one in ranks if one != dist.get_rank()]
            return _named([rank for rank in ranks if not store.check([f"{self.key}/{rank}"])])
        return ""


def _watch() -> None:
    while True:
        time.sleep(TICK)
        for wait in [*_waits]:
            with suppress(Exception):  # a group that ends, a store that keeps nothing
                wait.look()


def _store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    clone = getattr(store, "clone", None)  # the backend may wait in the store itself
    return store if clone is None else clone()


def _named(ranks: list[int]) -> str:
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
