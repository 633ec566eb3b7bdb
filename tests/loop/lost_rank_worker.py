"""What a lost rank does to the others' step, on gloo.

``lost_rank_worker.py FOLDER silent|lost`` under a launcher. In the second step rank 1 does not
come to ``plan_step``; ``silent``: it keeps its connections open. Each other rank writes to FOLDER
how many steps it took, and the error that ended it.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.rank_step import RankSequences, a_step, read

TIMEOUT = timedelta(seconds=5)
"""Of the process group; the default of torch is 30 minutes for gloo, 10 for NCCL."""
PATIENCE = 60.0


def main(folder, case):
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    aggregator = read(nullcontext)
    own = RankSequences.of(rank, size, 64 * size)
    a_step(aggregator, own, nullcontext)
    if rank == 1:
        deadline = time.monotonic() + PATIENCE
        while case == "silent" and time.monotonic() < deadline:
            if len([*folder.glob("*.json")]) == size - 1:
                break
            time.sleep(0.02)
        os._exit(0)
    began = time.perf_counter()
    try:
        a_step(aggregator, own, nullcontext)
    except Exception as error:  # whatever the backend raises
        found = {"error": f"{type(error).__name__}: {error}"}
        found["seconds"] = time.perf_counter() - began
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(folder / f"{rank}.json")
    sys.stdout.flush()
    os._exit(0)  # a group that has lost a rank cannot be destroyed


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
