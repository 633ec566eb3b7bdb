"""Finds a user's own reducer, and defines what it is given. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.user_path import resolved

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_lossagg.reduction.integers import Ints
    from megatron_lossagg.reduction.layout import Layout
    from megatron_lossagg.reduction.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class ReducerContext:
    """What a custom reducer factory is given: ``factory(context) -> Callable[[Tensor], Tensor]``.

    The callable takes this rank's per-token losses, masked positions already set to 0,
    flat in the layout's order, and returns a 0-dim additive partial loss.

    Examples:
        A mean over tokens, in the file ``my_losses.py``; in a framework
        ``--loss-aggregation-reducer-path my_losses:factory``:

        >>> def factory(context: ReducerContext):
        ...     tokens = context.plan.totals.active_tokens  # N, of all ranks and microbatches
        ...     return lambda losses: losses.sum() / tokens
        >>> aggregation = Aggregation("custom", reducer_path="my_losses:factory")
        >>> plan = plan_step(aggregation, Sequences(active_tokens=[3]))
        >>> layout = Layout.thd_zigzag([0, 4], cp_size=1, cp_rank=0)
        >>> reducer = plan.reducer([0], torch.tensor([1, 1, 1, 0]), layout)
        >>> reducer(torch.tensor([1.0, 2.0, 6.0, float("inf")])).item()
        3.0
    """

    plan: StepPlan
    """Totals and, under a mode of the table, weights: ``plan.under("token_mean").weights``."""
    sequences: Ints
    """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
    mask: Tensor
    """bool ``[T]``: the loss mask, sliced for this rank, on its device; read only."""
    layout: Layout

    @property
    def aggregation(self) -> Aggregation:
        """The plan's aggregation."""
        return self.plan.aggregation


ReducerFactory = Callable[[ReducerContext], "Callable[[Tensor], Tensor]"]


def load_reducer_factory(path: str) -> ReducerFactory:
    """Import the factory at a path; raises as :func:`resolved`."""
    factory: ReducerFactory = resolved(
        path, "reducer path", "factory(context) -> Callable[[Tensor], Tensor]"
    )
    return factory
