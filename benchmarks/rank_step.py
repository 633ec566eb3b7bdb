"""What one rank does around a step: makes its aggregator, plans, reduces its losses, finishes.

The model is one Linear in Megatron-Core's own DistributedDataParallel, data-parallel over the
whole world; every call of the package is the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from benchmarks.workloads import AGGREGATION, SAMPLES_PER_PROMPT
from megatron_lossagg import LossAggregator, Options, Sequences, StepPlan, plan_step
from megatron_lossagg.cpu import install

CALLS = ("read", "plan_step", "begin", "finish")
"""What is measured of a rank: ``read`` is once per run, the others are in every step."""
MOST_TOKENS = 8
"""Of a sequence: what a step costs around its microbatches does not depend on it."""

Measure = Callable[[str], AbstractContextManager[Any]]
"""What to enter around a call, by its name."""


@dataclass(frozen=True)
class RankSequences:
    """One rank's part of a step's sequences: evenly and in order, eight per prompt."""

    first: int
    num: int
    has_ids: bool = True

    @staticmethod
    def of(rank: int, size: int, num_sequences: int, *, has_ids: bool = True) -> RankSequences:
        """Split ``num_sequences`` over ``size`` ranks; return those of one."""
        first, end = (num_sequences * r // size for r in (rank, rank + 1))
        return RankSequences(first, end - first, has_ids)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Active tokens of each sequence, some with none."""
        return (np.arange(self.first, self.first + self.num) * 7919) % (MOST_TOKENS + 1)

    @property
    def sequences(self) -> Sequences:
        """The step as this rank tells it to ``plan_step``."""
        prompt = np.arange(self.first, self.first + self.num) // SAMPLES_PER_PROMPT
        return Sequences(active_tokens=self.tokens, prompt=prompt if self.has_ids else None)


def import_megatron() -> None:
    """Install the stand-ins if there is no CUDA, then import Megatron-Core.

    Threads cannot import it at the same time: call this before they start.
    """
    if not torch.cuda.is_available():
        install()
    import megatron.core.distributed
    import megatron.core.transformer  # noqa: F401


def a_chunk(*, splits_sequences: bool = False) -> Any:
    """Wrap a Linear, data-parallel over the world; its other groups have one rank.

    ``splits_sequences``: context-parallel over the world instead.
    """
    import_megatron()
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    world = dist.group.WORLD
    of_one_rank = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroupCollection(
        dp_cp=world, expt_dp=world, intra_dp_cp=world, intra_expt_dp=world
    )
    groups.dp, groups.cp = world, of_one_rank
    if splits_sequences:
        groups.dp, groups.cp = of_one_rank, world
    for name in ("tp", "pp", "ep"):
        setattr(groups, name, of_one_rank)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        context_parallel_size=dist.get_world_size() if splits_sequences else 1,
        finalize_model_grads_func=finalize_model_grads,
    )
    module = torch.nn.Linear(2, 2)
    module.pg_collection = groups
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(), module, pg_collection=groups
    )


def read(measure: Measure) -> LossAggregator:
    """Make the aggregator of a new chunk, without the probe: a fake group runs no step."""
    chunk = a_chunk()
    with measure("read"):
        return LossAggregator(chunk, AGGREGATION, options=Options(probe=False))


def a_step(aggregator: LossAggregator, own: RankSequences, measure: Measure) -> StepPlan:
    """Plan a step, reduce one microbatch, finish; returns the plan."""
    sequences = own.sequences
    with measure("plan_step"):
        plan = plan_step(AGGREGATION, sequences, group=aggregator.dp_group)
    tokens = own.tokens
    mask = torch.ones(int(tokens.sum()), dtype=torch.bool)
    with measure("begin"):
        step = aggregator.begin(plan, num_microbatches=1)
    mb = step.microbatch(range(own.num), mask, lengths=tokens)
    mb.outputs(mb.reduce(torch.ones(len(mask), requires_grad=True)))[0].backward()
    with measure("finish"):
        step.finish()
    return plan
