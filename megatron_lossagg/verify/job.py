"""A verification as a value: the command pickles it, and every rank runs it.

The checks of a framework are such a job too, of one process (``frameworks/run_checks.py``).
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import megatron_lossagg
from megatron_lossagg.contract.scaling import LOSS_SCALINGS, LossScaling
from megatron_lossagg.cpu.launch import launch, run_alone
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.parallelism import Parallelism

__all__ = ["Event", "Job", "launched", "read_job", "write_job"]

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The layouts, cases and loss scalings to verify; all layouts have one number of ranks."""

    layouts: Sequence[Parallelism]
    cases: Sequence[Case]
    loss_scalings: Sequence[LossScaling] = LOSS_SCALINGS

    def __post_init__(self) -> None:
        for name in ("layouts", "cases", "loss_scalings"):  # a list and a tuple are equal jobs
            object.__setattr__(self, name, tuple(getattr(self, name)))

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

        ``start`` with Megatron-Core's version, device, backend and hosts; ``layout`` with its
        verdicts and groups; ``end``, after which the rank waits for the others.
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


def launched(
    job: Any, take: Callable[[Event], None], *, processes: int | None, timeout: float
) -> CompletedProcess[str]:
    """Run a job on processes of this machine's CPU; ``take`` gets each event of the first one.

    ``processes``: ranks; None for one process that is no rank. Raises
    ``subprocess.TimeoutExpired`` after ``timeout`` seconds, when all have been ended.
    """
    package = str(Path(megatron_lossagg.__file__).resolve().parent.parent)
    # The user's path first: their Megatron-Core, not one that is installed next to this package.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    env = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        job_file, events = Path(folder) / "job", Path(folder) / "events.jsonl"
        write_job(job, job_file)
        events.touch()
        command = ["-m", "megatron_lossagg.verify", str(job_file), str(events)]
        ended = threading.Event()
        follower = threading.Thread(target=_follow, args=(events, ended, take))
        follower.start()
        try:
            if processes is None:
                return run_alone(["-u", *command], timeout=timeout, env=env)
            return launch(command, processes=processes, timeout=timeout, env=env)
        finally:
            ended.set()
            follower.join()


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
