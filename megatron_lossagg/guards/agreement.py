"""Whether all ranks run the same: the same Megatron-Core, loss scaling, options and aggregation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.exchange import Exchange, Told

_DOING = (
    "begin the loss aggregation; a rank without the flags of --loss-aggregation never does: start "
    "all ranks with the same ones"
)


@contextmanager
def agreed() -> Iterator[Told]:
    """Leave a block with the same on every rank of the world, or raise on all.

    ``own``: in words, what must be the same on all ranks.
    """
    with Exchange(dist.group.WORLD, _DOING).together("rank {}", ContractError) as ranks:
        yield ranks
    first = ranks.of_ranks[0]
    for rank, own in enumerate(ranks.of_ranks):
        if own != first:
            raise ContractError(
                f"ranks disagree: rank 0 has {first}, rank {rank} has {own}: start "
                "all ranks with the same flags and versions"
            )
