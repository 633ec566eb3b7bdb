"""A process group whose ranks are threads of one process, for the package's own collectives.

torch's multi-threaded group, which its tests use, keeps every rank's results at once: with a
million sequences on 1,024 ranks that is 40 GB. Here one thread runs at a time, from one collective
to the next, and a rank's results come into being when its turn comes. Registered with
torch.distributed, so that ``dist.all_gather`` and ``dist.all_gather_object`` are the calls that
the package makes; only all-gathers are implemented, because the package makes no others.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks.rank_step import Traffic

__all__ = ["run_ranks", "traffic"]

BACKEND = "in_process"
STACK_BYTES = 2**20
"""Of a thread: 1,024 of the default size would be 8 GB of address space."""
TRIM_EVERY = 32
"""Ranks that end between two returns of freed memory to the system, which the C library keeps."""

T = TypeVar("T")


class _AbandonedError(Exception):
    """Another rank has raised: nobody waits for this one."""


@dataclass(eq=False)
class _Meeting:
    """One collective: what each rank that has come brought."""

    given: dict[int, Tensor] = field(default_factory=dict)


class _Hub:
    """Where the ranks meet; whoever holds ``turn`` runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition(threading.Lock())
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.has_failed = False

    def meet(self, key: tuple[str, int], size: int, rank: int, own: Tensor) -> dict[int, Tensor]:
        """Leave ``own`` for the others and wait until all ``size`` ranks have come."""
        meeting = self.meetings.setdefault(key, _Meeting())
        meeting.given[rank] = own
        if len(meeting.given) == size:
            self.turn.notify_all()
        # Waiting passes the turn on.
        self.turn.wait_for(lambda: len(meeting.given) == size or self.has_failed)
        if self.has_failed:
            raise _AbandonedError
        return meeting.given

    def fail(self) -> None:
        """Let no rank wait any longer."""
        self.has_failed = True
        self.turn.notify_all()


_of_thread = threading.local()


def traffic() -> Traffic:
    """Return what has come to the rank that calls, since it started."""
    found: Traffic = _of_thread.traffic
    return found


class _Group(dist.ProcessGroup):
    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._key, self._rank, self._size, self._number = name, rank, size, 0

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (targets,), (own,) = outputs, inputs
        self._number += 1
        given = _of_thread.hub.meet((self._key, self._number), self._size, self._rank, own)
        began = time.thread_time()
        for rank, target in enumerate(targets):
            target.copy_(given[rank])
        found = traffic()
        found.collectives += 1
        found.bytes += sum(target.nbytes for target in targets)
        found.copying += time.thread_time() - began
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(outputs)
        return _create_work_from_future(done)


def _create(store: Any, rank: int, size: int, timeout: Any) -> _Group:
    # A group of one rank never meets; the others are the world, whose store has one prefix.
    return _Group("world" if size == _of_thread.hub.size else f"alone {rank}", rank, size)


dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


def run_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """Run ``work(rank)`` on every rank of a world of ``size`` threads; return the results.

    Inside, ``torch.distributed`` is initialized and every name of it is the rank's own. The
    first error of a rank is raised here, and ends the others.
    """
    hub, store = _Hub(size), dist.HashStore()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        _of_thread.hub, _of_thread.traffic = hub, Traffic()
        with hub.turn:
            try:
                dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
                results[rank] = work(rank)
            except _AbandonedError:
                pass
            except BaseException as error:
                errors.append(error)
                hub.fail()
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
                if len(results) % TRIM_EVERY == 0:
                    _return_freed_memory()

    previous_stack, excepthook = threading.stack_size(STACK_BYTES), sys.excepthook
    multi_threaded_pg._install_threaded_pg()  # each thread has a world of its own
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        threading.stack_size(previous_stack)
        sys.excepthook = excepthook  # which each rank's group has wrapped
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def _return_freed_memory() -> None:
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
