"""Calls and operations of a microbatch, as ``benchmarks/microbatch.py`` counts them."""

import torch
from ranks import run_worker

from benchmarks.microbatch import SEQUENCES, counts, drawn
from benchmarks.rank_step import a_chunk
from megatron_lossagg import LossAggregator, Options

MOST_CALLS, MOST_OPERATIONS = 32, 15
"""At CP 2, where slicing the mask takes four calls and an operation more than at CP 1."""


def check_a_microbatch_takes_few_calls_and_operations_for_any_number_of_sequences():
    """In steps 1, 2 and 4, which are weighed, and in step 3; of losses of the model, and not."""
    chunk = a_chunk(splits_sequences=True)
    aggregator = LossAggregator(chunk, "sample_mean", options=Options(probe=False))

    def of_model(num_losses):
        chunk.zero_grad_buffer()
        return 0.5 * chunk(torch.ones(num_losses // 2, 2)).view(-1)

    for losses in (of_model, drawn, of_model, of_model):
        chunk.zero_grad_buffer()
        found = counts(aggregator, SEQUENCES[0], losses)
        assert found.calls <= MOST_CALLS, found
        assert found.operations <= MOST_OPERATIONS, found
    chunk.zero_grad_buffer()
    many = counts(aggregator, SEQUENCES[1])
    assert many.calls <= MOST_CALLS, many
    assert many.operations == found.operations


if __name__ == "__main__":
    run_worker(globals())
