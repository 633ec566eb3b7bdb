"""A verification in GitHub's Markdown, as a step summary or a pull request shows it.

The result comes first, then one line per layout. What did not pass stands unfolded with its cause;
the cases of each layout, a framework's checks and the environment are folded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_lossagg.cli.verify_report import (
    COLUMNS,
    FRAMEWORK_COLUMNS,
    Report,
    cells,
    largest,
    place,
    result,
)
from megatron_lossagg.verify.drivers.outcome import FAIL, PASS, counted
from megatron_lossagg.verify.drivers.outcome import cells as framework_cells
from megatron_lossagg.verify.environment import Fact

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
    return _table(("", "", ""), rows, left=3)


def _fold(summary: str, lines: Iterable[str], *, is_open: bool = False) -> list[str]:
    """Fold lines that end with an empty one; Markdown within HTML needs empty lines around it."""
    begins = "<details open>" if is_open else "<details>"
    return [begins, f"<summary>{html.escape(summary)}</summary>", "", *lines, "</details>", ""]


def _states(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> list[str]:
    """Write a table with its last column, the state, as the first: a telephone shows it so."""
    turned = [(row[-1], *row[:-1]) for row in (columns, *rows)]
    return _table(turned[0], turned[1:], left=left + 1)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> list[str]:
    """Write a table whose first columns are aligned to the left."""
    rules = [":--" if i < left else "--:" for i in range(len(columns))]
    escaped = [[_escaped(cell) for cell in row] for row in (columns, *rows)]
    head, *body = [f"| {' | '.join(row)} |" for row in escaped]
    return [head, f"| {' | '.join(rules)} |", *body, ""]


def _escaped(text: str) -> str:
    """Write text on one line so that Markdown and HTML show it as it is."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    return _SPECIAL.sub(r"\\\g<0>", line)
