"""Whether losses were divided by a count of their microbatch before they were reduced.

A ported loss_func may do so still; the weights hold every denominator.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron_lossagg.guards.loss_graph import nodes_of
from megatron_lossagg.reduction.faults import first_time, warn_once
from megatron_lossagg.reduction.reducer import Reducer

__all__ = ["warn_of_divided_losses"]


def warn_of_divided_losses(reducer: Reducer, losses: Tensor) -> None:
    """Look at the graph of the first losses of a process; two host syncs, once, if they divide.

    What is saved for the backward pass is not read where a checkpoint or an offload packs it.
    """
    if not reducer.counted_tokens:
        return
    if not first_time("the graph of losses"):
        return
    _compare(reducer, {float(one) for one in _divisors(losses)} - {1.0})


def _compare(reducer: Reducer, divisors: set[float]) -> None:
    if not divisors:
        return
    counts = {float(reducer.counted_tokens), float(reducer.microbatch.keep.sum())}
    for count in divisors & counts:
        warn_once(
            "divided losses",
            f"losses were divided by {count:g}, the active tokens of their microbatch, "
            "before mb.reduce: pass it losses per token, which are divided by nothing, for the "
            "weights hold every denominator; ignore this if that is meant",
        )


def _divisors(losses: Tensor) -> Iterator[Tensor]:
    """Yield what losses were divided by, if it is one number."""
    for kind, node in nodes_of(losses, by_numbers=False):
        saved = getattr(node, "_saved_other", None) if kind == "Div" else None
        if isinstance(saved, Tensor) and saved.numel() == 1:
            yield saved.detach()
