"""A verification as it is printed, and as GitHub's Markdown shows it.

The result comes first, then the table, the checks of a framework, the causes of what failed, and
the environment. In Markdown, as a step summary or a pull request has it, one line per layout
follows the result. What did not pass stands unfolded with its cause; the cases of each layout, a
framework's checks and the environment are folded.
"""

from __future__ import annotations

import html
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_lossagg.reduction.modes import CUSTOM, MODES
from megatron_lossagg.verify.drivers.runs import FAIL, NOT_RUN, PASS, counted
from megatron_lossagg.verify.drivers.runs import cells as framework_cells
from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.text import error_text, number_of

Report = Mapping[str, Any]
COLUMNS = (
    "aggregation",
    "w_s",
    "loss_scaling",
    "K",
    "factor",
    "gradient error",
    "loss error",
    "weights error",
    "weight sum error",
    "",
)
"""Of a table of cases, as ``docs/verify.md`` explains them."""
FRAMEWORK_COLUMNS = ("check", "function", "loss error", "gradient error", "")
"""Of a table of a framework's checks."""
_ERRORS = ("gradient", "loss", "weights", "weight_sum")
_PRINTED = [column for column in COLUMNS if column != "weight sum error"]
_WIDE = 200
"""Characters of a line in a file or a pipe."""
_WIDEST = 10_000
_NARROW = 120
"""Below so many characters a table has no ``_LEFT_OUT``, and wraps between the words of a name."""
_LEFT_OUT = ("loss error", "weights error")


def show(report: Report) -> None:
    """Print a report; with several layouts, repeat the result at the end."""
    # A file or a pipe has no width: there a line is as long as it must be.
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    text = partial(console.print, markup=False, soft_wrap=True)
    summary = f"{report['state']}: " + "\n".join(result(report))
    text(summary, end="\n\n")
    for layout, verdicts in groupby(report["verdicts"], key=lambda v: str(v["layout"])):
        text(layout)
        rows = [(*errors, state) for *errors, _, state in map(cells, verdicts)]
        _print_table(console, _PRINTED, rows, left=3)
        text()
    if framework := report["framework"]:
        checks = framework["checks"]
        text(f"{framework['name']}: {counted(checks)}, {framework['seconds']:.0f} s")
        _print_table(console, FRAMEWORK_COLUMNS, [*map(framework_cells, checks)], left=2)
        text()
        for check in checks:
            if check["state"] != PASS:
                text(f"{check['state']} {framework['name']}; {check['check']}")
                text(f"     {check['explanation']}\n")
    for verdict in report["verdicts"]:
        if not verdict["passed"]:
            text(f"FAIL {place(verdict)}")
            text(f"     {verdict['explanation']}\n")
    if report["failure"]:
        text(report["failure"].replace("\n", "\n  "), end="\n\n")
    for fact in report["environment"]:
        text(str(Fact(**fact)))
    if len(report["layouts"]) > 1:
        text("\n" + summary)


def _print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int
) -> None:
    """Print a table whose first columns are aligned to the left, with the state at the end.

    If it is too wide the first two wrap between words. No word is cut: a line is as long as needed.
    """
    longest = max(len(word) for row in rows for word in row[0].split())
    unlimited = console.options.update_width(_WIDEST)
    table = _table(columns, rows, left=left, narrow=console.width < _NARROW)
    if console.measure(table, options=unlimited).maximum > console.width:
        rows = [(textwrap.fill(row[0], longest), *row[1:]) for row in rows]
        table = _table(columns, rows, left=left, narrow=console.width < _NARROW)
    least = console.measure(table, options=unlimited).minimum
    Console(width=max(console.width, least), highlight=False).print(table)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, narrow: bool
) -> Padding:
    shown = [n for n, name in enumerate(columns) if not (narrow and name in _LEFT_OUT)]
    table = Table(box=None, padding=(0, 1 if narrow else 2, 0, 0), header_style="dim")
    for index in shown:
        side: Literal["left", "right"] = "left" if index < left else "right"
        name = columns[index].replace(" ", "\n") if narrow else columns[index]
        lines = "\n".join([name, *(row[index] for row in rows)]).split("\n")
        least = None if index == 1 else max(map(len, lines))
        table.add_column(name, justify=side, no_wrap=index != 1, min_width=least)
    for *most, state in rows:
        colour = {str(PASS): "green", str(FAIL): "bold red"}.get(state, "")
        cells = [*map(Text, most), Text(state, colour)]
        table.add_row(*(cells[index] for index in shown))
    return Padding(table, (0, 0, 0, 2), expand=False)


def result(report: Report) -> list[str]:
    """Write the result in lines: how many cases pass, where, the largest error, the time it took.

    A second line has the result of a framework's checks; it is the first one if none of them ran.
    The last one says what ended the run early.
    """
    verdicts, num_verdicts = report["verdicts"], report["num_verdicts"]
    passed = sum(verdict["passed"] for verdict in verdicts)
    versions = {fact["name"]: fact["version"] for fact in report["environment"]}
    error = f"; largest gradient error {largest(verdicts)}" if verdicts else ""
    per_gpu = report.get("ranks_per_gpu", 0)
    shared = f", up to {per_gpu} on one GPU" if per_gpu > 1 else ""
    pass_ = "passes" if num_verdicts == 1 else "pass"
    cases = (
        f"{passed} of {number_of(num_verdicts, 'case')} {pass_} on "
        f"{number_of(len(report['layouts']), 'layout')} of {number_of(report['num_ranks'], 'rank')}"
        f"{shared}, megatron-core {versions['megatron-core']}, torch {versions['torch']}{error}; "
        f"{report['seconds']:.0f} s"
    )
    framework = report["framework"]
    of_framework = [f"{framework['name']}: {counted(framework['checks'])}"] if framework else []
    lines = [cases, *of_framework] if report["layouts"] else of_framework
    if report["state"] == NOT_RUN:  # which is about the framework
        lines.reverse()
    return [*lines, *report["failure"].splitlines()[:1]]


def cells(verdict: Report) -> tuple[str, ...]:
    """Write one verdict in ``COLUMNS``."""
    factor = verdict["measured_factor"]
    return (
        str(verdict["case"]),
        str(verdict["formula"]),
        str(verdict["loss_scaling"]),
        str(verdict["k"]),
        f"{factor:.9f}" if factor is not None else "not finite",
        *(_error(verdict, f"{name}_error") for name in _ERRORS),
        "PASS" if verdict["passed"] else "FAIL",
    )


def _error(verdict: Report, name: str) -> str:
    """Write an error; a dash if it is not defined, as a weight sum of a reducer of one's own."""
    is_custom = verdict["formula"] == MODES[CUSTOM].formula
    undefined = name == "weights_error" or (is_custom and name == "weight_sum_error")
    if verdict[name] is None and undefined:
        return "-"
    return error_text(verdict[name])


def largest(verdicts: Sequence[Report]) -> str:
    """Write the largest gradient error of some verdicts."""
    errors = [verdict["gradient_error"] for verdict in verdicts]
    return error_text(None if None in errors else max(errors))


def place(verdict: Report) -> str:
    """Name a case by its layout, itself and the loss scaling."""
    return f"{verdict['layout']}; {verdict['case']}; {verdict['loss_scaling']}"


_LAYOUT_COLUMNS = ("layout", "cases that pass", "largest gradient error", "")
_SPECIAL = re.compile(r"[\\`*\[\]|~$#]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])")
"""What GitHub's Markdown would act on within a line: not the ``_`` of ``token_mean``."""

_EXPONENT = re.compile(r"(?<=\de)-(?=\d)")


def markdown(report: Report) -> str:
    """Write a report; errors may be None, text is escaped."""
    of_layouts = {
        name: [verdict for verdict in report["verdicts"] if str(verdict["layout"]) == name]
        for name in map(str, report["layouts"])
    }
    first, *more = map(_escaped, result(report))
    lines = [f"**lossagg verify: {report['state']}.** {first}", ""]
    for line in more:
        lines += [line, ""]
    layouts = [_layout(name, verdicts) for name, verdicts in of_layouts.items()]
    lines += _states(_LAYOUT_COLUMNS, layouts, left=1) if layouts else []
    if not report["passed"] or any(check["explanation"] for check in _checks(report)):
        lines += _fold("What did not pass, and why", _reasons(report, of_layouts), is_open=True)
    for name, verdicts in of_layouts.items():
        if verdicts:
            summary = f"{name}: {_passed(verdicts)} cases pass"
            lines += _fold(summary, _states(_without_w_s(COLUMNS), map(_case, verdicts), left=2))
    if framework := report["framework"]:
        checks = framework["checks"]
        summary = f"{framework['name']}: {counted(checks)}, {framework['seconds']:.0f} s"
        table = _states(FRAMEWORK_COLUMNS, map(framework_cells, checks), left=2)
        lines += _fold(summary, table)
    lines += _fold("Run and environment", _run(report))
    return "\n".join(lines)


def _without_w_s(row: Sequence[str]) -> tuple[str, ...]:
    """Leave out what the name of the mode says: a page of GitHub has no room for it."""
    return tuple(cell for column, cell in zip(COLUMNS, row, strict=True) if column != "w_s")


def _case(verdict: Report) -> tuple[str, ...]:
    """Write one verdict, with hyphens that break no number."""
    return tuple(_EXPONENT.sub("\u2011", cell) for cell in _without_w_s(cells(verdict)))


def _checks(report: Report) -> Sequence[Report]:
    framework = report["framework"]
    return framework["checks"] if framework else ()


def _passed(verdicts: Sequence[Report]) -> str:
    return f"{sum(verdict['passed'] for verdict in verdicts)} of {len(verdicts)}"


def _layout(name: str, verdicts: Sequence[Report]) -> tuple[str, ...]:
    if not verdicts:
        return (name, "not measured", "", FAIL)
    state = PASS if all(verdict["passed"] for verdict in verdicts) else FAIL
    return (name, _passed(verdicts), largest(verdicts), state)


def _reasons(report: Report, of_layouts: Mapping[str, Sequence[Report]]) -> list[str]:
    """List what failed or did not run: each explanation once, with the first that has it."""
    places: dict[tuple[str, str], list[str]] = {}
    for check in _checks(report):
        if check["state"] != PASS:
            where = f"{report['framework']['name']}; {check['check']}"
            places.setdefault((check["state"], check["explanation"]), []).append(where)
    for verdict in report["verdicts"]:
        if not verdict["passed"]:
            places.setdefault((FAIL, verdict["explanation"]), []).append(place(verdict))
    lines = []
    for (state, explanation), (first, *more) in places.items():
        others = f" and {len(more)} more" if more else ""
        lines.append(f"- **{state}** {_escaped(first + others)}: {_escaped(explanation)}")
    if missing := [name for name, verdicts in of_layouts.items() if not verdicts]:
        lines.append(f"- **not measured**: {_escaped('; '.join(missing))}")
    if report["failure"]:
        # A tag that ends only with its own: nothing in it is Markdown, empty lines included.
        lines += ["", f"<pre>\n{html.escape(report['failure'])}\n</pre>"]
    return [*lines, ""]


def _run(report: Report) -> list[str]:
    tool = report["tool"]
    facts = [Fact(**fact) for fact in report["environment"]]
    rows = [
        ("command", report["command"], ""),
        ("started", report["started"], f"took {report['seconds']:.0f} s"),
        (tool["name"], tool["version"], ""),
    ]
    rows += [
        (fact.name, fact.version if fact.state == "found" else fact.state, fact.where)
        for fact in facts
    ]
    return _markdown_table(("", "", ""), rows, left=3)


def _fold(summary: str, lines: Iterable[str], *, is_open: bool = False) -> list[str]:
    """Fold lines that end with an empty one; Markdown within HTML needs empty lines around it."""
    begins = "<details open>" if is_open else "<details>"
    return [begins, f"<summary>{html.escape(summary)}</summary>", "", *lines, "</details>", ""]


def _states(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> list[str]:
    """Write a table with its last column, the state, as the first: a telephone shows it so."""
    turned = [(row[-1], *row[:-1]) for row in (columns, *rows)]
    return _markdown_table(turned[0], turned[1:], left=left + 1)


def _markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int
) -> list[str]:
    """Write a table whose first columns are aligned to the left."""
    rules = [":--" if i < left else "--:" for i in range(len(columns))]
    escaped = [[_escaped(cell) for cell in row] for row in (columns, *rows)]
    head, *body = [f"| {' | '.join(row)} |" for row in escaped]
    return [head, f"| {' | '.join(rules)} |", *body, ""]


def _escaped(text: str) -> str:
    """Write text on one line so that Markdown and HTML show it as it is."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    return _SPECIAL.sub(r"\\\g<0>", line)
