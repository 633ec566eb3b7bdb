"""Run a program on ranks of this machine, under torch's launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_AGENT, _TIED = (Path(__file__).with_name(name) for name in ("agent.py", "tied.py"))
_MARK = "MEGATRON_LOSSAGG_LAUNCH"
_GRACE_SECONDS = 2.0


def launch(
    command: Sequence[str],
    *,
    processes: int,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` on ``processes`` ranks over loopback and return what it printed.

    ``command`` is a Python script with its arguments, or ``["-m", module, ...]``. ``env`` is added
    to this process's environment; each rank gets one OpenMP thread unless it sets a number itself,
    and on Linux the batch scheduling policy.
    The rendezvous takes a free port of 127.0.0.1, so several launches can run at the same time and
    no other machine reaches one. When one rank fails, ``torch.distributed.run`` ends the others.
    After ``timeout`` seconds everything is killed and ``subprocess.TimeoutExpired`` raised, with
    the output so far. Nothing is left running in any case; on Linux not even if this process, or
    the thread that called, is killed.
    """
    with TemporaryDirectory() as folder:  # torchrun leaves its own behind
        agent = [sys.executable, str(_AGENT), str(processes), folder, sys.executable, "-u"]
        return _run([*agent, *command], timeout, env or {})


def _run(
    command: Sequence[str], timeout: float | None, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the launcher, and end with it all that it starts."""
    mark = os.environ.get(_MARK, "") + uuid.uuid4().hex  # begins as that of who launched us
    # It ends when this process, or the thread that starts it, does.
    arguments = [sys.executable, "-IS", str(_TIED), str(os.getpid()), *command]
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(env, mark),
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        _kill(process, mark)
        stdout, stderr = process.communicate()
        raise subprocess.TimeoutExpired(
            arguments, expired.timeout, output=stdout, stderr=stderr
        ) from None
    finally:
        _kill(process, mark)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def _environment(env: Mapping[str, str], mark: str) -> dict[str, str]:
    ours = {"OMP_NUM_THREADS": "1", _MARK: mark}
    if sys.platform == "linux":
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    return {**os.environ, **ours, **env}


def _kill(process: subprocess.Popen[str], mark: str) -> None:
    """Kill the launcher's process group, then every rank: ranks have sessions of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _GRACE_SECONDS
    while (ranks := _marked(mark)) and time.monotonic() < deadline:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    """Find the processes whose mark begins as this launch's; Linux only, else none."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if b"\0" + wanted in b"\0" + environ.read_bytes():
                found.append(int(environ.parent.name))
    return found
