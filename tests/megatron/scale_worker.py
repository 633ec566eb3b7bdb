"""One rank of a fake group, ranks that are threads, ranks on gloo with unequal sequences.

``scale_worker.py CHECK``: prints what the check found, as JSON.
"""

import json
import sys

import pytest
import torch.distributed as dist
from rank_threads import check_weights

from benchmarks import scale
from benchmarks.counting import counted
from benchmarks.rank_step import RankSequences
from megatron_lossagg import Aggregation, Sequences, plan_step


def costs():
    """Costs of one rank of 2 and of 8, by workload; what 8 and 64 threads plan is compared."""
    found = {}
    for name in (scale.scale_report.NO_IDS, scale.scale_report.WITH_IDS):
        sequences_of, has_ids = scale.WORKLOADS[name]
        found[name] = [scale.one_rank(n, sequences_of(n), has_ids=has_ids) for n in (2, 8)]
        for size in (8, 64):
            check_weights(size, sequences_of(size), has_ids=has_ids)
    return found


def other_sequences():
    """Let threads take another step than they are compared with."""
    RankSequences.of = staticmethod(
        lambda rank, size, n, has_ids=True: RankSequences(rank, 3, has_ids)
    )
    with pytest.raises(SystemExit, match=r"rank \d of 2 plans another step than one process does"):
        check_weights(2, 8, has_ids=True)


def ragged():
    """Bytes that come to a rank where one of them has 100 sequences, the others 10."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sequences = Sequences(
        active_tokens=[1] * (100 if rank == 1 else 10),
        prompt=[1000 * rank + number for number in range(100 if rank == 1 else 10)],
    )
    with counted() as found:
        plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)
    dist.destroy_process_group()
    return found.collective_bytes


if __name__ == "__main__":
    print("FOUND", json.dumps(globals()[sys.argv[1]]()))
