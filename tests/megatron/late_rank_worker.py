"""What a late and a lost rank do to the others' step, on gloo.

``late_rank_worker.py FOLDER late|silent|lost|lost-after`` under a launcher. All ranks take three
steps; in the second, rank 1

- ``late``: comes ``LATE`` seconds late to ``plan_step``,
- ``silent``: never comes, and keeps its connections open,
- ``lost``: ends before ``plan_step``,
- ``lost-after``: ends after it, so that the next ``plan_step`` is the first to miss it.

Each rank that lives writes to FOLDER the wall seconds of each call of each step, and the error
that ended it.
"""

import json
import os
import sys
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.rank_step import RankSequences, a_step, read

STEPS = 3
FAULTY_RANK, FAULTY_STEP = 1, 1
LATE = 1.0
TIMEOUT = timedelta(seconds=5)
"""Of the process group; the default of torch is 30 minutes for gloo, 10 for NCCL."""
PATIENCE = 60.0


def main(folder, case):
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    aggregator = read(nullcontext)
    own = RankSequences.of(rank, size, 64 * size)
    seen = {"rank": rank, "steps": [], "error": "", "seconds_to_error": None}
    for step in range(STEPS):
        is_faulty = (rank, step) == (FAULTY_RANK, FAULTY_STEP)
        if case == "late":  # so that a wait is not the one of a step before
            dist.barrier()
        if is_faulty:
            misbehave(case, folder, size)
        wall = {}

        @contextmanager
        def timed(call, wall=wall):
            started = time.perf_counter()
            yield
            wall[call] = time.perf_counter() - started

        began = time.perf_counter()
        try:
            a_step(aggregator, own, timed)
        except Exception as error:  # whatever the backend raises
            seen["error"] = f"{type(error).__name__}: {error}"
            seen["seconds_to_error"] = time.perf_counter() - began
            break
        seen["steps"].append(wall)
        if case == "lost-after" and is_faulty:
            os._exit(0)
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(seen))
    partial.rename(folder / f"{rank}.json")
    if not seen["error"]:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a group that has lost a rank cannot be destroyed


def misbehave(case, folder, size):
    if case == "late":
        time.sleep(LATE)
    elif case == "silent":
        deadline = time.monotonic() + PATIENCE
        while len([*folder.glob("*.json")]) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(0)
    elif case == "lost":
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
