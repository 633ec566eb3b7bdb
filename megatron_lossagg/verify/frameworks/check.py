"""One comparison of a framework's function with the reference, and how it ended."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import megatron_lossagg
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.verify.frameworks import FRAMEWORKS
from megatron_lossagg.verify.frameworks.missing import install_line, missing_modules, not_found
from megatron_lossagg.verify.text import error_text, number_of

if TYPE_CHECKING:
    from torch import Tensor

State = Literal["PASS", "FAIL", "NOT RUN"]
PASS: State = "PASS"
FAIL: State = "FAIL"
NOT_RUN: State = "NOT RUN"

HOOK = "get_forward_backward_func"
"""What a framework's loop calls for Megatron's schedule."""
_PACKAGE = Path(megatron_lossagg.__file__).parent


class NotRunError(LossAggregationError):
    """A check that cannot run here; the message has the reason and what to change."""


class FrameworkError(LossAggregationError):
    """A framework lacks what its integration uses, or fails under it."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A framework's loss and gradient against the wanted ones."""

    got: float
    wanted: float
    loss_error: float
    """Relative."""
    gradient_error: float
    """The largest norm(g - g_wanted) / norm(g_wanted) of all leaves."""
    factor: float
    """The gradient as a multiple of the wanted one, by projection."""


@dataclass(frozen=True)
class Check:
    """One named comparison of a framework's function."""

    name: str
    function: str
    """The framework's function, by its dotted path."""
    compare: Callable[[], Comparison | None]
    """Runs it; None if there are no numbers and what it did not raise is the result."""
    gradient: str = "gradient"
    """What of the gradient is compared."""
    tolerance: float = 1e-6
    """Frameworks count in float32 and add small numbers to divisors."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended; numbers are None if there was nothing to compare."""

    check: str
    function: str
    state: State
    got: float | None = None
    wanted: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    factor: float | None = None
    tolerance: float | None = None
    explanation: str = ""


def compare(got: Tensor, wanted: Tensor, leaves: Sequence[Tensor]) -> Comparison:
    """Compare two 0-dim losses of the same leaves, and their gradients."""
    import torch

    ours, theirs = (
        torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
        for loss in (got, wanted)
    )
    pairs = [(g.double(), w.double()) for g, w in zip(ours, theirs, strict=True)]
    projected = sum((g * w).sum().item() for g, w in pairs)
    squared = sum((w * w).sum().item() for _, w in pairs)
    return Comparison(
        got=got.item(),
        wanted=wanted.item(),
        loss_error=over(abs(got.item() - wanted.item()), abs(wanted.item())),
        gradient_error=max(over((g - w).norm().item(), w.norm().item()) for g, w in pairs),
        factor=over(projected, squared),
    )


def over(difference: float, size: float) -> float:
    """Divide; 0 / 0 is 0, for leaves that take no part. What is not finite is inf, never NaN."""
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    quotient = difference / size
    return quotient if math.isfinite(quotient) else math.inf


def outcome_of(check: Check, *, framework: str) -> Outcome:
    """Run a check; whatever it raises becomes an outcome."""
    try:
        found = check.compare()
    except (Exception, SystemExit) as error:
        return ended_by(error, check.name, framework=framework, function=check.function)
    if found is None:
        return Outcome(check=check.name, function=check.function, state=PASS)
    passed = max(found.loss_error, found.gradient_error) < check.tolerance
    factor = f"{found.factor:.9g}" if math.isfinite(found.factor) else "not finite"
    difference = (
        f"{check.function}: got a loss of {found.got:.9g}, expected {found.wanted:.9g}; got a "
        f"{check.gradient} of {factor} times the expected one, with an error of "
        f"{error_text(found.gradient_error)}. {_release(framework)}"
    )
    return Outcome(
        check=check.name,
        function=check.function,
        state=PASS if passed else FAIL,
        tolerance=check.tolerance,
        explanation="" if passed else difference,
        **asdict(found),
    )


def check_hooked(module: ModuleType, install: Callable[[], object]) -> None:
    """Install an integration, and look at the name that a module's loop calls."""
    stock = getattr(module, HOOK, None)
    install()
    bound = getattr(module, HOOK)
    if getattr(bound, "__wrapped__", None) is not stock:
        raise FrameworkError(
            f"got {bound!r} as {module.__name__}.{HOOK} after install, expected the hooked "
            f"{stock!r}: use a release that the integration was written for (docs/integrations)"
        )


def loop_not_run(name: str, function: str) -> Check:
    """Return the check of a training loop that needs GPUs: it is not run."""

    def refuse() -> None:
        raise NotRunError(
            f"{name} builds its models for CUDA through Transformer Engine, expected a loop that "
            "runs on the CPU: train a few steps at two layouts on your GPUs and compare loss and "
            "grad norm"
        )

    return Check("the training loop", function, refuse)


def ended_by(error: BaseException, check: str, *, framework: str, function: str = "") -> Outcome:
    """Describe what a check raised, or, without a ``function``, what listing the checks raised.

    Not run: :class:`NotRunError`, a missing package that is not the framework itself, and whatever
    the framework's own import raises. All else fails. If listing ends for a missing package, all
    that are missing are named (``missing.py``), and this process can run nothing more.
    """
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}"
    state = NOT_RUN
    is_elsewhere = isinstance(error, NotRunError) or _is_of_others(error, framework)
    names = []
    if is_elsewhere and not function:
        names = missing_modules(FRAMEWORKS[framework].imports, own=_own(framework))
    if names:
        text = f"got no {', '.join(names)}: {install_line(names)}, or run where {framework} trains"
    elif isinstance(error, NotRunError):
        text = str(error)
    elif is_elsewhere and (missing := not_found(error)):
        text += f": {install_line([missing])}, or run where {framework} trains"
    elif is_elsewhere:
        text += f". Run where {framework} trains"
    elif not function and not _is_raised_here(error):
        text += f". Run where python can import {framework}"
    else:
        expected = "a loss" if function else "what the integration uses"
        got = f"{function} raised" if function else "got"
        state, text = FAIL, f"{got} {text}, expected {expected}. {_release(framework)}"
    return Outcome(check=check, function=function, state=state, explanation=text)


def _is_of_others(error: BaseException, framework: str) -> bool:
    """Whether a module is missing that is not the framework's own."""
    missing = not_found(error)
    return missing is not None and not f"{missing}.".startswith(f"{_own(framework)}.")


def _own(framework: str) -> str:
    """Return the package whose modules are all the framework's; several share ``megatron``."""
    package = FRAMEWORKS[framework].package
    return package if package.startswith("megatron.") else package.partition(".")[0]


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package's own code raised it, such as by a name that the framework lacks."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if not file.startswith("<frozen")]
    return bool(files) and Path(files[-1]).is_relative_to(_PACKAGE)


def _release(framework: str) -> str:
    written_for = FRAMEWORKS[framework].written_for
    return f"Use a release of {framework} that the integration was written for: {written_for}"


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
