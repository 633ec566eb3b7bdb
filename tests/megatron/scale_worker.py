"""What a step costs on one rank of many, what ranks plan, and what a lost rank does to the others.

``scale_worker.py costs|other_sequences``: one rank of a fake group, and ranks that are threads: do
they plan what one process with all sequences plans? Their process group is torch's own
multi-threaded one, which its tests use. ``ragged``: ranks with unequal sequences. ``silent|lost
FOLDER``: in the second step rank 1 does not come to ``plan_step``; ``silent``: it keeps its
connections open. Rows of what each found.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import begin, print_row
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks import scale
from benchmarks.counting import counted
from benchmarks.rank_step import RankSequences, a_step, import_megatron, read
from benchmarks.workloads import AGGREGATION
from megatron_lossagg import Aggregation, Sequences, plan_step

TIMEOUT = timedelta(seconds=5)
"""Of the group of ``silent`` and ``lost``; torch's default is 30 minutes for gloo, 10 for NCCL."""
PATIENCE = 60.0
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


def costs():
    """Costs of one rank of 2 and of 8, by workload; what 8 and 64 threads plan is compared."""
    found = {}
    for name in (scale.scale_report.NO_IDS, scale.scale_report.WITH_IDS):
        sequences_of, has_ids = scale.WORKLOADS[name]
        found[name] = [scale.one_rank(n, sequences_of(n), has_ids=has_ids) for n in (2, 8)]
        for size in (8, 64):
            check_weights(size, sequences_of(size), has_ids=has_ids)
    print_row(found)


def other_sequences():
    """Let threads take another step than they are compared with."""
    RankSequences.of = staticmethod(
        lambda rank, size, n, has_ids=True: RankSequences(rank, 3, has_ids)
    )
    with pytest.raises(SystemExit, match=r"rank \d of 2 plans another step than one process does"):
        check_weights(2, 8, has_ids=True)


def ragged():
    """Bytes that come to a rank where one of them has 100 sequences, the others 10."""
    begin()
    rank = dist.get_rank()
    sequences = Sequences(
        active_tokens=[1] * (100 if rank == 1 else 10),
        prompt=[1000 * rank + number for number in range(100 if rank == 1 else 10)],
    )
    with counted() as found:
        plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)
    print_row(found.collective_bytes, of_first=False)
    dist.destroy_process_group()


def lost(folder, *, is_silent=False):
    begin(timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    aggregator = read(nullcontext)
    own = RankSequences.of(rank, size, 64 * size)
    a_step(aggregator, own, nullcontext)
    if rank == 1:
        deadline = time.monotonic() + PATIENCE
        while is_silent and time.monotonic() < deadline:
            if len([*Path(folder).iterdir()]) == size - 1:
                break
            time.sleep(0.02)
        os._exit(0)
    began, message = time.perf_counter(), ""
    try:
        a_step(aggregator, own, nullcontext)
    except Exception as error:  # whatever the backend raises
        message = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    print_row({"rank": rank, "error": message, "seconds": seconds}, of_first=False)
    Path(folder, str(rank)).touch()
    os._exit(0)  # a group that has lost a rank cannot be destroyed


def silent(folder):
    lost(folder, is_silent=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
