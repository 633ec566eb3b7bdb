"""From which tensors losses follow token by token, by the graph that torch keeps of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

_FOLLOWED = {
    *("Alias", "Clone", "Div", "Expand", "Mul", "Neg", "ReshapeAlias", "Slice", "Squeeze"),
    *("ToCopy", "Unsqueeze", "UnsafeView", "View", "Where"),
}
"""Operations that keep a loss per token, by their names in the graph, unless they broadcast."""
_MOST_NODES = 16
_UNREAD = object()
"""Stands for what was saved and is not read."""


def nodes_of(made: Any, num_losses: int, *, by_numbers: bool) -> Iterator[tuple[str, Any]]:
    """Yield the nodes from which losses follow token by token, and the name of each.

    ``made``: the node that made them. ``by_numbers``: each of their factors is one number; one that
    is not read is taken for others. No host sync.
    """
    nodes, looked_at = [made], 0
    while nodes and looked_at < _MOST_NODES:
        node, looked_at = nodes.pop(0), looked_at + 1
        if node is None:
            continue
        if math.prod(node._input_metadata[0].shape) < num_losses:  # it is broadcast later
            continue
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        yield kind, node
        if kind not in _FOLLOWED or (by_numbers and _has_a_factor_per_token(node)):
            continue
        nodes += [one for one, _ in node.next_functions]


def divisors_of(losses: Tensor) -> list[Tensor]:
    """Return what losses were divided by, if it is one number: 0-dim. No host sync."""
    found = nodes_of(losses.grad_fn, losses.numel(), by_numbers=False)
    nodes = [node for kind, node in found if kind == "Div"]
    saved = [_saved(node, "other") for node in nodes]
    return [
        one.detach().reshape(()) for one in saved if isinstance(one, Tensor) and one.numel() == 1
    ]


def _has_a_factor_per_token(node: Any) -> bool:
    saved = [_saved(node, name) for name in ("self", "other")]
    return any(one is _UNREAD or (isinstance(one, Tensor) and one.numel() > 1) for one in saved)


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved for its backward pass under a name; None if nothing.

    Or ``_UNREAD``: what a hook has packed (of a checkpoint or an offload), for to unpack it may run
    the model or free it; what was freed; and all that is saved if torch does not say whether it was
    packed. Only ``_raw_saved_*`` says it, from torch 2.13 on; a public name does not exist. Without
    it less is looked at, and nothing else is concluded.
    """
    if not hasattr(type(node), f"_saved_{name}"):
        return None
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)
        packed = getattr(raw, "unpack_hook", _UNREAD)
        return _UNREAD if packed is not None else getattr(node, f"_saved_{name}")
    except RuntimeError:
        return _UNREAD
