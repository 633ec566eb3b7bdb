"""A verification as a value: the command pickles it, and every rank runs it.

The steps of a framework's driver are such a job too (``drivers/runs.py``).
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

import megatron_lossagg
from megatron_lossagg.contract.scaling import LOSS_SCALINGS, LossScaling
from megatron_lossagg.cpu.launch import launch
from megatron_lossagg.errors import say
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.environment import crowding
from megatron_lossagg.verify.parallelism import Parallelism

Event = dict[str, Any]
_ROOT_CAUSE = re.compile(r"^Root Cause .*?rank +: (\d+) .*?exitcode +: -(\d+)", re.DOTALL | re.M)
"""Of torch's launcher, if a signal ended the first rank that did not end well."""
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True, kw_only=True)
class Job:
    """The layouts, cases and loss scalings to verify; all layouts have one number of ranks."""

    layouts: Sequence[Parallelism]
    cases: Sequence[Case]
    loss_scalings: Sequence[LossScaling] = LOSS_SCALINGS

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world_size

    @property
    def num_verdicts(self) -> int:
        """Number of verdicts: one per layout, case and loss scaling."""
        return len(self.layouts) * len(self.cases) * len(self.loss_scalings)

    def run(self) -> Iterator[Event]:
        """Run it on this rank of a launcher; every rank gets the same events, ready for JSON.

        ``start`` with Megatron-Core's version, device, backend and hosts; ``begin`` of a layout;
        ``layout`` with its verdicts and groups; ``end``, after which the rank waits for the others.
        Installs the CPU stand-ins if there is no CUDA: call it before Megatron-Core is imported.
        """
        import torch

        if not torch.cuda.is_available():
            import megatron_lossagg.cpu as cpu

            cpu.install()
        from megatron_lossagg.verify.verdict import run_job

        return run_job(self)


def write_job(job: Any, file: Path) -> None:
    """Write a job for its processes."""
    file.write_bytes(pickle.dumps(job))


def read_job(file: Path) -> Any:
    """Read what :func:`write_job` wrote; run no file of anybody else."""
    return pickle.loads(file.read_bytes())


class RanksTimedOut(TimeoutExpired):
    """Ranks that did not finish in time and were ended; ``last``: a line of what each did last."""

    def __init__(self, expired: TimeoutExpired, last: Sequence[str]) -> None:
        super().__init__(expired.cmd, expired.timeout, expired.output, expired.stderr)
        self.last = last


def launched(
    job: Any,
    take: Callable[[Event], None],
    *,
    processes: int,
    timeout: float,
    gpus: int = 0,
) -> CompletedProcess[str]:
    """Run a job on processes of this machine; ``take`` gets each event of the first one.

    ``processes``: ranks. ``gpus``: how many GPUs they take, several ranks on one if there are more
    ranks; 0 for the CPU. Says first if there are more ranks than cores, or than memory allows.
    Raises :class:`RanksTimedOut` after ``timeout`` seconds, when all have been ended.
    """
    for line in crowding(processes):
        say(line)
    package = str(Path(megatron_lossagg.__file__).resolve().parent.parent)
    # The user's path first: their Megatron-Core, not one that is installed next to this package.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    env = {"PYTHONPATH": path, "LOSSAGG_DEADLINE": str(time.time() + timeout)}
    env |= {"LOSSAGG_GPUS": str(gpus)} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        job_file, events = Path(folder) / "job", Path(folder) / "events.jsonl"
        write_job(job, job_file)
        events.touch()
        command = ["-m", "megatron_lossagg.verify", str(job_file), str(events)]
        ended = threading.Event()
        follower = threading.Thread(target=_follow, args=(events, ended, take))
        follower.start()
        try:
            return launch(command, processes=processes, timeout=timeout, env=env)
        except TimeoutExpired as expired:
            last = [f"rank {rank}: {_last_did(events, rank)}" for rank in range(processes)]
            raise RanksTimedOut(expired, last) from None
        finally:
            ended.set()
            follower.join()


def failure_of(done: CompletedProcess[str]) -> str:
    """Say why launched ranks ended: what a rank raised, or which signal ended one; empty if none
    failed.
    """
    if not done.returncode:
        return ""
    who, number = ended_by_signal(done)
    if number == signal.SIGKILL:
        return (
            f"{who} was killed (SIGKILL) and raised no error. The kernel does it if memory runs "
            "out, and dmesg then names the process: start fewer ranks, or free memory"
        )
    if number:
        what = f"{who} was ended by {signal.Signals(number).name} and raised no error"
    else:
        what = "A rank failed"
    return first_failure(what, done.stderr or f"exit status {done.returncode}")


def ended_by_signal(done: CompletedProcess[str]) -> tuple[str, int]:
    """Return whom a signal ended, and its number; 0 if none did."""
    if cause := _ROOT_CAUSE.search(done.stderr):
        return f"Rank {cause[1]}", int(cause[2])
    return "The launcher", max(-done.returncode, 0)


def first_failure(what: str, printed: str) -> str:
    """Write what happened, and the last lines that the first rank to print an error has printed."""
    lines = [line for line in printed.splitlines() if "<frozen " not in line]
    first = next((line.partition(":")[0] for line in lines if line.startswith("[rank")), "")
    return "\n".join([what, *[line for line in lines if line.startswith(first)][-60:]])


def _last_did(events: Path, rank: int) -> str:
    """Say what a rank did last, from the files that ``verify/__main__.py`` writes."""
    progress, stack = (events.with_name(f"{rank}.{what}") for what in ("progress", "stack"))
    if not progress.exists():
        return "its process had not begun to run the job"
    *_, line = ["", *progress.read_text().splitlines()]
    calls = stack.read_text().splitlines() if stack.exists() else []
    frames = [match.groups() for match in map(_FRAME.match, calls) if match]
    frames = [frame for frame in frames if not frame[0].startswith("<")]
    ours = str(Path(megatron_lossagg.__file__).parent)
    core = f"{os.sep}megatron{os.sep}core{os.sep}"
    chosen = [
        frames[:1],
        [frame for frame in frames if core in frame[0]][:1],
        [frame for frame in frames if frame[0].startswith(ours)][:1],
    ]
    calls = [f"{name} ({Path(file).name}:{number})" for one in chosen for file, number, name in one]
    return "; in ".join([line, " < ".join(dict.fromkeys(calls))]) if calls else line


def _follow(events: Path, ended: threading.Event, take: Callable[[Event], None]) -> None:
    with events.open() as file:
        partial = ""
        while True:
            last_round = ended.is_set()  # before reading, so that all that was written is read
            partial += file.read()
            *complete, partial = partial.split("\n")
            for line in complete:
                take(json.loads(line))
            if last_round:
                return
            time.sleep(0.1)
