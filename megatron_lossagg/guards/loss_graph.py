"""From which tensors losses follow token by token, by the graph that torch keeps of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_FOLLOWED = {
    *("Alias", "Clone", "Div", "Expand", "Mul", "Neg", "ReshapeAlias", "Slice", "Squeeze"),
    *("ToCopy", "Unsqueeze", "UnsafeView", "View", "Where"),
}
"""Operations that keep a loss per token, by their names in the graph, unless they broadcast."""
_MOST_NODES = 16


def nodes_of(losses: Tensor, *, by_numbers: bool) -> Iterator[tuple[str, Any]]:
    """Yield the nodes from which losses follow token by token, and the name of each.

    ``by_numbers``: each of their factors is one number, so that no token's is known to differ. None
    where a checkpoint or an offload packs what is saved, and none of a graph whose buffers are
    freed. No host sync.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return
    nodes, looked_at = [losses.grad_fn], 0
    with suppress(RuntimeError):
        while nodes and looked_at < _MOST_NODES:
            node, looked_at = nodes.pop(0), looked_at + 1
            if node is None:
                continue
            if math.prod(node._input_metadata[0].shape) < losses.numel():  # it is broadcast later
                continue
            kind = node.name().rstrip("0123456789").removesuffix("Backward")
            yield kind, node
            if kind not in _FOLLOWED or (by_numbers and _has_a_factor_per_token(node)):
                continue
            nodes += [one for one, _ in node.next_functions]


def divisors_of(losses: Tensor) -> list[Tensor]:
    """Return what losses were divided by, if it is one number: 0-dim. No host sync.

    What is saved for the backward pass is not read where a checkpoint or an offload packs it.
    """
    nodes = [node for kind, node in nodes_of(losses, by_numbers=False) if kind == "Div"]
    saved = [getattr(node, "_saved_other", None) for node in nodes]
    return [
        one.detach().reshape(()) for one in saved if isinstance(one, Tensor) and one.numel() == 1
    ]


def _has_a_factor_per_token(node: Any) -> bool:
    saved = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
    return any(isinstance(one, Tensor) and one.numel() > 1 for one in saved)
