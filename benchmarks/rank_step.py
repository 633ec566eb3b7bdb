"""What one rank does around a step: reads the contract, plans, reduces its losses, finishes.

The model is one Linear in Megatron-Core's own DistributedDataParallel, data-parallel over the
whole world; every call of the package is the real one, and is timed by the thread's CPU clock,
which does not run while the rank waits for others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from benchmarks.workloads import AGGREGATION, SAMPLES_PER_PROMPT
from megatron_lossagg import LossAggregator, Sequences, StepPlan, plan_step
from megatron_lossagg.cpu import install

__all__ = ["Clock", "Cost", "RankSequences", "Traffic", "a_chunk", "a_step", "read"]

MOST_TOKENS = 8
"""Of a sequence: what a step costs around its microbatches does not depend on it."""


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


@dataclass
class Traffic:
    """What collectives brought to this rank, and the CPU seconds that copying it took."""

    collectives: int = 0
    bytes: int = 0
    copying: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a call cost this rank."""

    cpu: float
    """Seconds of this thread, without the copying of what others sent."""
    wall: float
    """Seconds until it returned."""
    collectives: int
    bytes: int
    """Received."""


@dataclass
class Clock:
    """The costs of calls, by name."""

    traffic: Traffic = field(default_factory=Traffic)
    """Kept by the process group; stays empty where it keeps none."""
    costs: dict[str, Cost] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a block."""
        before = replace(self.traffic)
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            copying = self.traffic.copying - before.copying
            self.costs[name] = Cost(
                cpu=time.thread_time() - cpu - copying,
                wall=time.perf_counter() - wall,
                collectives=self.traffic.collectives - before.collectives,
                bytes=self.traffic.bytes - before.bytes,
            )


def a_chunk() -> Any:
    """Wrap a Linear, data-parallel over the world; its other groups have one rank.

    Imports Megatron-Core, and puts the stand-ins in place before it where there is no CUDA.
    """
    if not torch.cuda.is_available():
        install()
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    world = dist.group.WORLD
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroupCollection(
        dp=world, dp_cp=world, expt_dp=world, intra_dp_cp=world, intra_expt_dp=world
    )
    for name in ("tp", "pp", "cp", "ep"):
        setattr(groups, name, alone)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        finalize_model_grads_func=finalize_model_grads,
    )
    module = torch.nn.Linear(2, 2)
    module.pg_collection = groups
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(), module, pg_collection=groups
    )


def read(clock: Clock) -> LossAggregator:
    """Make the aggregator of a new chunk."""
    chunk = a_chunk()
    with clock("read"):
        return LossAggregator(chunk, AGGREGATION)


def a_step(aggregator: LossAggregator, own: RankSequences, clock: Clock) -> StepPlan:
    """Plan a step, reduce one microbatch, finish; returns the plan."""
    sequences = own.sequences
    with clock("plan_step"):
        plan = plan_step(AGGREGATION, sequences, group=aggregator.dp_group)
    tokens = own.tokens
    mask = torch.ones(int(tokens.sum()), dtype=torch.bool)
    with clock("step"):
        step = aggregator.begin(plan, num_microbatches=1)
    mb = step.microbatch(range(own.num), mask, lengths=tokens)
    mb.outputs(mb.reduce(torch.ones(len(mask), requires_grad=True)))[0].backward()
    with clock("finish"):
        step.finish()
    return plan
