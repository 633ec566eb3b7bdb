"""What a late and a lost rank do to the others' step, on gloo.

``python -m benchmarks.late_rank FILE late|silent|lost|lost-after`` under a launcher. All ranks
take three steps; in the second, rank 1

- ``late``: comes ``LATE`` seconds late to ``plan_step``,
- ``silent``: never comes, and keeps its connections open,
- ``lost``: ends before ``plan_step``,
- ``lost-after``: ends after it, so that the next ``plan_step`` is the first to miss it.

Writes FILE: for each rank that lived, the wall seconds of each call of each step, and the error
that ended it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module="megatron")  # of what is not installed

import torch.distributed as dist  # noqa: E402

from benchmarks.rank_step import Clock, RankSequences, a_step, read  # noqa: E402

STEPS = 3
FAULTY_RANK, FAULTY_STEP = 1, 1
LATE = 1.0
TIMEOUT = timedelta(seconds=5)
"""Of the process group; the default of torch is 30 minutes for gloo, 10 for NCCL."""
PATIENCE = 60.0


def main(file: Path, case: str) -> None:
    """Take the steps; rank 0 writes what every rank that lived has seen."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    aggregator = read(Clock())
    own = RankSequences.of(rank, size, 64 * size)
    seen: dict[str, Any] = {"rank": rank, "steps": [], "error": "", "seconds_to_error": None}
    for step in range(STEPS):
        if case == "late":  # so that a wait is not the one of a step before
            dist.barrier()
        if (rank, step) == (FAULTY_RANK, FAULTY_STEP):
            misbehave(case, file, size)
        clock, began = Clock(), time.perf_counter()
        try:
            a_step(aggregator, own, clock)
        except Exception as error:  # whatever the backend raises
            seen["error"] = f"{type(error).__name__}: {error}"
            seen["seconds_to_error"] = time.perf_counter() - began
            break
        seen["steps"].append({call: cost.wall for call, cost in clock.costs.items()})
        if case == "lost-after" and (rank, step) == (FAULTY_RANK, FAULTY_STEP):
            os._exit(0)
    part(file, rank).write_text(json.dumps(seen))
    if rank == 0:
        lived = range(size) if case == "late" else [r for r in range(size) if r != FAULTY_RANK]
        await_parts(file, lived)
        file.write_text(json.dumps([json.loads(part(file, r).read_text()) for r in lived]))
    if not seen["error"]:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a group that has lost a rank cannot be destroyed


def misbehave(case: str, file: Path, size: int) -> None:
    """Do what the case says of the faulty rank."""
    if case == "late":
        time.sleep(LATE)
    elif case == "silent":
        await_parts(file, [r for r in range(size) if r != FAULTY_RANK])
        os._exit(0)
    elif case == "lost":
        os._exit(0)


def part(file: Path, rank: int) -> Path:
    """Name the file of one rank."""
    return file.with_suffix(f".{rank}")


def await_parts(file: Path, ranks: Iterable[int]) -> None:
    """Wait until ranks have written what they saw."""
    deadline = time.monotonic() + PATIENCE
    ranks = list(ranks)
    while not all(complete(part(file, rank)) for rank in ranks):
        if time.monotonic() > deadline:
            raise SystemExit(f"ranks {ranks} have not written their parts of {file}")
        time.sleep(0.02)


def complete(path: Path) -> bool:
    """Whether a file has been written to its end."""
    return path.exists() and path.read_text().endswith("}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
