"""How a mode ended under a framework's driver, or why it could not run, in words and in cells."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import megatron_lossagg
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.verify.drivers.imports import install_line, missing_modules, not_found
from megatron_lossagg.verify.drivers.table import FRAMEWORKS, own_package, release
from megatron_lossagg.verify.job import Event
from megatron_lossagg.verify.text import error_text, number_of

State = Literal["PASS", "FAIL", "NOT RUN"]
PASS: State = "PASS"
FAIL: State = "FAIL"
NOT_RUN: State = "NOT RUN"
_PACKAGE = Path(megatron_lossagg.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a mode or a check ended; numbers are None if there was nothing to compare."""

    check: str
    function: str
    state: State
    got: float | None = None
    """The loss: of a driver, what the framework logs."""
    wanted: float | None = None
    loss_error: float | None = None
    """Relative, of a driver the largest of all that is logged."""
    gradient_error: float | None = None
    """Relative, of a driver the largest of a token's weight, which is the gradient at its loss."""
    factor: float | None = None
    tolerance: float | None = None
    explanation: str = ""


class NotRunError(LossAggregationError):
    """A check that cannot run here; the message has the reason and what to change."""


class FrameworkError(LossAggregationError):
    """A framework lacks what its integration uses, or fails under it."""


def outcome_of(event: Event, framework: str) -> Outcome:
    """Return how a mode of ours ended in a step."""
    followed = {  # a term that the driver does not know and that trains something is one too many
        name: term["error"]
        for name, term in event["terms"].items()
        if term["follows"] or (term["follows"] is None and term["weighed"]["tokens"])
    }
    missing, logged = event["missing"], event["logged"]
    errors = [math.inf if e is None else e for e in followed.values()]
    weights = math.inf if missing else max(errors, default=math.inf)
    losses = max((abs(over(got - want, want)) for got, want in logged.values()), default=math.inf)
    is_right = max(weights, losses) < event["tolerance"]
    got, wanted = next(iter(logged.values()), (None, None))
    said = [f"got no term {name}" for name in missing]
    said += [f"{name}: {event['terms'][name]['verdict']}" for name in followed]
    said += [f"{k}: got a loss of {a:.9g}, expected {b:.9g}" for k, (a, b) in logged.items()]
    return Outcome(
        check=event["trained"],
        function=event["function"],
        state=PASS if is_right else FAIL,
        got=got,
        wanted=wanted,
        loss_error=losses,
        gradient_error=weights,
        tolerance=event["tolerance"],
        explanation="" if is_right else f"{'; '.join(said)}. {release(framework)}",
    )


def over(difference: float, size: float) -> float:
    """Divide; 0 / 0 is 0. What is not finite is inf, never NaN."""
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    quotient = difference / size
    return quotient if math.isfinite(quotient) else math.inf


def ended_by(error: BaseException, framework: str) -> Outcome:
    """Describe what importing a framework raised.

    Not run: :class:`NotRunError`, a missing package that is not the framework itself, and whatever
    the framework's own import raises. All else fails. If an import ends for a missing package, all
    that are missing are named, and this process can run nothing more.
    """
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}"
    missing, own = not_found(error), own_package(framework)
    is_of_others = missing is not None and not f"{missing}.".startswith(f"{own}.")
    names, state = [], NOT_RUN
    if isinstance(error, NotRunError) or is_of_others:
        names = missing_modules(FRAMEWORKS[framework].imports, own=own)
    if names:
        text = f"got no {', '.join(names)}: {install_line(names)}, or run where {framework} trains"
    elif isinstance(error, NotRunError):
        text = str(error)
    elif is_of_others:
        install = f": {install_line([missing])}, or run" if missing else ". Run"
        text += f"{install} where {framework} trains"
    elif not _is_raised_here(error):
        text += f". Run where python can import {framework}"
    else:
        state, text = FAIL, f"got {text}, expected what the integration uses. {release(framework)}"
    name = f"import of {framework}"
    return Outcome(check=name, function="", state=state, explanation=text)


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package's own code raised it, such as by a name that the framework lacks."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if not file.startswith("<frozen")]
    return bool(files) and Path(files[-1]).is_relative_to(_PACKAGE)


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
    """Write an outcome in a table: check, function, errors, state; no errors if none exist."""
    errors = [
        "" if outcome["wanted"] is None else error_text(outcome[name])
        for name in ("loss_error", "gradient_error")
    ]
    function = ".".join(outcome["function"].split(".")[-2:])
    return (outcome["check"], function, *errors, outcome["state"])
