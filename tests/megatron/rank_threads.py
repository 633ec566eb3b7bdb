"""Ranks that are threads of this process: do they plan what one process with all sequences plans?

The process group is torch's own multi-threaded one, which its tests use. ``dist.all_gather`` is
the call that the package makes, and brings a rank what every other rank sent.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks.rank_step import RankSequences, a_step, import_megatron, read
from benchmarks.workloads import AGGREGATION
from megatron_lossagg import plan_step

STACK_BYTES = 2**20
"""Of a thread: 256 of the default size would be 2 GB of address space."""

T = TypeVar("T")


def check_weights(size: int, num_sequences: int, *, has_ids: bool) -> None:
    """Take a step on ``size`` ranks; raise if a rank's weights or totals are not one process's."""
    import_megatron()
    whole = plan_step(AGGREGATION, RankSequences(0, num_sequences, has_ids).sequences)

    def work(rank: int) -> None:
        own = RankSequences.of(rank, size, num_sequences, has_ids=has_ids)
        plan = a_step(read(nullcontext), own, nullcontext)
        expected = whole.weights.numpy()[own.first : own.first + own.num]
        if plan.totals != whole.totals or not np.array_equal(plan.weights.numpy(), expected):
            raise SystemExit(f"rank {rank} of {size} plans another step than one process does")

    run_ranks(size, work)


def run_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """Run ``work(rank)`` on every rank of a world of ``size`` threads; return the results.

    Inside, ``torch.distributed`` is initialized and every name of it is the rank's own. The
    first error of a rank is raised here, and ends the others.
    """
    group, store = multi_threaded_pg.ProcessLocalGroup, dist.HashStore()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=size)
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)  # those that it ends come after it
            group.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    previous_stack, excepthook = threading.stack_size(STACK_BYTES), sys.excepthook
    multi_threaded_pg._install_threaded_pg()  # each thread has a world of its own
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    group.reset()
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        threading.stack_size(previous_stack)
        sys.excepthook = excepthook  # which each rank's group has wrapped
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
