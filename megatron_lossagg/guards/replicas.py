"""Do tensor-parallel ranks, which hold the same tokens, train them alike?

Their counts are the first one's. Their masks are each rank's own, and a generator that drops tokens
may be in another state on each.

Shape suffixes: W = ranks of the tensor-parallel group; T = tokens.
"""

from __future__ import annotations

from collections import defaultdict

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
    (1e-4, f"the weights {_ALIKE}: pass the same sequences, token weights and coefficients"),
    (1e-4, f"the gradients {_ALIKE} at the model's losses: multiply losses by the same factors"),
)
"""Of each sum: how much it may differ, relative, and what it means if it does."""


class Replicas(Guard):
    """Compare what tensor-parallel ranks train, in the steps in which ``Outcome`` looks.

    Three sums over the step's tokens t, of terms that a gradient reached: t^2 of those that a mask
    keeps, in integers; and in float64 t times w_t times the gradient at the partial loss, and t
    times the gradient at a loss per token that the model returned. A value x below 0 counts as
    -2 x, so that nothing cancels and a sign shows.
    """

    catches = (
        "at TP > 1, in the steps in which `Outcome` looks: masks, weights, or factors of losses "
        "that the model returns, which differ between tensor-parallel ranks; a rank that failed "
        "by itself"
    )
    costs = (
        "in these steps the mask and the weights of each term until the step ends, passes over "
        "them, and one all-gather of 32 bytes over the tensor-parallel group"
    )

    def __init__(self) -> None:
        self._terms: defaultdict[Line, list[tuple[Term, Tensor, Tensor]]] = defaultdict(list)
        """Of each microbatch those that may be trained, with what their masks keep and weights."""

    @classmethod
    def of(cls, step: StepFacts) -> Replicas | None:
        """Make it at TP > 1 for a training step that is weighed, where loss_func runs."""
        looks = step.is_weighed and step.groups.is_last_stage
        return cls() if looks and Exchange(step.groups.tp_group).size > 1 else None

    def on_term(
        self, step: StepFacts, line: Line, term: Term, losses: Tensor, microbatch: Microbatch
    ) -> None:
        """Note which tokens a term may train, and their weights; 1 for a custom reducer."""
        if not term.can_be_trained:
            return
        weights_T = keep_T = microbatch.keep_on(losses.device)
        if microbatch.custom is None:
            dtype = torch.promote_types(losses.dtype, torch.float32)
            weights_T = microbatch.weights(dtype, losses.device)
        self._terms[line].append((term, keep_T, weights_T))

    def together(self, step: StepFacts, *, has_failed: bool) -> None:
        """Leave in the plan's faults what the ranks trained otherwise.

        ``has_failed``: whether this rank ends the step with an error anyway, which the others then
        raise too. One all-gather over the tensor-parallel group, every rank of which calls; no
        host sync.
        """
        each = ([one for one in terms if _arrived(one[0])] for terms in self._terms.values())
        trained = [terms for terms in each if terms]  # others are metrics
        kept = [_added([keep_T for _, keep_T, _ in terms]) for terms in trained]
        reduced = [_added([_gradient(term) * w_T for term, _, w_T in terms]) for terms in trained]
        heard = [line.heard[line.num_early :] for line in step.log.lines]
        returned = [weights_of(arrived, 1.0, torch.float64) for arrived in heard if arrived]
        sums = [_exact(kept), _by_position(reduced), _by_position(returned)]
        device = sums[0].device
        own = torch.full((), float(has_failed), dtype=torch.float64, device=device)
        own = torch.stack([own, *(moved(one, device) for one in sums)])
        gathered_4W = Exchange(step.groups.tp_group).tensors(own).T
        faults = step.plan.state.faults
        faults.record([*gathered_4W[0]], _describe_failed)
        faults.record([*gathered_4W[1:].flatten()], _describe, guard=self.name)


def _arrived(term: Term) -> list[Tensor]:
    """Return what arrived at a partial loss after loss_func had returned: 0-dim, in float64."""
    return [
        found[0].double()
        for num_returned, found in term.arrived
        if term.is_recomputed or num_returned > term.num_returned
    ]


def _gradient(term: Term) -> Tensor:
    """Return ``_positive`` of the sum of what arrived at a partial loss: 0-dim."""
    return _positive(torch.stack(_arrived(term)).sum())


def _positive(x: Tensor) -> Tensor:
    """Return abs(x), or twice as much where x < 0: no sum cancels, and a sign shows in it."""
    return torch.where(x < 0, -2 * x, x)


def _added(of_terms: list[Tensor]) -> Tensor:
    """Add up the terms of a microbatch, which come in any order: ``[T]``, in float64."""
    return torch.stack([moved(one, of_terms[0].device).double() for one in of_terms]).sum(dim=0)


def _exact(kept: list[Tensor]) -> Tensor:
    """Sum t^2 times k_t over tensors whose tokens are numbered on from 1, modulo 2^52: 0-dim."""
    kept_T, at_T = _numbered(kept)
    return ((kept_T.long() * at_T**2).sum() % 2**52).double()


def _by_position(found: list[Tensor]) -> Tensor:
    """Sum t times ``_positive(x_t)`` over tensors, numbered likewise: 0-dim, in float64."""
    x_T, at_T = _numbered(found)
    return _positive(x_T) @ at_T.double()


def _numbered(found: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join float64 tensors; return ``[T]``, and the tokens' numbers from 1 on, in int64."""
    none = torch.zeros(0, dtype=torch.float64)
    x_T = torch.cat([moved(one, found[0].device) for one in found] or [none])
    return x_T, torch.arange(1, len(x_T) + 1, device=x_T.device)


def _describe_failed(failed_W: list[float]) -> str:
    """Name a rank that failed. A rank that failed itself raises its own error before this."""
    rank = next((rank for rank, failed in enumerate(failed_W) if failed), None)
    return "" if rank is None else f"{TP_RANK.format(rank)} ended the step with an error"


def _describe(values: list[float]) -> str:
    """Say what differs first; nothing of gradients that overflowed, whose step is skipped."""
    size = len(values) // len(_KINDS)
    for number, (tolerance, message) in enumerate(_KINDS):
        sum_W = values[number * size :][:size]
        least, most = min(sum_W), max(sum_W)
        if most - least > tolerance * most:
            return message.format(*sorted((sum_W.index(least), sum_W.index(most))))
    return ""
