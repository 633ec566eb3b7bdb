"""The command line of the benchmarks: measure, print, write numbers, tables and pictures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["run_command"]

Results = dict[str, Any]


def run_command(
    description: str | None,
    *,
    quick_means: str,
    measured: Callable[[bool], Results],
    text: Callable[[Results], str],
    write_into: Callable[[Path, Results], None],
    draw: Callable[[Results, Path], None],
) -> int:
    """Run the command line of a benchmark, on one core.

    ``measured`` takes whether to be quick; ``write_into`` puts the tables into a Markdown file and
    ``draw`` the pictures into a folder.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick_means)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--doc", type=Path, metavar="FILE", help="write the tables into it")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw into it")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="earlier", help="measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(args.earlier.read_text()) if args.earlier else measured(args.quick)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(text(results))
    if args.doc is not None:
        write_into(args.doc, results)
    if args.pictures is not None:
        draw(results, args.pictures)
    return 0
