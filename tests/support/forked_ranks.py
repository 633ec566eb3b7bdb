"""Ranks forked from this process, with what it has imported, and their end.

For :mod:`fork_server`, and for a process that forks ranks of its own (``mutants/over_ranks.py``).
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed

_ADDRESS = "127.0.0.1"
_POLL_SECONDS = 0.02


class Ended(NamedTuple):
    """How the ranks of a launch ended."""

    statuses: list[int]
    """Exit status of each rank, -9 if it was killed."""
    timed_out: bool


def fork_ranks(
    work: Callable[[], int | None],
    *,
    processes: int,
    outputs: Sequence[tuple[Path, Path]],
    environment: Mapping[str, str],
    timeout: float,
    good: Collection[int] = (0,),
    wait: Callable[[float], None] = time.sleep,
) -> Ended:
    """Fork the ranks of a launch, each of which runs ``work``, and wait for their end.

    ``outputs``: the files for stdout and stderr of each rank, appended to. ``environment``: all
    of it but what the launcher adds. ``work`` returns the exit status. As soon as a rank ends
    with a status that is not ``good``, and after ``timeout`` seconds, the others are killed,
    with the processes that they started. ``wait`` is called between two looks at the ranks;
    if it raises, all of them are killed.
    """
    tasks = Path("/proc/self/task")
    if tasks.exists() and len(names := list(tasks.iterdir())) > 1:  # a fork leaves their locks held
        raise RuntimeError(f"got a process with {len(names)} threads, expected 1 before a fork")
    gc.freeze()  # else every collection in a rank walks all that was imported
    listener = socket.create_server((_ADDRESS, 0), backlog=128)
    port = listener.getsockname()[1]
    sys.stdout.flush()
    sys.stderr.flush()
    pids: list[int] = []
    statuses: dict[int, int] = {}
    store = None
    try:
        for rank in range(processes):
            pid = os.fork()
            if pid == 0:
                listener.close()
                added = _environment_of(rank, processes, port)
                _be_rank(work, {**environment, **added}, outputs[rank])
            pids.append(pid)
        # The store outlives every rank, as the launcher's does; it runs a thread: after the forks.
        options = {"is_master": True, "wait_for_workers": False}
        store = torch.distributed.TCPStore(
            _ADDRESS, port, **options, master_listen_fd=listener.detach()
        )
        timed_out = _wait_for(pids, statuses, timeout, good, wait)
    finally:
        for pid in pids:
            _kill(pid, is_running=pid not in statuses)
        for pid in set(pids) - set(statuses):
            statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        del store  # joins its thread: the next launch forks
        listener.close()
    return Ended([statuses[pid] for pid in pids], timed_out)


def _wait_for(
    pids: Sequence[int],
    statuses: dict[int, int],
    timeout: float,
    good: Collection[int],
    wait: Callable[[float], None],
) -> bool:
    """Wait until all have ended or one is not ``good``; fill ``statuses``, return if time is up."""
    deadline = time.monotonic() + timeout
    while len(statuses) < len(pids) and set(statuses.values()) <= set(good):
        for pid in set(pids) - set(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if len(statuses) < len(pids):
            if time.monotonic() > deadline:
                return True
            wait(_POLL_SECONDS)
    return False


def _environment_of(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return what ``torch.distributed.run`` adds to a rank's environment on one node."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(processes)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _be_rank(
    work: Callable[[], int | None], environment: Mapping[str, str], output: tuple[Path, Path]
) -> NoReturn:
    """Run ``work`` in this process, and end it."""
    status = 1
    try:
        os.setsid()  # a group of its own, to be killed with what it starts
        _be_a_batch_process()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in zip((1, 2), output, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        _share_a_device()
        status = work() or 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            status = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch.distributed's names the rank
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)


def _be_a_batch_process() -> None:
    """Do not interrupt a rank that computes when a message wakes this one: as launched ranks."""
    with suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _share_a_device() -> None:
    """Let the groups of this process share one gloo device, made with the first of them.

    Else each has one, whose thread wakes 100 times per second; Megatron-Core makes 21 groups.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    device, make = functools.cache(gloo.create_default_device), gloo.__init__

    def make_on_device(self: Any, *group: Any, **given: Any) -> None:
        try:
            options = gloo._Options()
            options._devices = [device()]
            for name, value in given.items():
                setattr(options, "_timeout" if name == "timeout" else name, value)
            make(self, *group, options)
        except (AttributeError, TypeError):  # a torch whose groups are made with others
            make(self, *group, **given)

    gloo.__init__ = make_on_device


def _kill(pid: int, *, is_running: bool) -> None:
    """Kill the processes of a rank's group, and the rank before it has made one."""
    for kill in (os.killpg, *([os.kill] if is_running else [])):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
