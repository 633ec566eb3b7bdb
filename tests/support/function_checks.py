"""A comparison of a framework's function with the reference: loss and gradient of its leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lossagg.verify.drivers.runs import over


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
    compare: Callable[[], Comparison]
    tolerance: float = 1e-6
    """Frameworks count in float32 and add small numbers to divisors."""

    def passes(self) -> None:
        """Raise an ``AssertionError`` for another loss or another gradient."""
        found = self.compare()
        error = max(found.loss_error, found.gradient_error)
        assert error < self.tolerance, f"{self.name}, {self.function}: {found}"


def compare(got: Tensor, wanted: Tensor, leaves: Sequence[Tensor]) -> Comparison:
    """Compare two 0-dim losses of the same leaves, and their gradients."""
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
