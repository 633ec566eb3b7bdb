"""Whether a framework's own loss is the masked sum that the schedule hook trains instead.

Both functions return 0-dim results on the device and what they mean, which the hook records.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.faults import Describe
from megatron_lossagg.weigh.listen import nodes_below

_AT_ONCE = 16
"""Parameters whose gradients are computed, and in memory, at once."""
_CHANGE = "and they would be lost; train it without the flags of --loss-aggregation"


def compare_graphs(
    found: Tensor, losses: Tensor, *, output: GradientEdge
) -> tuple[list[Tensor], Describe]:
    """Look for a parameter that gets a gradient of the framework's loss and none of the losses.

    A term that gives it is not known, however small its value is. ``found``: the framework's loss.
    ``losses``: of the tokens. ``output``: what the model returned, past which nothing is looked at.
    No host sync; if the loss reaches such a parameter, a backward pass from it to there, never
    through ``output``, which may communicate.
    """
    known = set(nodes_below(losses.grad_fn, [output.node]))
    leads: dict[Tensor, list[tuple[Any, int]]] = {}
    for node in nodes_below(found.grad_fn, [output.node, *known]):
        for place, (parent, _) in enumerate(node.next_functions):
            leaf = getattr(parent, "variable", None)
            if isinstance(leaf, torch.nn.Parameter) and parent not in known:
                leads.setdefault(leaf, []).append((node, place))
    described = [(list(leaf.shape), _unknown(of_leaf)) for leaf, of_leaf in leads.items()]
    values = []
    stop = output.node.register_prehook(_refuse_to_run)
    try:
        if leads:
            reached = torch.stack([*_reached(found, list(leads.items()))])
            values = [reached.any(), reached.int().argmax()]
    except Exception as error:  # of any type: operations of the script run
        described = [
            (shape, f" Its gradient could not be computed: {error!r}.") for shape, _ in described
        ]
    finally:
        stop.remove()
    return values, functools.partial(_reaches_more, described)


def _unknown(nodes: list[tuple[Any, int]]) -> str:
    """Say which of the nodes that lead to a parameter are not called; empty if all are."""
    names = {node.name() for node, _ in nodes if not callable(node)}
    return f" What {', '.join(names)} passes on to it was not computed." if names else ""


def _reached(found: Tensor, leads: list[tuple[Tensor, list[tuple[Any, int]]]]) -> Iterator[Tensor]:
    """Yield for each parameter whether it gets a gradient by the nodes that lead to it."""
    for start in range(0, len(leads), _AT_ONCE):
        part = leads[start : start + _AT_ONCE]
        nodes = list(dict.fromkeys(node for _, of_leaf in part for node, _ in of_leaf))
        edges = [GradientEdge(node, i) for node in nodes for i in range(_num_outputs(node))]
        given = iter(torch.autograd.grad(found, edges, retain_graph=True, allow_unused=True))
        arriving = {node: [*islice(given, _num_outputs(node))] for node in nodes}
        for leaf, of_leaf in part:
            passed = [_passed_on(node, place, arriving[node], leaf) for node, place in of_leaf]
            yield (functools.reduce(torch.add, passed).abs() > 0).any()


def _num_outputs(node: Any) -> int:
    return len(node._input_metadata)  # of what a backward pass gives it


@torch.no_grad()
def _passed_on(node: Any, place: int, arriving: Sequence[Tensor | None], leaf: Tensor) -> Tensor:
    """Return what a node passes on to a leaf, without its hooks.

    What a ``torch.autograd.Function`` does there is not known (Megatron's linear layers write into
    ``main_grad``): of one that gets a gradient, the sum of what it gets.
    """
    none = torch.zeros((), device=leaf.device)
    given = [one for one in arriving if one is not None]
    if not callable(node):
        return sum((one.abs().sum() for one in given), none)
    passed = node(*arriving) if given else None
    gradient = passed[place] if isinstance(passed, tuple) else passed
    return none if gradient is None else gradient.sum_to_size(leaf.shape)


def _refuse_to_run(_: Any) -> None:
    raise RuntimeError("the model's backward pass would run")


def _reaches_more(described: list[tuple[list[int], str]], values: list[float]) -> str:
    is_reached, first = values or (1.0, 0.0)
    if not (described and is_reached):
        return ""
    shape, unknown = described[int(first)]
    return (
        f"the script's loss_func gave a loss that reaches a parameter of shape {shape} not by the "
        "model's output: it has terms that are not known here (a penalty of weights, a "
        f"distillation loss), {_CHANGE}.{unknown}"
    )


def compare_with_framework(
    found: Tensor,
    losses: Tensor,
    mask: Tensor,
    token_weights: Tensor | None,
    *,
    output: GradientEdge | None,
) -> tuple[list[Tensor], Describe]:
    """Compare the framework's loss with the masked sum, and their gradients at ``output``.

    ``found``: the framework's loss, 0-dim. ``losses``, ``mask``, ``token_weights``: of a
    microbatch, in the same order. ``output``: what the model returned; None to compare no
    gradients. No collective, no host sync; two backward passes up to the output if there is one.
    """
    mask = moved(mask, losses.device)
    factor = mask if token_weights is None else moved(token_weights, mask.device)
    terms = torch.where(mask != 0, losses, 0) * factor.float()
    ours = terms.sum()
    # A copy: under a shadow Megatron divides the framework's own loss in place.
    values = [found.clone(), ours, terms.abs().sum()]
    if output is not None and ours.requires_grad:
        with suppress(RuntimeError):  # a reentrant checkpoint lets no one ask for gradients
            values += [_arriving(loss, output) for loss in (found - ours, ours)]
    return values, _more_than_sum


def _arriving(loss: Tensor, output: GradientEdge) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
    return loss.new_zeros(()) if gradient is None else gradient.abs().sum()


def _more_than_sum(values: list[float]) -> str:
    found, ours, scale, *gradients = values
    # A product keeps an inf at a masked position; a loss that is not finite is found elsewhere.
    if not math.isfinite(found + scale):
        return ""
    difference, gradient = gradients or (0.0, 0.0)
    if abs(found - ours) <= 1e-4 * scale and difference <= 1e-4 * gradient:
        return ""
    of_gradients = f", and their gradients differ by {difference:.3g} of {gradient:.3g}"
    return (
        f"the script's loss_func gave {found:.6g}, the masked sum of its per-token losses is "
        f"{ours:.6g}{of_gradients if gradients else ''}: it has terms or factors that are not "
        f"known here (a distillation loss, a penalty, a coefficient), {_CHANGE}"
    )
