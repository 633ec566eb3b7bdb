"""What a step costs around its microbatches as ranks grow: ``python -m benchmarks.scale``.

    python -m benchmarks.scale [--quick] [--json FILE] [--doc FILE] [--pictures FOLDER]

One rank of torch's fake process group runs, in worlds of up to 1,024: its sizes and calls
are the real ones, the others' sequences are copies of its own. ``--from`` takes the numbers of an
earlier run.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

warnings.filterwarnings("ignore", module="megatron")  # of what is not installed

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from benchmarks import scale_report  # noqa: E402
from benchmarks.command import run_command, say  # noqa: E402
from benchmarks.counting import Counted, counted  # noqa: E402
from benchmarks.rank_step import CALLS, RankSequences, a_step, read  # noqa: E402

Json = dict[str, Any]

RANKS = (2, 4, 16, 64, 256, 1024)
QUICK_RANKS = (2, 8, 64, 1024)
PER_RANK = 64
ALL = 1_000_000
REPEATS = 5

WORKLOADS: dict[str, tuple[Callable[[int], int], bool]] = {
    scale_report.NO_IDS: (lambda size: PER_RANK * size, False),
    scale_report.WITH_IDS: (lambda size: PER_RANK * size, True),
    scale_report.A_MILLION: (lambda size: ALL, True),
}
"""Sequences of the step for a number of ranks, and whether they have prompt ids."""


def main() -> int:
    """Run the command line."""
    return run_command(
        "python -m benchmarks.scale",
        __doc__,
        measure=measured,
        markdown=scale_report.markdown,
        name="scale",
        draw="scale",
    )


def measured(quick: bool) -> Json:
    """Run every workload on every number of ranks."""
    results: Json = {"one rank": {}}
    sizes = QUICK_RANKS if quick else RANKS
    for name, (sequences_of, has_ids) in WORKLOADS.items():
        results["one rank"][name] = [one_rank(n, sequences_of(n), has_ids=has_ids) for n in sizes]
    return results


def one_rank(size: int, num_sequences: int, *, has_ids: bool) -> Json:
    """Run only rank 0 of a world of ``size``, on torch's fake group.

    Returns for each call its CPU seconds, the median of ``REPEATS``, and what it received. The
    rank has the sequences of the last one, which has most: the others are padded to them.
    """
    say(f"rank 0 of {size}, {num_sequences} sequences")
    own = RankSequences.of(size - 1, size, num_sequences, has_ids=has_ids)
    seconds: dict[str, list[float]] = {call: [] for call in CALLS}
    counts: dict[str, Counted] = {}

    @contextmanager
    def timed(call: str) -> Iterator[None]:
        started = time.thread_time()
        yield
        seconds[call].append(time.thread_time() - started)

    @contextmanager
    def traced(call: str) -> Iterator[None]:
        with counted() as counts[call]:
            yield

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        for measure in (*[timed] * REPEATS, traced):
            a_step(read(measure), own, measure)
    finally:
        dist.destroy_process_group()
    of_calls = {
        call: {
            "cpu": statistics.median(seconds[call]),
            "collectives": counts[call].num_collectives,
            "bytes": counts[call].collective_bytes,
        }
        for call in CALLS
    }
    return {"ranks": size, "sequences": num_sequences, **of_calls}


if __name__ == "__main__":
    sys.exit(main())
