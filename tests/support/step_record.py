"""A line of a record, for the tests that write and compare records."""

from dataclasses import replace

from megatron_lossagg.record.step_record import StepRecord

STEP = StepRecord(
    step=1,
    mode="sample_mean",
    divisor=None,
    exponent=None,
    count_empty=True,
    count="mask",
    active_tokens=1000,
    samples=16,
    prompts=None,
    weights="00000000000000ff",
    weight_sum=1.0,
    weight_expected=1.0,
    k=8,
    loss_scaling="average",
    num_microbatches=4,
    data_parallel_size=2,
    context_parallel_size=1,
    coefficients=[1.0],
    version="0.1.0",
)


def a_step(number):
    return replace(STEP, step=number)


SAME = "the same loss function on the same batches"
DIFFERENT = "a different loss function or other batches"
"""What ``lossagg diff`` prints of steps."""
