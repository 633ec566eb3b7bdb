"""Measure what the package costs, and say for each goal whether it was reached.

    python benchmarks/run.py [--quick] [--json FILE] [--doc FILE] [--pictures FOLDER]

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

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from benchmarks import counts, measure, report  # noqa: E402
from benchmarks.command import run_command, say  # noqa: E402
from benchmarks.counting import counted  # noqa: E402
from benchmarks.workloads import AGGREGATION, CP_SIZES, Workload, workloads  # noqa: E402
from megatron_lossagg import plan_step  # noqa: E402
from megatron_lossagg.cpu import launch  # noqa: E402

COUNTED = (1, 64, 4096)
PLANNED = (4096, 1_000_000)


def main() -> int:
    """Run the command line."""
    return run_command(
        "python benchmarks/run.py",
        __doc__,
        measure=run,
        show=report.show,
        markdown=report.markdown,
        name="benchmarks",
        draw="ratios",
    )


def run(quick: bool) -> dict[str, Any]:
    """Count and measure everything; a part that ``quick`` leaves out is None."""
    effort = measure.QUICK if quick else measure.FULL
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
        results["live"] = launched("benchmarks.live_step", processes=1)
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
    return {"sequences": sequences, "calls": calls, "build": build, "held": vars(held)}


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


def launched(module: str, *arguments: str, processes: int) -> Any:
    """Run a module of the benchmarks on several processes; returns what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        done = launch(
            ["-m", module, str(file), *arguments],
            processes=processes,
            timeout=300,
            env={"PYTHONPATH": str(ROOT)},
        )
        if done.returncode:
            raise SystemExit(f"{module} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(file.read_text())


if __name__ == "__main__":
    sys.exit(main())
