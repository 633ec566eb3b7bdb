"""Counts the collectives of ``plan_step`` on a launched group, and the bytes that they bring.

``python -m benchmarks.collectives FILE`` under a launcher; rank 0 writes FILE. Every rank has
``ROWS`` rows, eight samples per prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.counting import counted
from benchmarks.workloads import AGGREGATION, SAMPLES_PER_PROMPT
from megatron_lossagg import Sequences, plan_step

ROWS = 4096


def collectives() -> dict[str, Any]:
    """Count over the default group, which has been initialized, by which ids are given."""
    first = dist.get_rank() * ROWS
    rows = range(first, first + ROWS)
    given: dict[str, dict[str, list[int]]] = {
        "none": {},
        "prompt": {"prompt": [row // SAMPLES_PER_PROMPT for row in rows]},
        "sample and prompt": {
            "sample": list(rows),
            "prompt": [row // SAMPLES_PER_PROMPT for row in rows],
        },
    }
    group = dist.group.WORLD
    found = {}
    for ids, fields in given.items():
        sequences = Sequences(active_tokens=[row % 100 + 1 for row in rows], **fields)
        with counted() as counts:
            plan_step(AGGREGATION, sequences, group=group)
        found[ids] = {
            "collectives": counts.num_collectives,
            "bytes_per_rank": counts.collective_bytes / dist.get_world_size(),
        }
    return found


def main() -> None:
    """Count, and write what rank 0 saw."""
    dist.init_process_group("gloo")
    found = {"rows": ROWS, "ranks": dist.get_world_size(), **collectives()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
