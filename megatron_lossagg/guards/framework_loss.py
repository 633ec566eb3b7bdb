"""Whether a framework's own loss is the masked sum that the schedule hook trains instead."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.faults import Faults

__all__ = ["compare_graphs", "compare_with_framework"]

_CHANGE = "and they would be lost; train it without the flags of --loss-aggregation"


def compare_graphs(
    found: Tensor, losses: Tensor, *, output: GradientEdge, faults: Faults, microbatch: int
) -> None:
    """Look for a parameter that the framework's loss reaches and the losses do not.

    A term that has it is not known, however small its value is; a term times 0 is none. ``found``:
    the framework's loss. ``losses``: of the tokens. ``output``: what the model returned, past which
    nothing is looked at. Host only: the graph between both is walked.
    """
    known = set(_nodes(losses, {output.node}))
    for node in _nodes(found, {output.node, *known}):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            describe = functools.partial(_reaches_more, microbatch, list(leaf.shape))
            faults.record([], describe)
            return


def _reaches_more(microbatch: int, shape: list[int], values: list[float]) -> str:
    return (
        f"the script's loss_func gave a loss for microbatch {microbatch} of rank "
        f"{dist.get_rank()} that reaches a parameter of shape {shape} not by the model's output: "
        "it has terms that are not known here (a penalty of weights, a distillation loss), "
        f"{_CHANGE}"
    )


def _nodes(root: Tensor, stop: set[Any]) -> Iterator[Any]:
    """Yield the nodes of a tensor's graph up to ``stop``, and without what is multiplied by 0."""
    seen: set[Any] = {*stop, None}
    todo: list[Any] = [root.grad_fn]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if not (_is_zero(node, "_saved_self") or _is_zero(node, "_saved_other")):
                todo += [parent for parent, _ in node.next_functions]


def _is_zero(node: Any, name: str) -> bool:
    """Whether a factor that a node has saved is the number 0, read without a host sync."""
    try:
        factor = getattr(node, name, None) if node.name() == "MulBackward0" else None
        return (
            isinstance(factor, Tensor)
            and factor.is_cpu
            and factor.numel() == 1
            and not factor.item()
        )
    except RuntimeError:  # changed in place
        return False


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
    output if there is one.
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
    of_gradients = f", and their gradients differ by {difference:.3g} of {gradient:.3g}"
    return (
        f"the script's loss_func gave {found:.6g} for microbatch {microbatch} of rank "
        f"{dist.get_rank()}, the masked sum of its per-token losses is {ours:.6g}"
        f"{of_gradients if gradients else ''}: it has terms or factors that are not known here (a "
        f"distillation loss, a penalty, a coefficient), {_CHANGE}"
    )
