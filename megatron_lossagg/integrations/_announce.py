"""One line that a framework trains an aggregation, from its first loss on."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist

from megatron_lossagg.errors import say
from megatron_lossagg.reduction.aggregation import Aggregation


@cache
def announce(framework: str, aggregation: Aggregation) -> None:
    """Print on rank 0, once per process, that a framework trains an aggregation."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(f"{framework} trains {aggregation}")
