"""Measure what the package costs, and say for each goal whether it was reached.

    python -m benchmarks.run [--quick] [--json FILE] [--doc FILE] [--pictures FOLDER]

Operations, bytes and collectives are counted and do not depend on the machine; those of any device
are counted on tensors without values, where a host sync raises. Times are ratios of two pieces of
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

from benchmarks import counts, measure, report
from benchmarks.command import run_command, say
from benchmarks.counting import counted
from benchmarks.timing import FULL, QUICK
from benchmarks.workloads import AGGREGATION, CP_SIZES, Workload, workloads
from megatron_lossagg import plan_step
from megatron_lossagg.cpu import launch

COUNTED = (1, 64, 4096)
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
    """Count and measure everything; a part that ``quick`` leaves out is None."""
    effort = QUICK if quick else FULL
    results: dict[str, Any] = {
        "counts": count(),
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


def count() -> dict[str, Any]:
    """Count calls for several numbers of sequences, and building for every type of mask."""
    calls, build = {}, {}
    for device in counts.DEVICES:
        for number in COUNTED:
            workload = Workload(name="counted", num_sequences=number, mean_tokens=64)
            found = counts.of_a_call(workload, device)
            calls[f"{number} {device}"] = {
                "operations": found.operations,
                "by_name": [found.forward.operations, found.backward.operations],
                "bytes_per_token": found.bytes_per_token,
            }
        build[device] = {}
        for cp in CP_SIZES:
            workload = Workload(name="counted", num_sequences=64, mean_tokens=1024, cp_size=cp)
            build[device][f"CP {cp}"] = {
                name: counts.of_a_call(workload, device, mask_type).build_bytes_per_position
                for name, mask_type in counts.MASK_TYPES.items()
            }
    held = counts.held_for_backward(Workload(name="counted", num_sequences=64, mean_tokens=1024))
    sequences = [str(number) for number in COUNTED]
    return {"sequences": sequences, "calls": calls, "build": build, "held": held}


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
