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
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed
from forked_ranks import fork_ranks

STAND_INS = "megatron_lossagg.cpu"
WITHOUT_MEGATRON = ("torch.distributed", "torch.fx.experimental.symbolic_shapes", "pytest")
WITH_MEGATRON = (
    "megatron_lossagg.verify.verdict",
    "megatron_lossagg.cpu.model",
    "torch._inductor.compile_fx",
    "pytest",
)
"""What to import: the modules that import all of Megatron-Core that the package uses, what ranks
import of torch's compiler, and pytest, which many workers import.

A test asks that without Megatron-Core ``torch._dynamo`` is not imported: there, what it imports.
"""


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

    def start(self) -> None:
        """Start to import, unless that has begun; the first launch does it too."""
        with self._starting:
            if self._is_closed:
                raise RuntimeError("the fork server is closed")
            if self._server is None:
                self._start()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.start()
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
