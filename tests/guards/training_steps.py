"""Steps of a small GPT by Megatron's own schedule, with and without the package; for workers."""

import functools
from dataclasses import replace
from unittest.mock import patch

import stock_step  # installs the stand-ins
import torch
from megatron.core import parallel_state

from megatron_lossagg import LossAggregator, Sequences, plan_step
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.small_gpt import (
    config_of,
    forward,
    pack,
    run_schedule,
    token_losses,
    wrapped_chunks,
)
from megatron_lossagg.verify.step_data import make_sequences

SEQUENCES = [replace(one, trained=one.counted) for one in make_sequences() if any(one.counted)]
"""Of a step over all ranks; every counted token is trained."""
ACTIVE = [sum(one.counted) for one in SEQUENCES]


def _reset_groups(chunk):
    """Let the schedule run again, and keep the gradients."""
    for group in getattr(chunk, "bucket_groups", ()):  # Megatron-FSDP has none, and needs nothing
        group.reset()


class Training:
    """A model, its aggregator, and this rank's microbatches; inside ``split_world``."""

    def __init__(
        self,
        layout,
        *,
        per_token=False,
        mode="sample_mean",
        config=None,
        ddp=None,
        of_last=None,
    ):
        """Build them. ``of_last=0``: the last microbatch is a padding sequence."""
        self.layout, self.per_token = layout, per_token
        self.config = config_of(layout, per_token=per_token)
        vars(self.config).update(config or {})
        self.chunks = wrapped_chunks(replace(layout, **(ddp or {})), self.config)
        self.aggregator = LossAggregator(self.chunks, mode, options=Options(probe=False))
        rank = parallel_state.get_data_parallel_rank()
        own = range(rank, len(SEQUENCES), layout.dp)
        self.m = layout.m_of_ranks[rank]
        self.counts = [ACTIVE[index] for index in own]
        sequences = [SEQUENCES[index] for index in own]
        parts = self.m if of_last is None else self.m - 1
        self.batches = [
            pack(sequences, range(number, len(own), parts), layout) for number in range(parts)
        ]
        if of_last is not None:
            self.batches.append(pack(sequences, [], layout))

    def plan(self, **options):
        """Begin a step of all microbatches."""
        return self.aggregator.step(self.counts, num_microbatches=self.m, **options)

    total = sum(ACTIVE)
    """Active tokens of the step over all ranks."""

    def forward(self, batch):
        """Return a microbatch's losses by one chunk."""
        (chunk,) = self.chunks
        return token_losses(forward(chunk, batch, self.layout), batch, self.layout)

    def run(self, loss_func, batches=None, *, forward_only=False):
        """Run Megatron's schedule with ``loss_func(batch, losses)``; return the gradient."""

        def forward_step(iterator, chunk):
            batch = next(iterator)

            def of_output(output):
                return loss_func(batch, token_losses(output, batch, self.layout))

            return forward(chunk, batch, self.layout), of_output

        batches = self.batches if batches is None else batches
        run_schedule(forward_step, self.chunks, batches, forward_only=forward_only)
        return self.gradient()

    def gradient(self):
        """Return the gradient of this rank's parameters."""
        return torch.cat([one.flatten() for one in stock_step.gradients(self.chunks)])

    def step(self, loss_func, batches=None, **options):
        """Train a step with ``loss_func(step, batch, losses)``; return the gradient."""
        with self.plan(**options) as step:
            gradient = self.run(functools.partial(loss_func, step), batches)
        return gradient

    def kept_step(self, loss_func, **options):
        """Train a step on gradients that an earlier one left; return the gradient."""
        (chunk,) = self.chunks
        with patch.object(chunk, "zero_grad_buffer", functools.partial(_reset_groups, chunk)):
            return self.step(loss_func, **options)

    def plain(self, term):
        """Train a step without the package; return the gradient.

        ``term(losses, weights, token_weights)``: of a microbatch, 0-dim; the weights of sample_mean
        and of token_mean by hand.
        """
        factor = sum(ACTIVE) if self.per_token else self.m * self.layout.dp_cp

        def loss_func(batch, losses):
            per_token = batch.mask_here.sum().int()
            num_tokens = per_token if self.per_token else torch.ones((), dtype=torch.int32)
            loss = term(losses, *self.weights_by_hand(batch))
            return (
                loss.float() * factor if losses.dtype != torch.float64 else loss * factor,
                (num_tokens),
                {},
            )

        return self.run(loss_func)

    def weights_by_hand(self, batch):
        """Return the weights of a microbatch's tokens here under sample_mean and token_mean."""
        cp_rank = parallel_state.get_context_parallel_rank()
        here = self.layout.held(batch.offsets.tolist(), cp_rank)
        lengths = batch.offsets.diff()
        active = [self.counts[index] if index >= 0 else 1 for index in batch.sequences]
        of_sequence = 1 / torch.tensor(active, dtype=torch.float64) / len(ACTIVE)
        sample_mean = of_sequence.repeat_interleave(lengths)[here] * batch.mask_here
        return sample_mean, batch.mask_here / torch.tensor(sum(ACTIVE), dtype=torch.float64)


def plan_of(training, *, mode=None, group=None, totals=None, **more):
    """Plan a step of all microbatches."""
    aggregator = training.aggregator
    sequences = Sequences(active_tokens=training.counts, **more)
    group = None if totals else group or aggregator.dp_group
    return plan_step(mode or aggregator.aggregation, sequences, group=group, totals=totals)


def microbatch(step, batch):
    """Begin a microbatch as a loss_func does."""
    return step.microbatch(batch.sequences, batch.mask, cu_seqlens=batch.offsets)


def returning(term, **declared):
    """Return the loss_func whose loss is ``term(mb, losses)``."""

    def loss_func(step, batch, losses):
        mb = microbatch(step, batch)
        return mb.outputs(term(mb, losses), **declared)

    return loss_func


right = returning(lambda mb, x: mb.reduce(x))


def changing(change):
    """Return a loss_func that changes what ``mb.outputs`` returned."""
    return lambda step, batch, x: change(*right(step, batch, x))


def set_finalize(config, *made):
    config.finalize_model_grads_func = lambda *args, **kwargs: None
    return made
