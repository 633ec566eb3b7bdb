"""Two reducers of one's own: a mean that depends on the parallelism, and a sum that does not.

lossagg verify --dp 2 --cp 2 --loss-aggregation-reducer-path examples.own_reducer:mean
lossagg verify --dp 2 --cp 2 --loss-aggregation-reducer-path examples.own_reducer:focal
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_lossagg import ReducerContext


def mean(context: ReducerContext) -> Callable[[Tensor], Tensor]:
    """Wrong: the mean over what one rank holds of one microbatch."""
    return lambda losses: losses.mean()


def focal(context: ReducerContext) -> Callable[[Tensor], Tensor]:
    """Right: a sum over these tokens, divided by the active tokens N of the whole step.

    A token's loss x = -log p is multiplied by (1 - p)^2, which no mode does.
    """
    tokens = context.plan.totals.active_tokens

    def partial_loss(losses: Tensor) -> Tensor:
        p = (-losses).exp()  # of a masked token's 0: 1, so that it stays 0
        return (losses * (1 - p).square()).sum() / tokens

    return partial_loss
