"""With which coefficient each partial loss arrived in the backward pass.

In a right step the gradient that reaches a partial loss is exactly K times the schedule's factor
times the loss scale. Divided by these it is the coefficient with which the loss was trained::

    c = gradient / (K * schedule factor * loss scale)

A loss that was multiplied, detached, dropped, trained twice or made by other means shows in c,
whoever did it and wherever: in loss_func, in the schedule, or between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.coefficients import Call, calls_of, fault_of, warn_of
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import first_few
from megatron_lossagg.reduction.step_state import Line


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
