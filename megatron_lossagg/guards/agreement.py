"""Whether all ranks run the same: the same Megatron-Core, loss scaling, options and aggregation."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_lossagg.contract.waiting import named_if_late
from megatron_lossagg.errors import ContractError

_WAITS = " to begin the loss aggregation; a rank without the flags of --loss-aggregation never does"
_NEVER = (
    "began no loss aggregation, expected every rank to: start all ranks with the same flags of "
    "--loss-aggregation"
)


def agree(fault: str, settings: str) -> None:
    """Raise one :class:`ContractError` on every rank of the world, or on none.

    A rank that waits for another one longer than half a minute names it, and goes on waiting.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    with named_if_late(_WAITS, _NEVER):
        dist.all_gather_object(gathered, (fault, settings))
    for rank, (fault_of_rank, _) in enumerate(gathered):
        if fault_of_rank:
            raise ContractError(f"rank {rank}: {fault_of_rank}")
    first = gathered[0][1]
    for rank, (_, settings_of_rank) in enumerate(gathered):
        if settings_of_rank != first:
            raise ContractError(
                f"ranks disagree: rank 0 has {first}, rank {rank} has {settings_of_rank}: start "
                "all ranks with the same flags and versions"
            )
