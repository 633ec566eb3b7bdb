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
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.coefficients import Call, Term, fault_of, warn_of
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import first_few
from megatron_lossagg.reduction.reducer import Reducer
from megatron_lossagg.weigh.listen import is_in_backward


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
    costs = "one hook and two scalars kept for each partial loss; with a loss scale, its product"

    def __init__(self) -> None:
        self._reduced: dict[object, bool] = {}
        """Microbatches reduced under the step's own aggregation: do losses require a gradient?"""
        self._pending: list[Term] = []
        """Terms for whose microbatch loss_func has not returned."""
        self._returned: set[object] = set()
        """The microbatches for which it has."""
        self._calls: list[Call] = []
        self._first: Call | None = None
        """The first call whose coefficients were read."""
        self._loss_scales: set[float] = set()

    def on_reduce(
        self, step: StepFacts, reducer: Reducer, losses: Tensor, partial_loss: Tensor
    ) -> None:
        """Hook a partial loss that can be trained."""
        microbatch, aggregation = reducer.microbatch.identity, reducer.plan.aggregation
        is_own = aggregation == step.plan.aggregation
        is_returned, is_recomputed = microbatch in self._returned, is_in_backward()
        if is_own and not is_returned:
            can_be_trained = self._reduced.get(microbatch, False) or losses.requires_grad
            self._reduced[microbatch] = can_be_trained
        if step.forward_only or not partial_loss.requires_grad:
            return
        value = partial_loss.detach()
        term = Term(
            microbatch=microbatch,
            sequences=reducer.sequences,
            aggregation=aggregation,
            is_own=is_own,
            is_late=is_returned and not is_recomputed,
            losses=_which(losses),
            value=value,
            version=value._version,
        )
        call = self._call_of(term) if is_recomputed or is_returned else None
        (self._pending if call is None else call.terms).append(term)
        scale = step.config.grad_scale_func

        def arrived(gradient: Tensor) -> None:
            if not (is_recomputed or microbatch in self._returned):
                term.arrives_early = True  # loss_func still runs: torch.autograd.grad
                return
            scales = () if scale is None else (scale(torch.ones_like(gradient)).reshape(()),)
            term.arrived.append((gradient.detach(), *scales))

        partial_loss.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _call_of(self, term: Term) -> Call | None:
        """Return the latest call of loss_func for a term's microbatch or sequences."""
        calls = reversed(self._calls)
        return next((call for call in calls if term.is_of(call.microbatch, call.sequences)), None)

    def on_outputs(
        self, step: StepFacts, reducer: Reducer, loss: Tensor, coefficient: float
    ) -> None:
        """Refuse immediately a loss without a reducer or a gradient; note what its terms are."""
        microbatch, sequences = reducer.microbatch.identity, reducer.sequences
        can_be_trained = self._reduced.pop(microbatch, None)
        has_tokens = reducer.counted_tokens > 0
        if can_be_trained is None and has_tokens:
            raise ContractError(
                "mb.reduce was not called under the step's aggregation in this microbatch: call "
                "step.microbatch anew for each microbatch, and make the loss with its reduce"
            )
        self._check_gradient(step, loss, must_train=has_tokens or bool(can_be_trained))
        if step.forward_only:
            return
        terms: list[Term] = []
        pending, self._pending = self._pending, []
        self._returned.add(microbatch)
        for term in pending:
            if term.is_of(microbatch, sequences):
                terms.append(term)
                self._returned.add(term.microbatch)
            else:
                self._pending.append(term)
        if has_tokens:
            value = loss.detach()
            call = Call(
                number=step.tracker.num_calls,
                microbatch=microbatch,
                sequences=sequences,
                coefficient=coefficient,
                loss=value,
                version=value._version,
                terms=terms,
            )
            self._calls.append(call)

    @staticmethod
    def _check_gradient(step: StepFacts, loss: Tensor, *, must_train: bool) -> None:
        # Without gradients a checkpoint may run, which recomputes the loss in the backward pass.
        may_recompute = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        if step.forward_only or loss.requires_grad or may_recompute or not must_train:
            return
        raise ContractError(
            "got a loss that requires no gradient in a training step, so that nothing would "
            "be trained: do not detach it, call mb.reduce outside no_grad and inference_mode, "
            "let a custom reducer keep its graph, or pass forward_only=True"
        )

    def on_finish(self, step: StepFacts) -> str:
        """Name a call whose loss nothing reached; leave the coefficients to be read."""
        if not step.trains:
            return ""
        for call in self._calls:
            for term in call.terms:
                if term.is_late and term.arrived:
                    return (
                        f"losses of sequences {first_few(term.sequences)} were reduced after "
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
        for call in self._calls:
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


def _which(losses: Tensor) -> tuple[Any, ...]:
    """Say which tensor this is: freed addresses come back, a weak reference does not."""
    storage = StorageWeakRef(losses.untyped_storage())  # type: ignore[no-untyped-call]
    shape, stride = tuple(losses.shape), losses.stride()
    return storage, losses.storage_offset(), shape, stride, losses._version
