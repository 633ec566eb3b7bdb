"""Measure what the package costs, and say for each goal whether it was reached.

    python -m benchmarks.run [--quick] [--json FILE] [--doc FILE] [--pictures FOLDER]

``tests/reduction/test_costs.py`` counts operations and bytes. Times are ratios of two pieces of
code that ran alternately in this process, on one thread; read them as such. The machine should be
quiet. ``--doc`` replaces what stands between the markers of a Markdown file by the tables,
``--from`` takes the numbers of an earlier run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import measure, report
from benchmarks.command import run_command, say
from benchmarks.counting import counted
from benchmarks.timing import FULL, QUICK
from benchmarks.workloads import AGGREGATION, Workload, workloads
from megatron_lossagg import plan_step
from megatron_lossagg.cpu import launch

PLANNED = (4096, 1_000_000)


def main() -> int:
    """Run the command line."""
    return run_command(
        "python -m benchmarks.run",
        __doc__,
        measure=run,
        markdown=report.markdown,
        name="benchmarks",
        draw="ratios",
    )


def run(quick: bool) -> dict[str, Any]:
    """Measure everything; a part that ``quick`` leaves out is None."""
    effort = QUICK if quick else FULL
    results: dict[str, Any] = {
        "collectives": collectives(),
        "workloads": {},
        "planning": {},
        "live": None,
    }
    for workload in workloads():
        say(f"workload {workload}")
        results["workloads"][str(workload)] = measure.of_workload(workload, effort)
    say("planning")
    for number in PLANNED[:1] if quick else PLANNED:
        results["planning"][str(number)] = measure.planning(number, effort)
    if not quick:
        say("a training step of the example")
        results["live"] = live_step()
    return results


def collectives() -> int:
    """Count the collectives of ``plan_step`` with prompt ids, on one rank of torch's fake group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sequences = Workload(name="counted", num_sequences=64, mean_tokens=64).sequences
        with counted() as found, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the other rank has a copy of our ids
            plan_step(AGGREGATION, sequences, group=dist.group.WORLD)
        return found.num_collectives
    finally:
        dist.destroy_process_group()


def live_step() -> Any:
    """Run ``benchmarks.live_step`` in a process of its own; returns what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        done = launch(
            ["-m", "benchmarks.live_step", str(file)],
            processes=1,
            timeout=300,
            env={"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        )
        if done.returncode:
            raise SystemExit(f"live_step failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(file.read_text())


if __name__ == "__main__":
    sys.exit(main())
