"""What must be the same for a whole run: on all ranks, and since the model was built.

The loss scaling is frozen in two places when a model is built and wrapped (DDP's
``gradient_scaling_factor``, every MoE router) and read live in two (schedule, finalize): all must
agree. Symbols: ``TransformerConfig``; each engine's in ``contract/engine.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.contract.scaling import LossScaling, ddp_factor
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.exchange import Exchange, Told

_DOING = (
    "begin the loss aggregation; a rank without the flags of --loss-aggregation never does: start "
    "all ranks with the same ones"
)


@contextmanager
def agreed() -> Iterator[Told]:
    """Leave a block with the same Megatron-Core, options and aggregation on all ranks, or raise.

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


_FLIPPED = (
    "the loss scaling is frozen when the model is built and wrapped; set "
    "--calculate-per-token-loss before that and leave it"
)


class Frozen:
    """What building and wrapping a model froze of the loss scaling, and whether it still holds.

    Making it walks every module of the chunks and compares; :meth:`check` looks only at what was
    found. A module that is added or replaced afterwards is not seen. Neither communicates.
    """

    def __init__(self, chunks: Sequence[Any], loss_scaling: LossScaling) -> None:
        self._engines = [engine_of(chunk) for chunk in chunks]
        self._routers = [
            [
                (name, module)
                for name, module in chunk.named_modules()
                if isinstance(getattr(module, "calculate_per_token_loss", None), bool)
            ]
            for chunk in chunks
        ]
        """Of each chunk the modules with a ``calculate_per_token_loss`` of their own."""
        self._loss_scaling = loss_scaling
        self._cp_size = int(chunks[0].config.context_parallel_size)
        self.check()

    def check(self) -> None:
        """Compare with the live configs; raises :class:`ContractError` if they differ."""
        per_token = self._loss_scaling == "per_token"
        for index, (engine, routers) in enumerate(zip(self._engines, self._routers, strict=True)):
            chunk, config = engine.chunk, engine.chunk.config
            if bool(config.calculate_per_token_loss) != per_token:
                raise ContractError(
                    f"calculate_per_token_loss is {config.calculate_per_token_loss} in the config "
                    f"of chunk {index}, the model was wrapped in the {self._loss_scaling} "
                    f"loss scaling: {_FLIPPED}"
                )
            if config.context_parallel_size != self._cp_size:
                raise ContractError(
                    f"context_parallel_size is {config.context_parallel_size} in the config of "
                    f"chunk {index}, the LossAggregator was made at {self._cp_size}: groups and "
                    "layouts are read once; leave it, and eval_context_parallel_size of "
                    "Megatron-Bridge unset"
                )
            size = dist.get_world_size(engine.dp_cp_group)
            averages = bool(chunk.ddp_config.average_in_collective)
            if per_token and averages:
                raise ContractError(
                    f"average_in_collective is True in the ddp_config of chunk {index} in the "
                    "per-token loss scaling, which sums: gradients would be divided by DP CP; "
                    "leave it False"
                )
            expected = ddp_factor(self._loss_scaling, size, average_in_collective=averages)
            # In the average loss scaling experts have a factor of their own.
            factors = engine.factors(of_experts=per_token)
            if factors - {expected}:
                raise ContractError(
                    f"chunk {index} scales gradients by {sorted(factors)}, the "
                    f"{self._loss_scaling} loss scaling over {size} ranks scales by {expected}: "
                    f"{_FLIPPED}"
                )
            for name, module in routers:
                if module.calculate_per_token_loss != per_token:
                    raise ContractError(
                        f"{name} was built with calculate_per_token_loss="
                        f"{module.calculate_per_token_loss}, the config now has {per_token}: "
                        f"{_FLIPPED}"
                    )
