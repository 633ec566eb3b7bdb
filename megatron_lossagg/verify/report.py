"""A verification as it is shown: a rich table with a progress bar on a terminal, text elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_lossagg.verify.environment import Fact

Report = Mapping[str, Any]
_COLUMNS = ("aggregation", "regime", "K", "factor", "gradient error", "loss error", "")


@contextmanager
def progress(num_rows: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, nothing elsewhere; call what it gives once a row."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (
        TextColumn("proving"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=num_rows)
        yield lambda: bar.advance(task)


def show(report: Report) -> None:
    """Print a report: facts, a row for each verdict, the causes of failed ones, a summary."""
    for fact in report["environment"]:
        print(Fact(**fact))
    print()
    if sys.stdout.isatty():
        _show_rich(report)
    else:
        _show_plain(report)
    _show_causes(report)
    print(summary(report))


def summary(report: Report) -> str:
    """One sentence: how many rows pass, on what, how exactly, how long it took."""
    verdicts = report["verdicts"]
    passed = sum(verdict["passed"] for verdict in verdicts)
    errors = [v["gradient_error"] for v in verdicts]
    versions = {fact["name"]: fact["version"] for fact in report["environment"]}
    num = len(report["layouts"])
    layouts = f"{num} layout{'s' * (num > 1)}"
    worst = f"; largest gradient error {_worst(errors)}" if errors else ""
    return (
        f"{passed} of {report['num_rows']} rows pass on {layouts}, "
        f"megatron-core {versions['megatron-core']}, torch {versions['torch']}{worst}; "
        f"{report['seconds']:.0f} s"
    )


def cells(verdict: Mapping[str, Any]) -> tuple[str, ...]:
    """One verdict in the columns of the table."""
    factor = verdict["measured_factor"]
    return (
        verdict["case"],
        verdict["regime"],
        str(verdict["k"]),
        "not finite" if factor is None else f"{factor:.9f}",
        _error(verdict["gradient_error"]),
        _error(verdict["loss_error"]),
        "PASS" if verdict["passed"] else "FAIL",
    )


def _worst(errors: Sequence[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return _error(max(known) if len(known) == len(errors) else None)


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _layouts(report: Report) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for layout, verdicts in groupby(report["verdicts"], key=lambda v: str(v["layout"])):
        yield layout, list(verdicts)


def _show_plain(report: Report) -> None:
    rows = [_COLUMNS, *(cells(verdict) for verdict in report["verdicts"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for layout, verdicts in _layouts(report):
        print(layout)
        for row in (_COLUMNS, *(cells(verdict) for verdict in verdicts)):
            print("  " + _aligned(row, widths))
        print()


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
    right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join(left + right).rstrip()


def _show_rich(report: Report) -> None:
    console = Console()
    for layout, verdicts in _layouts(report):
        table = Table(title=layout, title_justify="left", title_style="bold", header_style="dim")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in _COLUMNS[:2] else "right")
        for verdict in verdicts:
            *most, outcome = cells(verdict)
            colour = "green" if verdict["passed"] else "bold red"
            table.add_row(*most, f"[{colour}]{outcome}[/]")
        console.print(table)


def _show_causes(report: Report) -> None:
    failed = [verdict for verdict in report["verdicts"] if not verdict["passed"]]
    for verdict in failed:
        where = f"{verdict['layout']}; {verdict['case']}; {verdict['regime']}"
        print(f"FAIL {where}\n     {verdict['explanation']}")
    if failed:
        print()


def finite(value: Any) -> Any:
    """Replace numbers that JSON has no name for by None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value
