"""Steps of a LossAggregator on a live chunk, as the workers of this folder take them."""

import contextlib
import re

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from check_runner import run_checks

from megatron_lossagg import (
    Aggregation,
    LossAggregator,
    Sequences,
    plan_step,
)
from megatron_lossagg.contract.megatron_options import megatron_version
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.aggregation import Options

CONSTANT = Aggregation("constant", divisor=10)


@contextlib.contextmanager
def refused(*words):
    """Assert that the block raises a ContractError whose message has all the words."""
    with pytest.raises(ContractError) as caught:
        yield
    for word in words:
        assert re.search(word, str(caught.value)), (word, str(caught.value))


def made(model, aggregation=CONSTANT, **options):
    return LossAggregator(model, aggregation, options=Options(**options))


def a_chunk(**config):
    return tiny_gpt.wrapped(tiny_gpt.config_of(**config))


def a_moe(**config):
    return a_chunk(num_moe_experts=2, add_bias_linear=False, **config)


class AbandonedError(Exception):
    """Ends a step as an error in it would."""


@contextlib.contextmanager
def abandoned(step):
    """Enter a step that ends early by an exception, so that nothing is checked at its end."""
    with contextlib.suppress(AbandonedError), step:
        yield step
        raise AbandonedError


def a_plan(aggregator, active=(3, 2), **options):
    sequences = Sequences(active_tokens=list(active), **options)
    return plan_step(CONSTANT, sequences, group=aggregator.dp_group)


def a_step(aggregator, num_microbatches=1, active=(3, 2), **options):
    plan = a_plan(aggregator, active)
    return aggregator.begin(plan, num_microbatches=num_microbatches, **options)


def offsets_and_mask(plan, sequences):
    offsets = torch.arange(len(sequences) + 1) * 4
    mask = torch.zeros(4 * len(sequences), dtype=torch.int64)
    for position, sequence in enumerate(sequences):
        if sequence >= 0:
            mask[4 * position : 4 * position + int(plan.active_tokens[sequence])] = 1
    return offsets, mask


def a_microbatch(step, sequences):
    offsets, mask = offsets_and_mask(step.plan, sequences)
    return step.microbatch(sequences, mask, cu_seqlens=offsets)


def a_reducer(aggregator, plan, sequences):
    """Make a reducer without a step."""
    offsets, mask = offsets_and_mask(plan, sequences)
    return plan.reducer(sequences, mask, aggregator.thd(offsets))


def partial_loss_of(mb, *mode):
    return mb.reduce(torch.ones(mb.layout.num_local_tokens, requires_grad=True), *mode)


def outputs(step, sequences):
    """Return what a loss_func does, and run the backward pass of a training step."""
    with torch.set_grad_enabled(not step.forward_only):
        mb = a_microbatch(step, sequences)
        loss = partial_loss_of(mb)
        out = mb.outputs(loss, report={"loss": loss})
    if not step.forward_only:
        backward(step, out)
    return out


def backward(step, out):
    """Run the backward pass as the schedule does."""
    (out[0] * step.scaling.schedule_factor).backward()


def run_worker(namespace):
    """Run a worker's checks, each on a chunk and its aggregator; rank 0 prints the release."""
    tiny_gpt.start(ep=2)
    if dist.get_rank() == 0:
        print(f"RAN megatron-core {megatron_version()}", flush=True)
    chunk = a_chunk()
    run_checks(namespace, chunk, made([chunk]))
