"""Ranks that are threads of one process, and one rank of a fake group; forked on its own.

``scale_worker.py CHECK``: prints what the check found, as JSON.
"""

import json
import sys

import pytest
import torch.distributed as dist

from benchmarks import scale
from benchmarks.in_process import run_ranks, traffic
from benchmarks.rank_step import Clock, RankSequences, a_step, read
from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import PlanError


def costs():
    """Costs of 2 and 8 ranks in threads, and of the same sizes alone, by workload."""
    return {
        name: {
            "threads": [scale.in_threads(n, sequences_of(n), has_ids=has_ids) for n in (2, 8)],
            "alone": [scale.alone(n, sequences_of(n), has_ids=has_ids) for n in (2, 8)],
        }
        for name, (sequences_of, has_ids) in scale.WORKLOADS.items()
        if name != scale.scale_report.A_MILLION
    }


def ragged():
    """Bytes that come to a rank where one of eight ranks has 100 sequences, the others 10."""

    def work(rank):
        sequences = [1] * (100 if rank == 5 else 10)
        ids = [1000 * rank + sequence for sequence in range(len(sequences))]
        plan_step(
            Aggregation("prompt_mean"),
            Sequences(active_tokens=sequences, prompt=ids),
            group=dist.group.WORLD,
        )
        return traffic().bytes

    return run_ranks(8, work)


def faults():
    """What ranks raise in threads: a plan's error on all, any other error once."""

    def one_disagrees(rank):
        mode = "sample_sum" if rank == 3 else "token_mean"
        with pytest.raises(PlanError) as error:
            plan_step(Aggregation(mode), Sequences(active_tokens=[1]), group=dist.group.WORLD)
        return str(error.value)

    def one_dies(rank):
        if rank == 2:
            raise ArithmeticError("rank 2 only")
        clock = Clock(traffic=traffic())
        a_step(read(clock), RankSequences(rank, 1), clock)

    messages = run_ranks(4, one_disagrees)
    with pytest.raises(ArithmeticError, match="rank 2 only"):
        run_ranks(4, one_dies)
    with pytest.raises(SystemExit, match=r"rank \d of 2 plans another step than one process does"):
        wrong_sequences()
    return messages


def wrong_sequences():
    """Compare with another step than the ranks plan: what in_threads has to notice."""
    original = RankSequences.of
    RankSequences.of = staticmethod(
        lambda rank, size, n, has_ids=True: RankSequences(rank, 3, has_ids)
    )
    try:
        scale.in_threads(2, 8, has_ids=True)
    finally:
        RankSequences.of = original


if __name__ == "__main__":
    print("FOUND", json.dumps(globals()[sys.argv[1]]()))
