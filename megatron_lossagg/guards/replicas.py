"""Do tensor-parallel ranks, which hold the same tokens, train them alike?

Their counts are the first one's. Their masks are each rank's own, and a generator that drops tokens
may be in another state on each.

Shape suffix: W = ranks of the tensor-parallel group.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.exchange import TP_RANK, Exchange
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.step_state import Line, Term
from megatron_lossagg.weigh.listen import weights_of

_ALIKE = "of tensor-parallel ranks {} and {}, which hold the same tokens, differ"
_KINDS = (
    (0.0, f"the loss masks {_ALIKE}: pass the same mask; draw what is random from a shared state"),
    (1e-4, f"the weights {_ALIKE}: pass the same sequences and token weights"),
    (1e-4, f"the gradients {_ALIKE} at the model's losses: multiply losses by the same factors"),
)
"""Of each sum: how much it may differ, relative, and what it means if it does."""


class Replicas(Guard):
    """Compare what tensor-parallel ranks train, in the steps in which ``Outcome`` looks.

    Three sums over the step's tokens t, in float64: t of those that a mask keeps, t times abs(w_t),
    and t times the absolute gradient at a loss per token that the model returned.
    """

    catches = (
        "at TP > 1, in the steps in which `Outcome` looks: masks, weights, or factors of losses "
        "that the model returns, which differ between tensor-parallel ranks; a rank that failed "
        "by itself"
    )
    costs = (
        "in these steps passes over the tokens and one all-gather of 32 bytes over the "
        "tensor-parallel group"
    )

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._weights: list[Tensor] = []

    @classmethod
    def of(cls, step: StepFacts) -> Replicas | None:
        """Make it at TP > 1 for a training step that is weighed, where loss_func runs."""
        looks = step.is_weighed and step.groups.is_last_stage
        return cls() if looks and Exchange(step.groups.tp_group).size > 1 else None

    def on_term(
        self, step: StepFacts, line: Line, term: Term, losses: Tensor, microbatch: Microbatch
    ) -> None:
        """Note which tokens a term trains, and their weights."""
        if not term.can_be_trained:
            return
        self._kept.append(microbatch.keep)
        if microbatch.custom is None:
            dtype = torch.promote_types(losses.dtype, torch.float32)
            self._weights.append(microbatch.weights(dtype, losses.device))

    def together(self, step: StepFacts, *, has_failed: bool) -> None:
        """Leave in the plan's faults what the ranks trained otherwise.

        ``has_failed``: whether this rank ends the step with an error anyway, which the others then
        raise too. One all-gather over the tensor-parallel group, every rank of which calls; no
        host sync.
        """
        heard = [line.heard[line.num_early :] for line in step.log.lines]
        gradients = [weights_of(arrived, 1.0, torch.float64) for arrived in heard if arrived]
        sums = [_by_position(kind) for kind in (self._kept, self._weights, gradients)]
        device = sums[1].device  # of the losses, if a mode weighed some
        own = torch.full((), float(has_failed), dtype=torch.float64, device=device)
        own = torch.stack([own, *(moved(one, device) for one in sums)])
        gathered_W4 = Exchange(step.groups.tp_group).tensors(own)
        step.plan.state.faults.record([*gathered_W4.reshape(-1)], _describe, guard=self.name)


def _by_position(found: list[Tensor]) -> Tensor:
    """Sum t times abs(x_t) over all tensors, whose tokens are numbered on from 1: 0-dim."""
    if not found:
        return torch.zeros((), dtype=torch.float64)
    x_T = torch.cat([moved(one.reshape(-1), found[0].device) for one in found]).double().abs()
    return x_T @ torch.arange(1, len(x_T) + 1, dtype=x_T.dtype, device=x_T.device)


def _describe(values: list[float]) -> str:
    """Say what differs; read where this rank has not failed, which raises its own error."""
    failed_W, *sums = np.reshape(values, (-1, 4)).T
    if failed_W.any():
        return f"{TP_RANK.format(int(failed_W.argmax()))} ended the step with an error"
    for (tolerance, message), sum_W in zip(_KINDS, sums, strict=True):
        if sum_W.max() - sum_W.min() > tolerance * sum_W.max():
            return message.format(*sorted((int(sum_W.argmin()), int(sum_W.argmax()))))
    return ""
