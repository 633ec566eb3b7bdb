"""Whether a framework's own loss is the masked sum that the schedule hook trains instead."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.faults import Faults

__all__ = ["compare_with_framework"]


def compare_with_framework(
    found: Tensor,
    losses: Tensor,
    mask: Tensor,
    token_weights: Tensor | None,
    *,
    output: GradientEdge | None,
    faults: Faults,
    microbatch: int,
) -> None:
    """Compare the framework's loss with the masked sum, and their gradients at ``output``.

    ``found``: the framework's loss, 0-dim. ``losses``, ``mask``, ``token_weights``: of a
    microbatch, in the same order. ``output``: what the model returned; None to compare no
    gradients. ``faults`` are read later. No collective, no host sync; two backward passes up to the
    output.
    """
    mask = moved(mask, losses.device)
    factor = mask if token_weights is None else moved(token_weights, mask.device)
    terms = torch.where(mask != 0, losses, 0) * factor.float()
    ours = terms.sum()
    # A copy: under a shadow Megatron divides the framework's own loss in place.
    values = [found.clone(), ours, terms.abs().sum()]
    if output is not None and ours.requires_grad:
        for loss in (found - ours, ours):
            (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
            values.append(ours.new_zeros(()) if gradient is None else gradient.abs().sum())
    faults.record(values, functools.partial(_more_than_sum, microbatch))


def _more_than_sum(microbatch: int, values: list[float]) -> str:
    found, ours, scale, *gradients = values
    # A product keeps an inf at a masked position; a loss that is not finite is found elsewhere.
    if not math.isfinite(found + scale):
        return ""
    difference, gradient = gradients or (0.0, 0.0)
    if abs(found - ours) <= 1e-4 * scale and difference <= 1e-4 * gradient:
        return ""
    return (
        f"the script's loss_func gave {found:.6g} for microbatch {microbatch} of rank "
        f"{dist.get_rank()}, the masked sum of its per-token losses is {ours:.6g}, and their "
        f"gradients differ by {difference:.3g} of {gradient:.3g}: it has terms "
        "or factors that are not known here (a distillation loss, a penalty, a coefficient), and "
        "they would be lost; train it without the flags of --loss-aggregation"
    )
