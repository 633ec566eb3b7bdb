"""A verification as it is printed: a rich table with a progress bar on a terminal, else text.

The result comes first, then the table, the checks of a framework, the causes of what failed, and
the
environment.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.frameworks.check import PASS, counted, none_ran
from megatron_lossagg.verify.frameworks.check import cells as framework_cells
from megatron_lossagg.verify.words import error_text, number_of

__all__ = ["Report", "cells", "finite", "progress", "say", "show", "summary"]

Report = Mapping[str, Any]
_COLUMNS = ("aggregation", "w_s", "loss_scaling", "K", "factor", "gradient error", "loss error", "")
_FRAMEWORK_COLUMNS = ("check", "function", "loss error", "gradient error", "")
_LEFT = 3
"""The first columns are aligned to the left; of a framework's checks the first two."""


def say(text: str) -> None:
    """Print a line about the progress, to standard error: the result is on standard output."""
    print(f"lossagg: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(num_verdicts: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show a bar of cases on a terminal, else a line per layout; the caller passes each event."""
    if not sys.stderr.isatty():
        begun = time.monotonic()

        def say_layout(event: Mapping[str, Any]) -> None:
            if event["event"] == "layout":
                passed = [verdict["passed"] for verdict in event["verdicts"]]
                cases = f"{sum(passed)} of {number_of(len(passed), 'case')} passed"
                say(f"{event['layout']}: {cases}, {time.monotonic() - begun:.0f} s")

        yield say_layout
        return
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cases"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("cases", total=num_verdicts)
        yield lambda event: bar.advance(task, event["event"] == "case")


def show(report: Report) -> None:
    """Print a report; with several layouts, repeat the result at the end."""
    print(summary(report))
    print()
    if sys.stdout.isatty():
        _show_rich(report)
    else:
        _show_plain(report)
    _show_framework(report)
    _show_causes(report)
    for fact in report["environment"]:
        print(Fact(**fact))
    if len(report["layouts"]) > 1:
        print()
        print(summary(report))


def summary(report: Report) -> str:
    """Write the result: how many cases pass, where, the largest error, the time it took.

    A second line has the result of a framework's checks; it is the first one where none of them
    ran.
    """
    verdicts = report["verdicts"]
    passed = sum(verdict["passed"] for verdict in verdicts)
    errors = [v["gradient_error"] for v in verdicts]
    versions = {fact["name"]: fact["version"] for fact in report["environment"]}
    num_verdicts = report["num_verdicts"]
    largest = f"; largest gradient error {_largest(errors)}" if errors else ""
    pass_ = "passes" if num_verdicts == 1 else "pass"
    cases = (
        f"{passed} of {number_of(num_verdicts, 'case')} {pass_} on "
        f"{number_of(len(report['layouts']), 'layout')} of {number_of(report['num_ranks'], 'rank')}"
        f", megatron-core {versions['megatron-core']}, torch {versions['torch']}{largest}; "
        f"{report['seconds']:.0f} s"
    )
    framework = report.get("framework")
    of_framework = [f"{framework['name']}: {counted(framework['checks'])}"] if framework else []
    word = "PASS" if report["passed"] else "FAIL"
    if framework and none_ran(framework["checks"]) and passed == num_verdicts:
        return f"NOT RUN: {of_framework[0]}\n{cases}"
    return "\n".join([f"{word}: {cases}", *of_framework])


def cells(verdict: Mapping[str, Any]) -> tuple[str, ...]:
    """Write one verdict in the columns of the table."""
    factor = verdict["measured_factor"]
    return (
        verdict["case"],
        verdict["formula"],
        verdict["loss_scaling"],
        str(verdict["k"]),
        "not finite" if factor is None else f"{factor:.9f}",
        error_text(verdict["gradient_error"]),
        error_text(verdict["loss_error"]),
        "PASS" if verdict["passed"] else "FAIL",
    )


def _largest(errors: Sequence[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return error_text(max(known) if len(known) == len(errors) else None)


def _layouts(report: Report) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for layout, verdicts in groupby(report["verdicts"], key=lambda v: str(v["layout"])):
        yield layout, list(verdicts)


def _show_plain(report: Report) -> None:
    rows = [_COLUMNS, *(cells(verdict) for verdict in report["verdicts"])]
    widths = _widths(rows)
    for layout, verdicts in _layouts(report):
        print(layout)
        for row in (_COLUMNS, *(cells(verdict) for verdict in verdicts)):
            print("  " + _aligned(row, widths, left=_LEFT))
        print()


def _show_framework(report: Report) -> None:
    """Print a framework's checks, and why one failed or did not run."""
    framework = report.get("framework")
    if not framework:
        return
    print(f"{framework['name']}: {counted(framework['checks'])}, {framework['seconds']:.0f} s")
    rows = [_FRAMEWORK_COLUMNS, *map(framework_cells, framework["checks"])]
    widths = _widths(rows)
    for row in rows:
        print("  " + _aligned(row, widths, left=2))
    print()
    explained = [check for check in framework["checks"] if check["state"] != PASS]
    for check in explained:
        print(
            f"{check['state']} {framework['name']}; {check['check']}\n     {check['explanation']}"
        )
    if explained:
        print()


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _aligned(row: Sequence[str], widths: Sequence[int], *, left: int) -> str:
    first = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
    rest = [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
    return "  ".join(first + rest).rstrip()


def _show_rich(report: Report) -> None:
    console = Console()
    for layout, verdicts in _layouts(report):
        table = Table(title=layout, title_justify="left", title_style="bold", header_style="dim")
        for index, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if index < _LEFT else "right")
        for verdict in verdicts:
            *most, outcome = cells(verdict)
            colour = "green" if verdict["passed"] else "bold red"
            table.add_row(*most, f"[{colour}]{outcome}[/]")
        console.print(table)


def _show_causes(report: Report) -> None:
    failed = [verdict for verdict in report["verdicts"] if not verdict["passed"]]
    for verdict in failed:
        where = f"{verdict['layout']}; {verdict['case']}; {verdict['loss_scaling']}"
        print(f"FAIL {where}\n     {verdict['explanation']}")
    if failed:
        print()


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value
