"""What a step costs around its microbatches as ranks grow: ``python -m benchmarks.scale``.

    python -m benchmarks.scale [--quick] [--json FILE] [--doc FILE] [--pictures FOLDER]

Up to 1,024 ranks are threads of this process that exchange what they have (``in_process.py``),
each with sequences of its own: every rank's weights are compared with those of one process that has
all sequences. Up to 16,384 ranks, one rank of torch's fake process group runs alone: its sizes and
calls are the real ones, the others' sequences are copies of its own. A late and a lost rank are run
on gloo (``late_rank.py``). ``--from`` takes the numbers of an earlier run.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

warnings.filterwarnings("ignore", module="megatron")  # of what is not installed

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from benchmarks import scale_report  # noqa: E402
from benchmarks.command import run_command, say  # noqa: E402
from benchmarks.counting import counted  # noqa: E402
from benchmarks.in_process import run_ranks, traffic  # noqa: E402
from benchmarks.rank_step import Clock, Cost, RankSequences, a_step, read  # noqa: E402
from benchmarks.run import launched  # noqa: E402
from benchmarks.workloads import AGGREGATION  # noqa: E402
from megatron_lossagg import plan_step  # noqa: E402

Json = dict[str, Any]

THREADS = (2, 4, 16, 64, 256, 1024)
ALONE = (*THREADS, 2048, 16384)
QUICK_THREADS, QUICK_ALONE = (2, 8, 64), (2, 8, 64, 1024)
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
        show=lambda results: print(scale_report.markdown(results)),
        markdown=scale_report.markdown,
        name="scale",
        draw="scale",
    )


def measured(quick: bool) -> Json:
    """Run every workload on every number of ranks; launches are None with ``quick``."""
    results: Json = {"threads": {}, "alone": {}, "late": None}
    for name, (sequences_of, has_ids) in WORKLOADS.items():
        for side, at, sizes in (
            ("threads", in_threads, QUICK_THREADS if quick else THREADS),
            ("alone", alone, QUICK_ALONE if quick else ALONE),
        ):
            results[side][name] = [at(n, sequences_of(n), has_ids=has_ids) for n in sizes]
    if not quick:
        say("a late and a lost rank")
        results["late"] = {
            case: launched("benchmarks.late_rank", case, processes=4) for case in ("late", "lost")
        }
    return results


def in_threads(size: int, num_sequences: int, *, has_ids: bool) -> Json:
    """Run every rank of a world in this process; the cost of each call, its median over ranks.

    Raises if a rank's weights or totals differ from those of one process with all sequences.
    """
    say(f"{size} ranks in threads, {num_sequences} sequences")
    whole = plan_step(AGGREGATION, RankSequences(0, num_sequences, has_ids).sequences)
    weights_A = whole.weights.numpy()

    def work(rank: int) -> dict[str, Cost]:
        clock = Clock(traffic=traffic())
        own = RankSequences.of(rank, size, num_sequences, has_ids=has_ids)
        plan = a_step(read(clock), own, clock)
        expected = weights_A[own.first : own.first + own.num]
        if plan.totals != whole.totals or not np.array_equal(plan.weights.numpy(), expected):
            raise SystemExit(f"rank {rank} of {size} plans another step than one process does")
        return clock.costs

    return point(size, num_sequences, run_ranks(size, work))


def alone(size: int, num_sequences: int, *, has_ids: bool) -> Json:
    """Run rank 0 of a world of ``size`` alone, on torch's fake group; medians over repeats.

    It has the sequences of the last rank, which has most: the others are padded to them.
    """
    say(f"rank 0 of {size}, {num_sequences} sequences")
    own = RankSequences.of(size - 1, size, num_sequences, has_ids=has_ids)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        costs = []
        for _ in range(REPEATS):
            clock = Clock()
            a_step(read(clock), own, clock)
            costs.append(clock.costs)
        found = point(size, num_sequences, costs)
        with counted() as counts:
            plan_step(AGGREGATION, own.sequences, group=dist.group.WORLD)
        brought = {"collectives": counts.num_collectives, "bytes": counts.collective_bytes}
        found["plan_step"].update(brought)
        for call in ("read", "step", "finish"):  # not traced
            del found[call]["collectives"], found[call]["bytes"]
        return found
    finally:
        dist.destroy_process_group()


def point(size: int, num_sequences: int, costs: Sequence[dict[str, Cost]]) -> Json:
    """Summarize the costs of ranks or repeats; the median is the low one, a value that occurred."""
    summary = {
        call: {
            key: statistics.median_low([asdict(cost[call])[key] for cost in costs])
            for key in ("cpu", "collectives", "bytes")
        }
        for call in costs[0]
    }
    return {"ranks": size, "sequences": num_sequences, **summary}


if __name__ == "__main__":
    sys.exit(main())
