"""Measure what the package costs, and say for each goal whether it was reached.

    python benchmarks/run.py [--quick] [--json FILE] [--doc FILE] [--pictures FOLDER]

Operations, bytes, reads and collectives are counted and do not depend on the machine. Times
are ratios of two pieces of code that ran in turn in this process, on one thread; read them
as such. The machine should be quiet. ``--doc`` replaces what stands between the markers of a
Markdown file by the tables, ``--from`` takes the numbers of an earlier run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import accuracy, counts, measure, report  # noqa: E402
from benchmarks.command import run_command  # noqa: E402
from benchmarks.workloads import Workload, workloads  # noqa: E402
from megatron_lossagg.cpu import launch  # noqa: E402

COUNTED_ROWS = (1, 64, 4096)
CURVE = (1, 4, 16, 64, 256, 1024, 4096)
PLANNED_ROWS = (4096, 1_000_000)


def main() -> int:
    """Run the command line."""
    return run_command(
        __doc__,
        quick_means="rough times, no launches; 20 s",
        measured=run,
        text=report.text,
        write_into=report.write_into,
        draw=draw,
    )


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw the curves and the ratios."""
    from benchmarks import pictures

    pictures.draw(results, folder)


def run(quick: bool) -> dict[str, Any]:
    """Count and measure everything; a part that ``quick`` leaves out is None."""
    effort = measure.QUICK if quick else measure.FULL
    started = time.perf_counter()
    results: dict[str, Any] = {
        "machine": machine(),
        "counts": counted(),
        "workloads": {},
        "collectives": None,
        "live": None,
        "curve": None,
    }
    for workload in workloads():
        say(f"workload {workload}")
        results["workloads"][str(workload)] = measure.of_workload(workload, effort)
    say("planning")
    sizes = PLANNED_ROWS[:1] if quick else PLANNED_ROWS
    results["planning"] = {str(n): measure.planning(n, effort) for n in sizes}
    say("errors against float64")
    results["accuracy"] = accuracy.errors(["64k"] if quick else list(accuracy.SIZES))
    if not quick:
        say("cost against the number of rows")
        shorter = measure.Effort(rounds=effort.rounds, seconds=1.0)
        results["curve"] = measure.against_number_of_rows(list(CURVE), shorter)
        say("collectives on two ranks")
        results["collectives"] = launched("benchmarks.collectives", processes=2)
        say("a training step of the example")
        results["live"] = launched("benchmarks.live_step", "--steps", "20", processes=1)
    results["machine"]["seconds"] = round(time.perf_counter() - started)
    results["machine"]["load_at_end"] = os.getloadavg()[0]
    return results


def counted() -> dict[str, Any]:
    """Count calls for several numbers of rows, and building for every type of mask."""
    calls = {}
    for num_sequences in COUNTED_ROWS:
        workload = Workload(name="counted", num_sequences=num_sequences, mean_tokens=64)
        for path in counts.PATHS:
            found = counts.of_a_call(workload, path)
            calls[f"{num_sequences} {path}"] = {
                "operations": found.operations,
                "by_name": [found.forward.operations, found.backward.operations],
                "bytes_per_token": found.bytes_per_token,
                "reads": [found.build.num_reads, found.forward.num_reads],
                "reads_backward": found.backward.num_reads,
            }
    build = {}
    for cp in (1, 8):
        workload = Workload(name="counted", num_sequences=64, mean_tokens=1024, cp_size=cp)
        for name, mask_type in counts.MASK_TYPES.items():
            for path in counts.PATHS:
                found = counts.of_a_call(workload, path, mask_type)
                build[f"CP {cp} {name} {path}"] = {
                    "operations": found.build.num_operations,
                    "bytes_per_position": found.build_bytes_per_position,
                }
    held = counts.held_for_backward(Workload(name="counted", num_sequences=64, mean_tokens=1024))
    return {"calls": calls, "build": build, "held": vars(held)}


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


def machine() -> dict[str, Any]:
    """Describe what the numbers were measured on."""
    return {
        "command": " ".join(["python benchmarks/run.py", *_without_files(sys.argv[1:])]),
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_at_start": os.getloadavg()[0],
    }


def _without_files(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument == "--quick"]


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def say(text: str) -> None:
    """Report progress on stderr: the tables go to stdout."""
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
