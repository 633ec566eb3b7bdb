"""The loss of an evaluation that runs with gradients: it is detached, and nothing trains it."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.faults import warn_once


def without_gradient(loss: Tensor) -> Tensor:
    """Detach the loss of a step with ``forward_only=True``; say so once per process."""
    warn_once(
        "a gradient in an evaluation",
        "a step with forward_only=True got a loss that requires a gradient, and detached it: run "
        "evaluations under torch.no_grad(), which keeps no activations",
    )
    return loss.detach()


def refuse_training(num_tokens: Tensor | None) -> NoReturn:
    """Raise :class:`ContractError`: gradients of such a step are finalized."""
    raise ContractError(
        "the schedule trains in a step with forward_only=True, which detached its losses: pass "
        "the schedule forward_only=True too, or begin a training step"
    )
