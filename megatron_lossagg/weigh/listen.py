"""Listen at a tensor: which gradients arrive there in the backward pass, and whether it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor


def is_in_backward() -> bool:
    """Whether a backward pass runs, so that what is called now is a recomputation."""
    return bool(torch._C._current_graph_task_id() >= 0)


class Keeps(Protocol):
    """A list of gradients, or what keeps them as one does."""

    def append(self, gradient: Tensor, /) -> None:
        """Keep a gradient."""


def listen(tensor: Tensor, arrived: Keeps) -> bool:
    """Append to ``arrived`` a copy of each gradient that arrives at a tensor with a graph.

    Whatever is done to the tensor in place afterwards, and not what ``torch.autograd.grad`` is
    asked for there, which trains nothing: the hook is the node's that made it. Returns whether it
    has such a node. No host sync.
    """
    node = tensor.grad_fn
    if node is not None:
        node.register_prehook(partial(_keep, arrived, tensor.output_nr))
    return node is not None


def _keep(arrived: Keeps, number: int, gradients: Sequence[Tensor | None]) -> None:
    gradient = gradients[number]
    if gradient is not None:
        arrived.append(gradient.detach().clone())
