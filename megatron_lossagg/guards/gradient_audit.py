"""With which coefficient each partial loss arrived in the backward pass.

In a right step the gradient that reaches a partial loss is exactly K times the schedule's factor
times the loss scale. Divided by these it is the coefficient with which the loss was trained::

    c = gradient / (K * schedule factor * loss scale)

A loss that was multiplied, detached, dropped, trained twice or made by other means shows in c,
whoever did it and wherever: in loss_func, in the schedule, or between them.

A *term* is a partial loss that can be trained. The log of the step becomes calls of loss_func with
their terms, whose values and gradients are read when the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import first_few
from megatron_lossagg.reduction.step_state import Line, StepLog, Term
from megatron_lossagg.weigh.causes import LEAST, is_near

_VALUE_TOLERANCE = 1e-4
"""Of a loss against the sum of its terms, which are sums in float32."""


@dataclass(eq=False)
class TrainedTerm:
    """A term that can be trained, with what was read of it."""

    term: Term
    value: Tensor
    is_own: bool
    """Whether it is under the step's own aggregation."""
    is_late: bool
    """Whether loss_func had returned for its microbatch when it was made."""
    arrived: list[Sequence[Tensor]] = field(default_factory=list)
    """Of each backward pass that reached it the gradient, and the loss scale if there is one."""
    arrives_early: bool = False
    """Whether one reached it before loss_func had returned."""
    read: float = 0.0
    """The value, as it is read when the step ends."""
    coefficients: list[float] = field(default_factory=list)
    """Those with which it arrived, likewise."""


@dataclass(eq=False)
class Call:
    """A call of loss_func whose outputs were returned, and the terms that were made in it."""

    number: int
    """In its pass over the step."""
    line: Line
    loss: Tensor
    terms: list[TrainedTerm] = field(default_factory=list)
    read: float = 0.0
    """The loss, as it is read when the step ends."""
    loss_scales: list[float] = field(default_factory=list)
    """Those with which terms arrived, likewise."""

    def tensors(self) -> list[Tensor]:
        """Return the 0-dim tensors whose values :meth:`take` gets."""
        of_terms = [
            [term.value, *(x for each in term.arrived for x in each)] for term in self.terms
        ]
        return [self.loss, *(one for each in of_terms for one in each)]

    def take(self, values: Sequence[float], expected: float) -> bool:
        """Note coefficients, and whether they say something: if every loss scale is finite.

        ``expected``: the gradient of a right term without a loss scale.
        """
        left = iter(values)
        self.read, self.loss_scales = next(left), []
        for term in self.terms:
            term.read, term.coefficients = next(left), []
            for arrived in term.arrived:
                gradient, *scales = (next(left) for _ in arrived)
                unit = math.prod(scales, start=expected)
                term.coefficients.append(gradient / unit if unit else math.nan)
                # A gradient that overflows under a loss scale is the optimizer's to skip.
                self.loss_scales += (
                    scales if math.isfinite(gradient) else [math.nan for _ in scales]
                )
        return all(math.isfinite(scale) and scale for scale in self.loss_scales)

    def is_right(self, coefficient: float) -> bool:
        """Whether a coefficient is the one that the call declares."""
        parts = [self.loss, *(term.value for term in self.terms)]
        tolerance = max(LEAST, *(torch.finfo(part.dtype).eps for part in parts))
        return is_near(coefficient, self.line.coefficient, tolerance)

    def difference(self) -> float:
        """Return how far the loss is from the sum of its terms, relative; 0 if it is not known."""
        is_changed = self.line.version != self.loss._version or any(
            one.term.version != one.value._version or len(one.coefficients) > 1
            for one in self.terms
        )
        products = [term.read * c for term in self.terms for c in term.coefficients]
        scale = abs(self.read) + sum(map(abs, products))
        if is_changed or not (math.isfinite(scale) and scale):
            return 0.0
        return abs(self.read - math.fsum(products)) / scale

    def is_sum(self) -> bool:
        """Whether the loss is the sum of its terms, as far as that is known."""
        rounding = 8 * torch.finfo(self.loss.dtype).eps
        return self.difference() <= max(_VALUE_TOLERANCE, rounding)


def calls_of(log: StepLog, num_microbatches: int) -> list[Call]:
    """Return the calls of loss_func that train tokens, each with the terms that were made in it.

    A term is of the call that returned next for its microbatch, or for the same sequences: another
    mask over them. One that was recomputed, or made after that call, is of the latest.
    """
    calls: list[Call] = []
    of_sequences: dict[bytes, list[tuple[int, Call]]] = {}
    for number, line in enumerate(log.returned):
        assert line.loss is not None
        call = Call(number % num_microbatches, line, line.loss)
        of_sequences.setdefault(line.known.sequences.tobytes(), []).append((number, call))
        calls += [call] if line.known.counted_tokens else []
    for line in log.lines:
        numbered, returned = of_sequences.get(line.known.sequences.tobytes(), []), line.number
        for term in line.terms:
            before = [one for one in numbered if one[0] < term.num_returned]
            after = numbered[len(before) :]
            if returned is None and after:
                returned = after[0][0]
            is_returned = returned is not None and returned < term.num_returned
            is_of_latest = before and (is_returned or term.is_recomputed)
            if term.value is None or not (is_of_latest or after):
                continue
            number, call = before[-1] if is_of_latest else after[0]
            is_own = term.aggregation == log.aggregation
            trained = TrainedTerm(term, term.value, is_own, is_returned and not term.is_recomputed)
            for num_returned, arrived in term.arrived:
                if term.is_recomputed or number < num_returned:
                    trained.arrived.append(arrived)
                else:  # loss_func still ran: torch.autograd.grad
                    trained.arrives_early = True
            call.terms.append(trained)
    return calls


def fault_of(call: Call) -> str:
    """Say what is wrong with a call's coefficients, empty if nothing is."""
    each_own = [term.coefficients for term in call.terms if term.is_own]
    right = [sum(map(call.is_right, each)) for each in each_own]
    trained = [
        (one.term.aggregation, one.term.losses) for one in call.terms if any(one.coefficients)
    ]
    if max(right, default=0) > 1 or any(one in trained[:i] for i, one in enumerate(trained)):
        return (
            f"losses of sequences {first_few(call.line.known.sequences)} were trained twice in "
            f"call {call.number} of loss_func: reduce each tensor once under an aggregation, and "
            "let one backward pass reach it"
        )
    own = [c for each in each_own for c in each]
    if any(right) or (own and not any(own) and call.is_sum()):
        return ""
    if not any(own):
        return (
            f"the loss of call {call.number} of loss_func is {call.read:.6g}, and its "
            "partial loss arrived in the backward pass with the coefficient 0: pass mb.outputs "
            "what mb.reduce made"
        )
    got = " and ".join(dict.fromkeys(f"{c:.6g}" for c in own))
    return (
        f"the partial loss of call {call.number} of loss_func arrived in the backward pass "
        f"with the coefficient {got}, expected {call.line.coefficient:g}: divide it by nothing "
        "and multiply it by nothing, for K compensates what Megatron does; return all three of "
        "mb.outputs from loss_func as they are, (loss, num_tokens, report), and let Megatron's "
        "schedule run the backward pass. A coefficient that is meant is declared: "
        f"mb.outputs(loss, coefficient={own[0]:.6g})"
    )


def warn_of(call: Call) -> None:
    """Warn, once per process, of a loss that has more than its terms."""
    if not call.is_sum():
        warn_once(
            "a loss that is not the sum of its terms",
            f"the loss of call {call.number} of loss_func is {call.read:.6g}, which differs "
            f"by {call.difference():.2g} of it from the sum of its partial losses: a term that "
            "mb.reduce did not make is weighted by no aggregation, and its gradient depends on "
            "the parallelism; ignore this if that is meant",
        )
    is_early = any(term.arrives_early for term in call.terms)
    if is_early or any(len(term.coefficients) > 1 for term in call.terms):
        warn_once(
            "a partial loss that arrives again",
            f"a partial loss of call {call.number} of loss_func was reached by more than "
            "one backward pass: what torch.autograd.grad returns is not trained, but a second "
            "loss.backward() is",
        )


class GradientAudit(Guard):
    """Ask with which coefficient each partial loss arrived.

    In each call of loss_func that trains tokens, a partial loss under the step's own aggregation
    arrives with the coefficient 1, or the one that ``mb.outputs(..., coefficient=)`` declares. None
    arrives so twice, and no tensor is trained twice under one aggregation. Other terms may have
    any coefficient. A call may have the coefficient 0 if its loss is 0 too. The tolerance is 1e-5,
    or the rounding of the loss's dtype.

    It warns if a returned loss is not the sum of its terms: it has one that no reducer made; and
    if the loss scale changes inside the step.
    """

    catches = (
        "a loss that is divided by M or CP, multiplied, detached, dropped, trained twice, made "
        "without mb.reduce, or scaled by a schedule that is not Megatron's; as a warning, a "
        "loss scale that changes inside the step"
    )
    costs = "two scalars kept for each partial loss; with a loss scale, its product"

    def __init__(self) -> None:
        self._refused: list[Line] = []
        """Microbatches of which it was warned when they were returned."""
        self._first: Call | None = None
        """The first call whose coefficients were read."""
        self._loss_scales: set[float] = set()

    @classmethod
    def of(cls, step: StepFacts) -> GradientAudit:
        """Make it, and let the log note gradients."""
        step.log.loss_scale = partial(getattr, step.config, "grad_scale_func")
        return cls()

    def on_unusual_outputs(self, step: StepFacts, line: Line, loss: Tensor) -> None:
        """Refuse immediately a loss without a reducer or a gradient."""
        self._refused.append(line)
        has_tokens = line.known.counted_tokens > 0
        if has_tokens and not (line.is_reduced and line.number is None):
            raise ContractError(
                "mb.reduce was not called under the step's aggregation in this microbatch: call "
                "step.microbatch anew for each microbatch, and make the loss with its reduce"
            )
        # Without gradients a checkpoint may run, which recomputes the loss in the backward pass.
        may_recompute = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        may_lack_it = step.forward_only or loss.requires_grad or may_recompute
        own = (one for one in line.terms if one.aggregation == step.plan.aggregation)
        if not may_lack_it and (has_tokens or any(one.has_gradient for one in own)):
            raise ContractError(
                "got a loss that requires no gradient in a training step, so that nothing would "
                "be trained: do not detach it, call mb.reduce outside no_grad and inference_mode, "
                "let a custom reducer keep its graph, or pass forward_only=True"
            )
        self._refused.pop()

    def on_finish(self, step: StepFacts) -> str:
        """Name a call whose loss nothing reached; leave the coefficients to be read."""
        if not step.trains:
            return ""
        calls = calls_of(step.log, step.scaling.num_microbatches)
        calls = [call for call in calls if call.line not in self._refused]
        for call in calls:
            for term in call.terms:
                if term.is_late and term.arrived:
                    sequences = first_few(call.line.known.sequences)
                    return (
                        f"losses of sequences {sequences} were reduced after "
                        "loss_func had returned for them, and trained: call step.microbatch anew "
                        "for each microbatch, and make the loss with its reduce"
                    )
            if not any(term.arrived for term in call.terms if term.is_own):
                return (
                    f"no gradient reached the step's own partial loss in call {call.number} of "
                    "loss_func: pass mb.outputs what mb.reduce made, and let the schedule run its "
                    "backward pass"
                )
        expected = step.scaling.k * step.scaling.schedule_factor
        for call in calls:
            describe = partial(self._describe, call, expected)
            step.plan.state.faults.record(
                call.tensors(), describe, error=ContractError, guard=self.name
            )
        return ""

    def recorded(self) -> Mapping[str, Any]:
        """Return the coefficients of the first call of loss_func, in the order of its terms."""
        terms = self._first.terms if self._first else []
        return {"coefficients": [float(f"{c:.6g}") for one in terms for c in one.coefficients]}

    def _describe(self, call: Call, expected: float, values: list[float]) -> str:
        if not call.take(values, expected):
            return ""
        self._first = self._first or call
        self._loss_scales.update(call.loss_scales)
        if fault := fault_of(call):
            return fault
        warn_of(call)
        if len(self._loss_scales) > 1:
            warn_once(
                "a loss scale that changes",
                f"the loss scale was {min(self._loss_scales):g} and {max(self._loss_scales):g} in "
                "one step, so that its microbatches are not weighted as configured: change "
                "config.grad_scale_func between steps",
            )
        return ""
