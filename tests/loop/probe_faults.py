"""Faults of Megatron or of a framework, put in by patches, and where each changes a number."""

from collections import Counter
from unittest.mock import patch

import torch.distributed as dist
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import schedules


def drop_m():
    """Patch the schedule so that it does not divide by M."""
    original = schedules.forward_step

    def forward_step(forward_step_func, data_iterator, model, num_microbatches, *more, **named):
        return original(forward_step_func, data_iterator, model, 1, *more, **named)

    return patch.object(schedules, "forward_step", forward_step)


def times_cp():
    """Patch the schedule so that it multiplies the loss by CP."""
    original = schedules.forward_step

    def forward_step(forward_step_func, *more, **named):
        def scaled(*arguments):
            output, loss_func = forward_step_func(*arguments)

            def loss_times_cp(output):
                loss, *rest = loss_func(output)
                return loss * parallel_state.get_context_parallel_world_size(), *rest

            return output, loss_times_cp

        return original(scaled, *more, **named)

    return patch.object(schedules, "forward_step", forward_step)


def ddp_averages():
    """Patch DDP so that it averages with any scaling factor."""
    original = DistributedDataParallel.finish_grad_sync

    def finish_grad_sync(self, *more, **named):
        original(self, *more, **named)
        self.scale_gradients(1 / dist.get_world_size(self.dp_cp_group))

    return patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def second_step_doubled():
    """Patch DDP so that it scales gradients differently from the second step on."""
    original = DistributedDataParallel.finish_grad_sync
    steps = Counter()

    def finish_grad_sync(self, *more, **named):
        original(self, *more, **named)
        steps[id(self)] += 1
        if steps[id(self)] > 1:
            self.scale_gradients(2)

    return patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def experts_doubled():
    """Patch DDP so that it scales the gradients of experts differently."""
    original = DistributedDataParallel.finish_grad_sync

    def finish_grad_sync(self, *more, **named):
        original(self, *more, **named)
        for buffer in self.expert_parallel_buffers:
            buffer.scale_gradients(2)

    return patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def finalize_not_called():
    """Patch the schedule so that it does not call finalize_model_grads_func."""
    original = pipeline_parallel.get_forward_backward_func

    def get_forward_backward_func(*arguments):
        schedule = original(*arguments)

        def forgetful(*, model, **named):
            model[0].config.finalize_model_grads_func = None
            return schedule(model=model, **named)

        return forgetful

    return patch.object(pipeline_parallel, "get_forward_backward_func", get_forward_backward_func)


def finalize_does_not_divide(model, num_tokens=None, **named):
    finalize_model_grads(model, None, **named)


def num_tokens_over_dp_only(model, num_tokens=None, **named):
    finalize_model_grads(model, None, **named)
    if num_tokens is None:
        return
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(num_tokens, last, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group())
    if num_tokens > 0:
        for chunk in model:
            chunk.scale_gradients(1 / num_tokens)


def finalized_by(function):
    """Introduce a fault in the framework's own finalize function."""
    return lambda chunks: patch.object(chunks[0].config, "finalize_model_grads_func", function)


def flipped(chunks):
    config = chunks[0].config
    return patch.object(config, "calculate_per_token_loss", not config.calculate_per_token_loss)


# A fault, and where it changes a number: from loss scaling, DP * CP, CP and EP.
FAULTS = {
    "drop_m": (lambda chunks: drop_m(), lambda per_token, dp_cp, cp, ep: not per_token),
    "times_cp": (lambda chunks: times_cp(), lambda per_token, dp_cp, cp, ep: cp > 1),
    "ddp_averages": (lambda chunks: ddp_averages(), lambda per_token, dp_cp, cp, ep: dp_cp > 1),
    "second_step_doubled": (
        lambda chunks: second_step_doubled(),
        lambda per_token, dp_cp, cp, ep: True,
    ),
    "experts_doubled": (lambda chunks: experts_doubled(), lambda per_token, dp_cp, cp, ep: ep > 1),
    "finalize_not_called": (
        lambda chunks: finalize_not_called(),
        lambda per_token, dp_cp, cp, ep: True,
    ),
    "finalize_does_not_divide": (
        finalized_by(finalize_does_not_divide),
        lambda per_token, dp_cp, cp, ep: per_token,
    ),
    "num_tokens_over_dp_only": (
        finalized_by(num_tokens_over_dp_only),
        lambda per_token, dp_cp, cp, ep: per_token and cp > 1,
    ),
    "flipped": (flipped, lambda per_token, dp_cp, cp, ep: dp_cp > 1),
}

OWN_MESSAGES = {
    "flipped": "frozen",
    "finalize_not_called": "called config.finalize_model_grads_func 0 times, expected once",
}
"""Of faults that are named before K is measured."""
