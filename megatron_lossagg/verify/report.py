"""A verification as it is printed, with a progress bar on a terminal.

The result comes first, then the table, the checks of a framework, the causes of what failed, and
the environment.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from megatron_lossagg.text import error_text, number_of
from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.frameworks.outcome import FAIL, PASS, counted, none_ran
from megatron_lossagg.verify.frameworks.outcome import cells as framework_cells

__all__ = ["Report", "cells", "finite", "progress", "say", "show", "summary"]

Report = Mapping[str, Any]
_COLUMNS = ("aggregation", "w_s", "loss_scaling", "K", "factor", "gradient error", "loss error", "")
_FRAMEWORK_COLUMNS = ("check", "function", "loss error", "gradient error", "")
_WIDE = 200


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
    # A file or a pipe has no width: there a line is as long as it must be.
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    text = partial(console.print, markup=False, soft_wrap=True)
    text(summary(report), end="\n\n")
    for layout, verdicts in groupby(report["verdicts"], key=lambda v: str(v["layout"])):
        text(layout)
        console.print(_table(_COLUMNS, map(cells, verdicts), left=3))
        text()
    if framework := report.get("framework"):
        checks = framework["checks"]
        text(f"{framework['name']}: {counted(checks)}, {framework['seconds']:.0f} s")
        console.print(_table(_FRAMEWORK_COLUMNS, map(framework_cells, checks), left=2))
        text()
        for check in checks:
            if check["state"] != PASS:
                text(f"{check['state']} {framework['name']}; {check['check']}")
                text(f"     {check['explanation']}\n")
    for verdict in report["verdicts"]:
        if not verdict["passed"]:
            text(f"FAIL {verdict['layout']}; {verdict['case']}; {verdict['loss_scaling']}")
            text(f"     {verdict['explanation']}\n")
    for fact in report["environment"]:
        text(str(Fact(**fact)))
    if len(report["layouts"]) > 1:
        text("\n" + summary(report))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> Padding:
    """Make a table whose first columns are aligned to the left, with the state at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    for *most, state in rows:
        colour = {str(PASS): "green", str(FAIL): "bold red"}.get(state, "")
        table.add_row(*map(Text, most), Text(state, colour))
    return Padding(table, (0, 0, 0, 2), expand=False)


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


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value
