"""How a check ended: passed, failed, or not run with the reason; as the reports have it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import megatron_lossagg
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.text import error_text, number_of
from megatron_lossagg.verify.framework_facts import FRAMEWORKS
from megatron_lossagg.verify.frameworks.missing import missing_modules
from megatron_lossagg.verify.frameworks.step import Check, Comparison, NotRunError

__all__ = [
    "FAIL",
    "NOT_RUN",
    "PASS",
    "Outcome",
    "State",
    "cells",
    "counted",
    "ended_by",
    "none_ran",
    "outcome_of",
]

State = Literal["PASS", "FAIL", "NOT RUN"]
PASS: State = "PASS"
FAIL: State = "FAIL"
NOT_RUN: State = "NOT RUN"


_PACKAGE = Path(megatron_lossagg.__file__).parent
_REMEDIES = {"megatron": "Put the Megatron-LM that it needs on PYTHONPATH"}
"""What to do about a missing module that is not a package of its name."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One check of a framework; numbers are None where there was nothing to compare."""

    check: str
    function: str
    """The framework's function."""
    state: State
    got: float | None = None
    wanted: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    factor: float | None = None
    tolerance: float | None = None
    explanation: str = ""


def outcome_of(check: Check, *, framework: str) -> Outcome:
    """Run a check; whatever it raises becomes an outcome."""
    try:
        found = check.compare()
    except (Exception, SystemExit) as error:
        return ended_by(error, check.name, framework=framework, function=check.function)
    if found is None:
        return Outcome(check=check.name, function=check.function, state=PASS)
    passed = max(found.loss_error, found.gradient_error) < check.tolerance
    return Outcome(
        check=check.name,
        function=check.function,
        state=PASS if passed else FAIL,
        got=found.got,
        wanted=found.wanted,
        loss_error=found.loss_error,
        gradient_error=found.gradient_error,
        factor=found.factor,
        tolerance=check.tolerance,
        explanation="" if passed else _difference(check, found, framework),
    )


def ended_by(
    error: BaseException,
    check: str,
    *,
    framework: str,
    function: str = "",
    load: Callable[[], object] | None = None,
) -> Outcome:
    """Describe what a check raised: a package that is missing is not run, all else fails.

    While the checks are listed (no ``function``), what the framework's own import raises is not
    run.
    ``load``: what raised it, to find all that it lacks; this process runs nothing else then.
    """
    if isinstance(error, NotRunError) or _is_missing_elsewhere(error, framework):
        return not_run(check, error, framework=framework, function=function, load=load)
    if not function and not _is_raised_here(error):
        return not_run(check, error, framework=framework)
    got = f"{function} raised {_sentence(error)}, expected a loss"
    if not function:
        got = f"got {_sentence(error)} before the first check, expected what the integration uses"
    return Outcome(
        check=check,
        function=function,
        state=FAIL,
        explanation=f"{got}: use a release of {framework} that the integration was written for (docs/integrations)",  # noqa: E501
    )


def _is_missing_elsewhere(error: BaseException, framework: str) -> bool:
    """Whether a package is missing that is not the framework itself."""
    own = FRAMEWORKS[framework].package
    return isinstance(error, ModuleNotFoundError) and not f"{error.name}.".startswith(f"{own}.")


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package's own code raised it, such as by a name that the framework lacks."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if not file.startswith("<frozen")]
    return bool(files) and Path(files[-1]).is_relative_to(_PACKAGE)


def not_run(
    check: str,
    error: BaseException,
    *,
    framework: str,
    function: str = "",
    load: Callable[[], object] | None = None,
) -> Outcome:
    """Describe why a check did not run, and what to change; arguments as :func:`ended_by`."""
    text = str(error) if isinstance(error, NotRunError) else _sentence(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        names = [error.name]
        if load is not None:
            names = missing_modules(error, load, own=FRAMEWORKS[framework].package)
        packages = list(dict.fromkeys(name.partition(".")[0] for name in names))
        remedies = [_REMEDIES[package] for package in packages if package in _REMEDIES]
        if others := [package for package in packages if package not in _REMEDIES]:
            ending = "s that provide " if others[1:] else " that provides "
            remedies.append(f"Install the package{ending}{', '.join(others)}")
        also = f", nor {', '.join(names[1:])}" if names[1:] else ""
        text += f"{also}. {'. '.join(remedies)}, or run where {framework} trains"
    elif not isinstance(error, LossAggregationError):
        text += f". Run where python can import {framework}"
    return Outcome(check=check, function=function, state=NOT_RUN, explanation=text)


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"


def _difference(check: Check, found: Comparison, framework: str) -> str:
    factor = f"{found.factor:.9g}" if math.isfinite(found.factor) else "not finite"
    text = (
        f"{check.function}: got a loss of {found.got:.9g}, expected {found.wanted:.9g}; got a "
        f"{check.gradient} of {factor} times the expected one, with an error of "
        f"{error_text(found.gradient_error)}"
    )
    return f"{text}. Use a release of {framework} that is named in docs/integrations"


def none_ran(outcomes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing of the framework ran."""
    return all(outcome["state"] == NOT_RUN for outcome in outcomes)


def counted(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Count outcomes: ``4 of 6 checks of its own code pass, 1 fails, 1 not run``."""
    number = dict.fromkeys((PASS, FAIL, NOT_RUN), 0)
    for outcome in outcomes:
        number[outcome["state"]] += 1
    pass_ = "passes" if len(outcomes) == 1 else "pass"
    checks = number_of(len(outcomes), "check")
    text = f"{number[PASS]} of {checks} of its own code {pass_}"
    if number[FAIL]:
        text += f", {number[FAIL]} {'fails' if number[FAIL] == 1 else 'fail'}"
    return text + (f", {number[NOT_RUN]} not run" if number[NOT_RUN] else "")


def cells(outcome: Mapping[str, Any]) -> tuple[str, ...]:
    """Write an outcome in a table: check, function, errors, state; no errors where none exist."""
    errors = [
        "" if outcome["wanted"] is None else error_text(outcome[name])
        for name in ("loss_error", "gradient_error")
    ]
    function = ".".join(outcome["function"].split(".")[-2:])
    return (outcome["check"], function, *errors, outcome["state"])
