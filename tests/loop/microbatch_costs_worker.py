"""Calls and operations of a microbatch, as ``benchmarks/microbatch.py`` counts them."""

import torch.distributed as dist
from check_runner import run_checks

from benchmarks.microbatch import SEQUENCES, counts
from benchmarks.rank_step import a_chunk
from megatron_lossagg import LossAggregator, Options

MOST_CALLS, MOST_OPERATIONS = 96, 17
"""A tenth above those at CP 1; at CP 2 slicing the mask takes eight calls and an operation more."""


def check_a_microbatch_takes_few_calls_and_operations_for_any_number_of_sequences():
    aggregator = LossAggregator(
        a_chunk(splits_sequences=True), "sample_mean", options=Options(probe=False)
    )
    found = {(one.calls, one.operations) for one in (counts(aggregator, n) for n in SEQUENCES)}
    ((calls, operations),) = found
    is_split = aggregator.cp_size > 1
    assert calls <= MOST_CALLS + 9 * is_split, calls
    assert operations <= MOST_OPERATIONS + is_split, operations


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_checks(globals())
