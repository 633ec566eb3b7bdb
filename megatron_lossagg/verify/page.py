"""A verification as one page for a pull request, by ``templates/verify.html``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lossagg import html
from megatron_lossagg.scaling import K_FORMULA
from megatron_lossagg.text import error_text, number_of
from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.frameworks.outcome import FAIL, PASS, cells, counted, none_ran
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE

__all__ = ["page"]

Json = Mapping[str, Any]

_COLUMNS = {
    "aggregation": "the configured loss",
    "w_s": "the weight of a sequence, with the divisor's value",
    "loss_scaling": "how Megatron scales the loss",
    "K": "what the package multiplies the loss by",
    "factor": "the gradient's measured multiple of the reference's; 1 is right",
    "gradient error": "largest relative error of any parameter's gradient",
    "loss error": "relative error of the reported loss",
    "weight sum error": "relative error of the reported weight sum",
    "verdict": "PASS if every error is below its tolerance",
}
_FRAMEWORK_COLUMNS = {
    "check": "what is compared with the reference",
    "function": "the framework's own function",
    "loss error": "relative error of the loss",
    "gradient error": "largest relative error of any gradient, or of its norm",
    "verdict": "PASS if both errors are below the tolerance",
}
_DECADES = (-17, 1)
"""Of the plot, the same in every report; a larger error extends it, a smaller one is at its left
end."""


def page(report: Json) -> str:
    """Write a report as a page; errors may be None, infinite or NaN, text is escaped."""
    verdicts = report["verdicts"]
    axis = _Axis([_number(verdict["gradient_error"]) for verdict in verdicts])
    cases = [_case(verdict, number, axis) for number, verdict in enumerate(verdicts, 1)]
    names = dict.fromkeys([*map(str, report["layouts"]), *(case["layout"] for case in cases)])
    layouts = [_layout(name, [c for c in cases if c["layout"] == name], axis) for name in names]
    missing = [layout["name"] for layout in layouts if not layout["cases"]]
    passed = bool(report["passed"] and verdicts and not missing)
    found, meaning = _outcome(report, passed)
    causes: dict[str, list[Json]] = {}
    for case in cases:
        if not case["passed"]:
            causes.setdefault(" or ".join(case["causes"]) or "no known cause", []).append(case)
    return html.page(
        "verify.html",
        verdict="pass" if passed else "fail",
        found=found,
        meaning=meaning,
        largest=error_text(axis.largest) if cases else "",
        allowed=" or ".join(f"{bar:g}" for bar in sorted({case["tolerance"] for case in cases})),
        columns=_COLUMNS,
        layouts=layouts,
        framework=_framework(report.get("framework")),
        framework_columns=_FRAMEWORK_COLUMNS,
        causes=list(causes.items()),
        missing=missing,
        ticks=axis.ticks,
        report=report,
        seconds=f"{_number(report['seconds']):.0f}",
        environment=[Fact(**fact) for fact in report["environment"]],
        k_formula=K_FORMULA,
        weight_sum_tolerance=f"{WEIGHT_SUM_TOLERANCE:g}",
        number_of=number_of,
    )


def _outcome(report: Json, passed: bool) -> tuple[str, str]:
    """Write what was found, and what it means."""
    verdicts, framework = report["verdicts"], report.get("framework")
    failed = sum(not verdict["passed"] for verdict in verdicts)
    cases = number_of(len(verdicts), "case")
    if failed:
        what = "the trained or the reported loss is not the configured loss"
        return f"{failed} of {cases} {'fails' if failed == 1 else 'fail'}", what
    if framework and len(verdicts) == report["num_verdicts"]:
        checks = framework["checks"]
        if none_ran(checks):
            return f"No check of {framework['name']} ran", "nothing is known of its own code"
        if wrong := sum(check["state"] == FAIL for check in checks):
            of = f"{wrong} of {number_of(len(checks), 'check')} of {framework['name']}"
            fail = "fails" if wrong == 1 else "fail"
            return f"{of} {fail}", "its own code does not train the configured loss"
    if not passed:
        measured = f"{cases} measured, none of them fails"
        return "The run did not finish", measured if verdicts else "nothing was measured"
    pass_ = "passes" if len(verdicts) == 1 else "pass"
    return f"{len(verdicts)} of {cases} {pass_}", "the trained loss is the configured loss"


class _Axis:
    """Where errors are on the plot, in percent of its width; those not finite at the right."""

    def __init__(self, errors: Sequence[float]) -> None:
        finite = [error for error in errors if math.isfinite(error)]
        self.largest = max(errors, default=0.0) if len(finite) == len(errors) else math.inf
        low, high = _DECADES
        self._high = high = max(high, math.ceil(math.log10(max([1.0, *finite]))))
        self._end = 98.0 if len(finite) == len(errors) else 85.0
        step = 2 * math.ceil((high - low) / 24)
        decades = range(low + low % 2, high + 1, step)
        self.ticks = [{"x": self.x(10.0**n), "text": f"1e{n}" if n else "1"} for n in decades]
        if len(finite) < len(errors):
            self.ticks.append({"x": self.x(math.nan), "text": "not finite"})

    def x(self, error: float) -> float:
        """Return the position of an error."""
        if not math.isfinite(error):
            return 94.0
        low = _DECADES[0]
        decade = math.log10(max(error, 10.0**low))
        return round(2 + (self._end - 2) * (decade - low) / (self._high - low), 2)


def _case(verdict: Json, number: int, axis: _Axis) -> dict[str, Any]:
    """Describe a verdict for the table and the plot."""
    tolerance = _number(verdict["tolerance"])
    bars = {"gradient": tolerance, "loss": tolerance, "weight_sum": WEIGHT_SUM_TOLERANCE}
    errors = {name: _number(verdict[f"{name}_error"]) for name in bars}
    factor = _number(verdict["measured_factor"])
    return {
        **verdict,
        "number": number,
        "layout": str(verdict["layout"]),
        "loss_scaling": str(verdict["loss_scaling"]),
        "tolerance": tolerance,
        "factor": f"{factor:.9g}" if math.isfinite(factor) else "not finite",
        "errors": [
            {"text": error_text(errors[name]), "over": not errors[name] < bar}
            for name, bar in bars.items()
        ],
        "where": f"{verdict['layout']}; {verdict['case']}; {verdict['loss_scaling']}",
        "why": verdict["explanation"] or "no explanation was given",
        "x": axis.x(errors["gradient"]),
        "kind": "point" if math.isfinite(errors["gradient"]) else "lost",
    }


def _layout(name: str, cases: Sequence[dict[str, Any]], axis: _Axis) -> dict[str, Any]:
    """Describe a layout, and give each of its cases a height in its band of the plot."""
    for place, case in enumerate(cases):
        case["y"] = round(12 + 76 * (place + 0.5) / len(cases), 1)
    bars = sorted({case["tolerance"] for case in cases})
    return {
        "name": name,
        "cases": cases,
        "passed": sum(bool(case["passed"]) for case in cases),
        "bars": [{"x": axis.x(bar), "text": f"{bar:g}"} for bar in bars],
    }


def _framework(framework: Json | None) -> dict[str, Any] | None:
    """Describe a framework's checks."""
    if framework is None:
        return None
    kinds = {str(PASS): "pass", str(FAIL): "fail"}
    checks = [
        {**check, "cells": cells(check), "kind": kinds.get(check["state"], "soft")}
        for check in framework["checks"]
    ]
    seconds = f"{framework['seconds']:.0f}"
    return {**framework, "checks": checks, "counted": counted(checks), "seconds": seconds}


def _number(value: Any) -> float:
    """Read a number of the report; None is NaN."""
    return math.nan if value is None else float(value)
