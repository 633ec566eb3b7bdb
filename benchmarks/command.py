"""The command line of the benchmarks: measure, print, write numbers, tables and pictures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import write_between

Results = dict[str, Any]


def run_command(
    command: str,
    description: str | None,
    *,
    measure: Callable[[bool], Results],
    markdown: Callable[[Results], str],
    name: str,
    draw: str,
) -> int:
    """Run the command line of a benchmark, on one core.

    ``measure`` takes whether to be quick; ``markdown`` lays out the tables, which go between the
    markers of ``name`` in a Markdown file. The function ``draw`` of ``benchmarks.pictures`` draws.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="rough times, of fewer sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--doc", type=Path, metavar="FILE", help="write the tables into it")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw into it")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="earlier", help="measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.earlier:
        results = json.loads(args.earlier.read_text())
    else:
        machine = {
            "command": command + " --quick" * args.quick,
            "date": date.today().isoformat(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "load_at_start": os.getloadavg()[0],
        }
        started = time.perf_counter()
        results = {"machine": machine, **measure(args.quick)}
        machine["seconds"] = round(time.perf_counter() - started)
        machine["load_at_end"] = os.getloadavg()[0]
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))
    if args.doc is not None:
        begin = f"<!-- {name}: begin; written by `{command} --doc`, not by hand -->"
        write_between(args.doc, begin, f"<!-- {name}: end -->", markdown(results))
    if args.pictures is not None:
        from benchmarks import pictures

        args.pictures.mkdir(parents=True, exist_ok=True)
        getattr(pictures, draw)(results, args.pictures / f"{draw}.png")
    return 0


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine_of(results: Results) -> str:
    """Write what the numbers were measured on."""
    found = results["machine"]
    return (
        f"`{found['command']}`, {found['date']}, {found['processor']}, {found['cores']} cores of "
        f"which one is used, Python {found['python']}, torch {found['torch']}, "
        f"load {found['load_at_start']:.1f} to {found['load_at_end']:.1f}, {found['seconds']} s"
    )


def say(text: str) -> None:
    """Report progress on stderr: the tables go to stdout."""
    print(f"... {text}", file=sys.stderr, flush=True)
