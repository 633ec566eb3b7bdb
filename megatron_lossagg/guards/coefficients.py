"""The terms of each call of loss_func, and what their coefficients say.

A term is a partial loss that can be trained. The coefficient of a term is what its gradient is, in
units of what a right step gives it; see :mod:`megatron_lossagg.guards.gradient_audit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import Ints, first_few

__all__ = [
    "Call",
    "FoundCall",
    "Term",
    "fault_of",
    "found_calls",
    "values_of",
    "warn_of",
    "warn_of_scales",
]

_TOLERANCE = 1e-5
_VALUE_TOLERANCE = 1e-4
"""Of a loss against the sum of its terms, which are sums in float32."""


@dataclass(kw_only=True, eq=False)
class Term:
    """A partial loss that can be trained."""

    microbatch: object
    sequences: Ints
    aggregation: Aggregation
    is_own: bool
    """Whether it is under the step's own aggregation."""
    is_late: bool
    """Whether loss_func had returned for its microbatch."""
    losses: tuple[Any, ...]
    """Which tensor was reduced; without keeping it."""
    value: Tensor
    version: int
    """Of the value, which a change in place increases."""
    arrived: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    """Of each backward pass that reached it the gradient, and the loss scale if there is one."""
    arrives_early: bool = False
    """Whether one reached it before loss_func had returned."""

    def is_of(self, microbatch: object, sequences: Ints) -> bool:
        """Whether its tokens are of a microbatch, or of another mask over the same sequences."""
        return self.microbatch is microbatch or np.array_equal(self.sequences, sequences)


@dataclass(kw_only=True, eq=False)
class Call:
    """A call of loss_func whose outputs were returned, and the terms that were made in it."""

    number: int
    microbatch: object
    sequences: Ints
    coefficient: float
    """With which the step's own partial loss should arrive."""
    loss: Tensor
    version: int
    terms: list[Term]


@dataclass(kw_only=True, eq=False)
class FoundCall:
    """What was read of a call."""

    call: Call
    loss: float
    values: list[float]
    """Of each term."""
    coefficients: list[list[float]]
    """Of each term those with which it arrived."""
    loss_scales: list[float]
    """Those with which they arrived, if there is one."""

    @property
    def own(self) -> list[list[float]]:
        """The coefficients of each partial loss under the step's own aggregation."""
        terms = zip(self.call.terms, self.coefficients, strict=True)
        return [found for term, found in terms if term.is_own]

    def is_right(self, coefficient: float) -> bool:
        """Whether a coefficient is the one that the call declares."""
        parts = [self.call.loss, *(term.value for term in self.call.terms)]
        tolerance = max(_TOLERANCE, *(torch.finfo(part.dtype).eps for part in parts))
        return math.isclose(coefficient, self.call.coefficient, rel_tol=tolerance)

    def difference(self) -> float | None:
        """Return how far the loss is from the sum of its terms, relative; None if not known."""
        changed = any(term.version != term.value._version for term in self.call.terms)
        if (
            changed
            or self.call.version != self.call.loss._version
            or any(len(found) > 1 for found in self.coefficients)
        ):
            return None
        terms = zip(self.values, self.coefficients, strict=True)
        products = [value * c for value, found in terms for c in found]
        scale = abs(self.loss) + sum(map(abs, products))
        if not math.isfinite(scale):
            return None
        return abs(self.loss - math.fsum(products)) / scale if scale else 0.0

    def is_sum(self) -> bool:
        """Whether the loss is the sum of its terms, as far as that is known."""
        difference = self.difference()
        rounding = 8 * torch.finfo(self.call.loss.dtype).eps
        return difference is None or difference <= max(_VALUE_TOLERANCE, rounding)


def values_of(calls: Sequence[Call]) -> Iterator[Tensor]:
    """Yield the 0-dim tensors that :func:`found_calls` reads."""
    for call in calls:
        yield call.loss
        for term in call.terms:
            yield term.value
            for gradient, loss_scale in term.arrived:
                yield gradient
                if loss_scale is not None:
                    yield loss_scale


def found_calls(calls: Sequence[Call], expected: float, values: Sequence[float]) -> list[FoundCall]:
    """Read calls whose loss scale is finite; ``expected``: a term's gradient without loss scale."""
    read, found = iter(values), []
    for call in calls:
        loss, of_terms, coefficients = next(read), [], []
        scales: list[float] = []
        for term in call.terms:
            of_terms.append(next(read))
            each = []
            for _, loss_scale in term.arrived:
                gradient = next(read)
                if loss_scale is None:
                    each.append(gradient / expected)
                    continue
                scale = next(read)
                each.append(gradient / (expected * scale) if scale else math.nan)
                # A gradient that overflows under a loss scale is the optimizer's to skip.
                scales.append(scale if math.isfinite(gradient) else math.nan)
            coefficients.append(each)
        if all(math.isfinite(scale) and scale for scale in scales):
            one = FoundCall(
                call=call,
                loss=loss,
                values=of_terms,
                coefficients=coefficients,
                loss_scales=scales,
            )
            found.append(one)
    return found


def fault_of(found: FoundCall) -> str:
    """Say what is wrong with a call's coefficients, empty if nothing is."""
    right = [sum(map(found.is_right, each)) for each in found.own]
    if max(right, default=0) > 1 or _has_one_tensor_twice(found):
        return (
            f"losses of sequences {first_few(found.call.sequences)} were trained twice in call "
            f"{found.call.number} of loss_func: reduce each tensor once under an aggregation, and "
            "let one backward pass reach it"
        )
    own = [c for each in found.own for c in each]
    if any(right) or (own and not any(own) and found.is_sum()):
        return ""
    if not any(own):
        return (
            f"the loss of call {found.call.number} of loss_func is {found.loss:.6g}, and its "
            "partial loss arrived in the backward pass with the coefficient 0: pass mb.outputs "
            "what mb.reduce made"
        )
    got = " and ".join(dict.fromkeys(f"{c:.6g}" for c in own))
    return (
        f"the partial loss of call {found.call.number} of loss_func arrived in the backward pass "
        f"with the coefficient {got}, expected {found.call.coefficient:g}: divide it by nothing "
        "and multiply it by nothing, for K compensates what Megatron does; return all three of "
        "mb.outputs from loss_func as they are, (loss, num_tokens, report), and let Megatron's "
        "schedule run the backward pass. A coefficient that is meant is declared: "
        f"mb.outputs(loss, coefficient={own[0]:.6g})"
    )


def _has_one_tensor_twice(found: FoundCall) -> bool:
    terms = zip(found.call.terms, found.coefficients, strict=True)
    trained = [(term.aggregation, term.losses) for term, each in terms if any(each)]
    return any(one in trained[:index] for index, one in enumerate(trained))


def warn_of(found: FoundCall) -> None:
    """Warn, once per process, of a loss that has more than its terms."""
    if not found.is_sum():
        warn_once(
            "a loss that is not the sum of its terms",
            f"the loss of call {found.call.number} of loss_func is {found.loss:.6g}, which differs "
            f"by {found.difference():.2g} of it from the sum of its partial losses: a term that "
            "mb.reduce did not make is weighted by no aggregation, and its gradient depends on "
            "the parallelism; ignore this if that is meant",
        )
    is_early = any(term.arrives_early for term in found.call.terms)
    if is_early or any(len(each) > 1 for each in found.coefficients):
        warn_once(
            "a partial loss that arrives again",
            f"a partial loss of call {found.call.number} of loss_func was reached by more than "
            "one backward pass: what torch.autograd.grad returns is not trained, but a second "
            "loss.backward() is",
        )


def warn_of_scales(found: Sequence[FoundCall]) -> None:
    """Warn, once per process, of a loss scale that changes inside a step."""
    scales = sorted({scale for one in found for scale in one.loss_scales})
    if len(scales) > 1:
        warn_once(
            "a loss scale that changes",
            f"the loss scale was {scales[0]:g} and {scales[-1]:g} in one step, so that its "
            "microbatches are not weighted as configured: change config.grad_scale_func between "
            "steps",
        )
