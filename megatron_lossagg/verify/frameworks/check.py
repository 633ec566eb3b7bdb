"""One comparison of a framework's function with the reference, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from megatron_lossagg.verify.drivers.outcome import (
    FAIL,
    PASS,
    FrameworkError,
    NotRunError,
    Outcome,
    ended_by,
    over,
)
from megatron_lossagg.verify.drivers.table import release
from megatron_lossagg.verify.text import error_text

if TYPE_CHECKING:
    from torch import Tensor

HOOK = "get_forward_backward_func"
"""What a framework's loop calls for Megatron's schedule."""


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
        f"{error_text(found.gradient_error)}. {release(framework)}"
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
