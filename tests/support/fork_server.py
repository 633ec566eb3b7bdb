"""Ranks forked from a process that has imported torch and Megatron-Core already.

Under ``megatron_lossagg.cpu.launch`` every rank imports for seconds before it starts. A
:class:`ForkServer` is a process that imports once and forks the ranks of each launch: a rank
has the environment, the arguments and the exit status that it would have under the launcher,
and nothing that it does reaches another launch. What differs: the ranks share the seed of
string hashes, the groups of a rank share one gloo device, and ranks end without the
interpreter's own teardown. What is about launching itself is therefore tested under the
launcher (``test_cpu_launch.py``, ``test_faults.py``).

``python fork_server.py SOCKET MODULE ...`` is the process of a :class:`ForkServer`. It installs
the CPU stand-ins if one of the modules needs Megatron-Core, imports the modules, and forks one
process per connection to its socket. That process reads the request, forks the ranks, and answers
when they have ended, so that several launches run at once. Request and answer are one line of
JSON each.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed

STAND_INS = "megatron_lossagg.cpu"
WITHOUT_MEGATRON = ("torch.distributed", "pytest")
WITH_MEGATRON = ("megatron_lossagg.verify.verdict", "megatron_lossagg.cpu.model", "pytest")
"""What to import: the modules that import all of Megatron-Core that the package uses, and pytest,
which many workers import.
"""

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
    timed_out = False
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
        deadline = time.monotonic() + timeout
        while len(statuses) < processes and set(statuses.values()) <= set(good):
            for pid in set(pids) - set(statuses):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            if len(statuses) < processes:
                timed_out = time.monotonic() > deadline
                if timed_out:
                    break
                wait(_POLL_SECONDS)
    finally:
        for pid in pids:
            _kill(pid, is_running=pid not in statuses)
        for pid in set(pids) - set(statuses):
            statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        del store  # joins its thread: the next launch forks
        listener.close()
    return Ended([statuses[pid] for pid in pids], timed_out)


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


class ForkServer:
    """A process that imports once and forks the ranks of each launch; started when first used.

    Threads may launch at the same time.
    """

    def __init__(
        self, imports: Sequence[str], *, path: str, environment: Mapping[str, str] = os.environ
    ) -> None:
        """``imports``: modules that every rank finds imported.

        ``path``: its ``PYTHONPATH``. ``environment``: of every rank, but for what is set here.
        """
        self._imports = imports
        self._environment = {
            **environment,
            "PYTHONPATH": path,
            # Unbuffered, a line and its end are two writes.
            "PYTHONUNBUFFERED": "",
            "OMP_NUM_THREADS": "1",
            # Asked in another way, whether there is CUDA initializes it: no fork survives that.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        if sys.platform == "linux":
            self._environment["GLOO_SOCKET_IFNAME"] = "lo"
        self._starting = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._folder: Any = None
        self._is_closed = False

    def launch(
        self,
        command: Sequence[str],
        *,
        processes: int,
        timeout: float,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` as :func:`megatron_lossagg.cpu.launch` does, on forked ranks.

        The output has all lines of rank 0, then all of rank 1, and so on. Where a rank fails,
        the return code is 1 and stderr ends with how each rank ended.
        """
        with tempfile.TemporaryDirectory() as folder:
            outputs = [
                (f"{folder}/{rank}.out", f"{folder}/{rank}.err") for rank in range(processes)
            ]
            answer = self._ask(
                {
                    "command": list(command),
                    "processes": processes,
                    "outputs": outputs,
                    "environment": {**self._environment, **(env or {})},
                    "folder": str(Path.cwd()),
                    "timeout": timeout,
                }
            )
            stdout, stderr = (
                "".join(Path(path).read_text() if Path(path).exists() else "" for path in paths)
                for paths in zip(*outputs, strict=True)
            )
        statuses = answer["statuses"]
        if any(statuses):
            stderr += "".join(_described(rank, status) for rank, status in enumerate(statuses))
        if answer["timed_out"]:
            raise subprocess.TimeoutExpired(list(command), timeout, output=stdout, stderr=stderr)
        return subprocess.CompletedProcess(list(command), int(any(statuses)), stdout, stderr)

    def close(self) -> None:
        """End the process, the ranks of every launch that is still running, and later launches."""
        self._is_closed = True
        if self._server is not None:
            server, self._server = self._server, None
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
            self._folder.cleanup()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._starting:
            if self._is_closed:
                raise RuntimeError("the fork server is closed")
            if self._server is None:
                self._start()
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"{self._folder.name}/socket")
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as answers:
                    line = answers.readline()
        except (BrokenPipeError, ConnectionError):
            line = b""
        if not line:
            errors = Path(self._folder.name, "errors").read_text()
            raise RuntimeError(f"the fork server did not answer:\n{errors[-8000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with (
            socket.socket(socket.AF_UNIX) as listener,
            Path(self._folder.name, "errors").open("w") as errors,
        ):
            listener.bind(f"{self._folder.name}/socket")
            listener.listen(128)  # a launch can connect before the imports are done
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), *self._imports],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=[listener.fileno()],
                env=self._environment,
                start_new_session=True,  # an interrupt from the keyboard ends it through close()
            )


def _described(rank: int, status: int) -> str:
    """Report how a rank ended, in the launcher's words."""
    words = f"Signal {-status} ({signal.Signals(-status).name}) received" if status < 0 else ""
    return f"rank {rank} exitcode : {status} {words}".rstrip() + "\n"


class _ClientGoneError(Exception):
    """The process that made the request has ended, or does not wait for the answer."""


def serve(listener: socket.socket, imports: Sequence[str]) -> None:
    """Import, then fork a process for each connection until standard input ends."""
    # A machine with CUDA runs the workers as it would under the launcher: they decide.
    needs_megatron = any(name.startswith("megatron") for name in imports)
    if needs_megatron and not torch.cuda.is_available():
        importlib.import_module(STAND_INS).install()
    for name in imports:
        importlib.import_module(name)
    gc.collect()

    while True:
        stdin_or_listener, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in stdin_or_listener:  # nothing is written to it: it has ended
            break
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            status = 1
            try:
                with suppress(_ClientGoneError, ConnectionError):
                    _answer(connection)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        connection.close()
        _reap(os.WNOHANG)
    _reap(0)  # each of them sees that standard input has ended


def _reap(options: int) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, options) != (0, 0):
            continue


def _answer(connection: socket.socket) -> None:
    """Read a request, fork its ranks, and write how they ended."""
    with connection.makefile("rb") as requests:
        request = json.loads(requests.readline())

    def wait(seconds: float) -> None:
        # Nothing is written before the answer: what can be read is an end.
        if select.select([connection, sys.stdin], [], [], seconds)[0]:
            raise _ClientGoneError

    def work() -> None:
        connection.close()
        os.chdir(request["folder"])
        _run(request["command"])

    ended = fork_ranks(
        work,
        processes=request["processes"],
        outputs=[(Path(out), Path(err)) for out, err in request["outputs"]],
        environment=request["environment"],
        timeout=request["timeout"],
        wait=wait,
    )
    connection.sendall(json.dumps(ended._asdict()).encode() + b"\n")


def _run(command: Sequence[str]) -> None:
    """Run a script, or ``-m`` and a module, as ``__main__`` with its arguments."""
    if command[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(command[0]).resolve().parent)
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
