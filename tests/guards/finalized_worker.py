"""Steps whose gradients are finalized, or not, on one or two data-parallel ranks."""

import contextlib
import functools
import warnings
from contextlib import nullcontext

import pytest
import tiny_gpt
import torch
from check_runner import run_checks
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lossagg import LossAggregator, Options
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction import faults

LENGTH, M = 8, 2
MASK = torch.tensor([1] * (LENGTH - 1) + [0])
TOKENS = [LENGTH - 1] * M
REFUSED = "config.finalize_model_grads_func did not run in the step"


def made(*, per_token):
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=per_token))
    chunk.config.finalize_model_grads_func = finalize_model_grads
    return LossAggregator(chunk, "token_mean", options=Options(probe=False))


def is_needless(aggregator):
    """Whether gradients are right without a finalize function."""
    return aggregator.groups.dp_cp_size == 1 and aggregator.loss_scaling == "average"


def forward_step(step, inside, iterator, model):
    number = next(iterator)
    inside(model, number)
    seed = torch.Generator().manual_seed(number + 10 * parallel_state.get_data_parallel_rank())
    tokens, labels = torch.randint(0, 16, (2, 1, LENGTH), generator=seed)
    output = model(tokens, torch.arange(LENGTH)[None], None, labels=labels)
    return output, functools.partial(loss_func, step, number)


def loss_func(step, number, output):
    mb = step.microbatch([number], MASK, cu_seqlens=[0, LENGTH])
    return mb.outputs(mb.reduce(output.view(-1)))


def gradient_of(aggregator, inside=lambda model, number: None):
    """Train a step in Megatron's schedule; ``inside`` is called in each forward step."""
    (chunk,) = aggregator.chunks
    chunk.config.finalize_model_grads_func = finalize_model_grads
    chunk.zero_grad_buffer()
    with aggregator.step(TOKENS, num_microbatches=M) as step:
        schedule(step, chunk, inside)
    return gradients(chunk)


def schedule(step, chunk, inside):
    get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, step, inside),
        data_iterator=iter(range(M)),
        model=[chunk],
        num_microbatches=M,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )


def gradients(chunk):
    return torch.cat([one.main_grad.flatten() for one in chunk.parameters()]).clone()


def set_function(function, model, number):
    model.config.finalize_model_grads_func = function


def each_loss_scaling(check):
    def in_both():
        for per_token in (False, True):
            check(made(per_token=per_token))

    in_both.__name__ = check.__name__
    return in_both


@each_loss_scaling
def check_a_finalize_function_that_is_replaced_inside_the_step_is_refused(aggregator):
    def other(model, *args, **kwargs):
        """As a framework's own, which does nothing."""

    with pytest.raises(ContractError, match=REFUSED):
        gradient_of(aggregator, functools.partial(set_function, other))
    expected = gradient_of(aggregator)
    with nullcontext() if is_needless(aggregator) else pytest.raises(ContractError, match=REFUSED):
        found = gradient_of(aggregator, functools.partial(set_function, None))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_loss_scaling
def check_megatrons_own_may_be_set_again_inside_the_step(aggregator):
    expected = gradient_of(aggregator)
    found = gradient_of(aggregator, functools.partial(set_function, finalize_model_grads))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_loss_scaling
def check_an_error_in_the_last_backward_pass_that_is_swallowed_is_refused(aggregator):
    (chunk,) = aggregator.chunks
    chunk.zero_grad_buffer()
    calls = []

    def out_of_memory(gradient):
        calls.append(gradient)
        if len(calls) == M:
            raise torch.OutOfMemoryError("as a device's")

    hook = next(chunk.parameters()).register_hook(out_of_memory)
    step = aggregator.step(TOKENS, num_microbatches=M)
    with contextlib.suppress(torch.OutOfMemoryError):
        schedule(step, chunk, lambda model, number: None)
    hook.remove()
    with pytest.raises(ContractError, match=REFUSED):
        step.finish()
    gradient_of(aggregator)  # the next step is right


@each_loss_scaling
def check_a_loop_by_hand_may_finalize_after_the_step_and_is_warned(aggregator):
    expected = gradient_of(aggregator)
    (chunk,) = aggregator.chunks
    chunk.zero_grad_buffer()
    num_tokens = torch.zeros((), dtype=torch.int32)
    step = aggregator.step(TOKENS, num_microbatches=M)
    iterator, factor = iter(range(M)), step.scaling.schedule_factor
    for _ in range(M):
        output, function = forward_step(step, lambda *_: None, iterator, chunk)
        loss, own_tokens, _ = function(output)
        (loss * factor).backward()
        num_tokens += own_tokens
    faults._warned.discard("finalize")
    warned = pytest.warns(RuntimeWarning, match="finished before its gradients were finalized")
    with nullcontext() if is_needless(aggregator) else warned:
        step.finish()
    per_token = aggregator.loss_scaling == "per_token"
    finalize_model_grads([chunk], num_tokens if per_token else None)
    torch.testing.assert_close(gradients(chunk), expected, rtol=1e-12, atol=1e-15)


def main():
    warnings.simplefilter("error", RuntimeWarning)
    tiny_gpt.start()
    run_checks(globals())


if __name__ == "__main__":
    main()
