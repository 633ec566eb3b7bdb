"""A verification as it is printed, and as one page for a pull request.

The page is ``cli/templates/verify.html``.

The result comes first, then the table, the checks of a framework, the causes of what failed, and
the environment.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_lossagg.cli import html
from megatron_lossagg.contract.scaling import K_FORMULA
from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.frameworks.check import FAIL, NOT_RUN, PASS, counted
from megatron_lossagg.verify.frameworks.check import cells as framework_cells
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE
from megatron_lossagg.verify.text import error_text, number_of

__all__ = ["Report", "finite", "page", "show"]

Report = Mapping[str, Any]
_COLUMNS = {
    "aggregation": "The configured loss.",
    "w_s": "The weight of each token of sequence s in the configured loss, with the divisor's "
    "value; of both terms if a case adds two.",
    "loss_scaling": "How Megatron scales, never which loss is configured: calculate_per_token_loss "
    "off (average) or on (per_token).",
    "K": "The package multiplies a returned loss by it, to cancel Megatron's own factors on the "
    f"way to the gradient: {K_FORMULA['average']} for average, the step's active tokens "
    f"{K_FORMULA['per_token']} for per_token.",
    "factor": "The trained gradient as a multiple of the reference's, by projection. 1 is right. 1 "
    "with a large error is a wrong direction, or a wrong reported loss.",
    "gradient error": "The largest, over all parameters, of |g - g_reference| / |g_reference|.",
    "loss error": "The reported loss against the reference's, in training and in a forward-only "
    "call.",
    "weight sum error": "lossagg/weight_sum and lossagg/weight_expected, reported in float32: "
    f"{WEIGHT_SUM_TOLERANCE:g} is allowed.",
    "": "PASS if every error is below its tolerance.",
}
_PRINTED = [column for column in _COLUMNS if column != "weight sum error"]
_FRAMEWORK_COLUMNS = {
    "check": "what is compared with the reference",
    "function": "the framework's own function",
    "loss error": "relative error of the loss",
    "gradient error": "largest relative error of any gradient, or of its norm",
    "": "PASS if both errors are below the tolerance",
}
_WIDE = 200
_DECADES = (-17, 2)
"""Of the page's plot, the same in every report; what is beyond them is at their ends."""


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value


def show(report: Report) -> None:
    """Print a report; with several layouts, repeat the result at the end."""
    # A file or a pipe has no width: there a line is as long as it must be.
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    text = partial(console.print, markup=False, soft_wrap=True)
    text(_summary(report), end="\n\n")
    for layout, verdicts in groupby(report["verdicts"], key=lambda v: str(v["layout"])):
        text(layout)
        rows = [(*errors, state) for *errors, _, state in map(_cells, verdicts)]
        console.print(_table(_PRINTED, rows, left=3))
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
            text(f"FAIL {_place(verdict)}")
            text(f"     {verdict['explanation']}\n")
    if report["failure"]:
        text(report["failure"].replace("\n", "\n  "), end="\n\n")
    for fact in report["environment"]:
        text(str(Fact(**fact)))
    if len(report["layouts"]) > 1:
        text("\n" + _summary(report))


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]], *, left: int) -> Padding:
    """Make a table whose first columns are aligned to the left, with the state at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    for *most, state in rows:
        colour = {str(PASS): "green", str(FAIL): "bold red"}.get(state, "")
        table.add_row(*map(Text, most), Text(state, colour))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _summary(report: Report) -> str:
    """Write the result: how many cases pass, where, the largest error, the time it took.

    A second line has the result of a framework's checks; it is the first one if none of them ran.
    """
    verdicts, num_verdicts = report["verdicts"], report["num_verdicts"]
    passed = sum(verdict["passed"] for verdict in verdicts)
    versions = {fact["name"]: fact["version"] for fact in report["environment"]}
    largest = f"; largest gradient error {_largest(verdicts)}" if verdicts else ""
    pass_ = "passes" if num_verdicts == 1 else "pass"
    cases = (
        f"{passed} of {number_of(num_verdicts, 'case')} {pass_} on "
        f"{number_of(len(report['layouts']), 'layout')} of {number_of(report['num_ranks'], 'rank')}"
        f", megatron-core {versions['megatron-core']}, torch {versions['torch']}{largest}; "
        f"{report['seconds']:.0f} s"
    )
    framework = report.get("framework")
    of_framework = [f"{framework['name']}: {counted(framework['checks'])}"] if framework else []
    lines = [cases, *of_framework]
    if report["state"] == NOT_RUN:  # which is about the framework
        lines.reverse()
    return f"{report['state']}: " + "\n".join(lines)


def _cells(verdict: Report) -> tuple[str, ...]:
    """Write one verdict in the columns of the table."""
    factor = verdict["measured_factor"]
    return (
        str(verdict["case"]),
        str(verdict["formula"]),
        str(verdict["loss_scaling"]),
        str(verdict["k"]),
        f"{factor:.9f}" if factor is not None else "not finite",
        *(error_text(verdict[f"{name}_error"]) for name in ("gradient", "loss", "weight_sum")),
        "PASS" if verdict["passed"] else "FAIL",
    )


def _largest(verdicts: Sequence[Report]) -> str:
    errors = [verdict["gradient_error"] for verdict in verdicts]
    return error_text(None if None in errors else max(errors))


def _place(verdict: Report) -> str:
    return f"{verdict['layout']}; {verdict['case']}; {verdict['loss_scaling']}"


def page(report: Report) -> str:
    """Write a report as a page; errors may be None, text is escaped."""
    cases = [_case(verdict, number) for number, verdict in enumerate(report["verdicts"], 1)]
    layouts = []
    for name in map(str, report["layouts"]):
        of_layout = [case for case in cases if str(case["layout"]) == name]
        for place, case in enumerate(of_layout):  # a height in the layout's band of the plot
            case["y"] = round(12 + 76 * (place + 0.5) / len(of_layout), 1)
        bars = sorted({case["tolerance"] for case in of_layout})
        layouts.append({"name": name, "cases": of_layout, "bars": [(_x(bar), bar) for bar in bars]})
    missing = [layout["name"] for layout in layouts if not layout["cases"]]
    found, meaning = _outcome(report)
    failed: dict[str, list[Report]] = {}
    for case in cases:
        if not case["passed"]:
            failed.setdefault(" or ".join(case["causes"]) or "no known cause", []).append(case)
    low, high = _DECADES
    framework = report.get("framework")
    return html.page(
        "verify.html",
        verdict="pass" if report["passed"] else "fail",
        found=found,
        meaning=meaning,
        largest=_largest(cases) if cases else "",
        allowed=" or ".join(f"{bar:g}" for bar in sorted({case["tolerance"] for case in cases})),
        columns=_COLUMNS,
        meanings=[(name, what) for name, what in _COLUMNS.items() if name],
        layouts=layouts,
        framework=framework,
        framework_columns=_FRAMEWORK_COLUMNS,
        framework_cells=framework_cells,
        counted=counted(framework["checks"]) if framework else "",
        kinds={PASS: "pass", FAIL: "fail"},
        causes=list(failed.items()),
        missing=missing,
        ticks=[(_x(10.0**n), f"1e{n}" if n else "1") for n in range(low + 1, high, 2)],
        report=report,
        environment=[Fact(**fact) for fact in report["environment"]],
        number_of=number_of,
    )


def _outcome(report: Report) -> tuple[str, str]:
    """Write what was found, and what it means."""
    verdicts = report["verdicts"]
    cases = number_of(len(verdicts), "case")
    if failed := sum(not verdict["passed"] for verdict in verdicts):
        what = "the trained or the reported loss is not the configured loss"
        return f"{failed} of {cases} {'fails' if failed == 1 else 'fail'}", what
    if report["failure"]:
        measured = f"{cases} measured, none of them fails"
        return report["failure"].splitlines()[0], measured if verdicts else "nothing was measured"
    if report["state"] == NOT_RUN:
        name = report["framework"]["name"]
        return f"No check of {name} ran", "nothing is known of its own code"
    if report["state"] == FAIL:
        name, checks = report["framework"]["name"], report["framework"]["checks"]
        wrong = sum(check["state"] == FAIL for check in checks)
        of = f"{wrong} of {number_of(len(checks), 'check')} of {name}"
        fail = "fails" if wrong == 1 else "fail"
        return f"{of} {fail}", "its own code does not train the configured loss"
    pass_ = "passes" if len(verdicts) == 1 else "pass"
    return f"{len(verdicts)} of {cases} {pass_}", "the trained loss is the configured loss"


def _case(verdict: Report, number: int) -> dict[str, Any]:
    """Describe a verdict for the page's table and plot."""
    allowed = {
        "gradient_error": verdict["tolerance"],
        "loss_error": verdict["tolerance"],
        "weight_sum_error": WEIGHT_SUM_TOLERANCE,
    }
    over = [verdict[name] is None or verdict[name] >= bar for name, bar in allowed.items()]
    *first, gradient, loss, weight_sum, state = _cells(verdict)
    return {
        **verdict,
        "number": number,
        "first": first,
        "errors": list(zip((gradient, loss, weight_sum), over, strict=True)),
        "state": state,
        "where": _place(verdict),
        "x": _x(verdict["gradient_error"]),
    }


def _x(error: float | None) -> float:
    """Return where an error is on the plot, in percent of its width; not finite at the right."""
    low, high = _DECADES
    decade = float(high)
    if error is not None:
        decade = min(math.log10(max(error, 10.0**low)), decade)
    return round(2 + 96 * (decade - low) / (high - low), 2)
