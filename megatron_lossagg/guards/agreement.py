"""Whether all ranks run the same: the same Megatron-Core, loss scaling, options and aggregation."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_lossagg.errors import ContractError

__all__ = ["agree"]


def agree(fault: str, settings: str) -> None:
    """Raise one :class:`ContractError` on every rank of the world, or on none."""
    gathered: list[Any] = [None] * dist.get_world_size()
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
