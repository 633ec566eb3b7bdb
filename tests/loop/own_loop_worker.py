"""What a loop of one's own may do wrong, through Megatron's own schedule; two ranks."""

import contextlib
import functools
import gc

import pytest
import tiny_gpt
import torch
from check_runner import run_checks
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from packaging.version import Version

from megatron_lossagg import LossAggregator
from megatron_lossagg.contract.live import megatron_version
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.options import Options
from megatron_lossagg.verify.step_data import VOCABULARY

LENGTH = 8
MASK = torch.ones(LENGTH, dtype=torch.int64)


def parallel(**sizes):
    """Build Megatron's groups anew."""
    parallel_state.destroy_model_parallel()
    tp, pp = sizes.pop("tp", 1), sizes.pop("pp", 1)
    parallel_state.initialize_model_parallel(tp, pp, **sizes)
    model_parallel_cuda_manual_seed(1)


def made(*, ddp=None, per_token=False, **more):
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=per_token, **more), **(ddp or {}))
    return LossAggregator(chunk, "token_mean", options=Options(probe=False))


def batch(seed):
    """Return a microbatch of one sequence: a number of its own, tokens and labels."""
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed + 100 * rank)
    return torch.randint(0, VOCABULARY, (2, 1, LENGTH), generator=generator)


def train(aggregator, loss_func, batches, *, zero=True):
    """Run Megatron's schedule, with ``loss_func(number of the microbatch, losses)``.

    Returns the parameters' gradients.
    """
    (chunk,) = aggregator.chunks
    if zero:
        chunk.zero_grad_buffer()
    here = aggregator.thd([0, LENGTH]).positions
    packed = {"packed_seq_params": tiny_gpt.packed_at([0, LENGTH])}

    def forward_step(iterator, model):
        number, (tokens, labels) = next(iterator)
        more = packed if aggregator.cp_size > 1 else {}
        output = model(tokens[:, here], here[None], None, labels=labels[:, here], **more)
        return output, functools.partial(loss_func, number)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(enumerate(batches)),
        model=[chunk],
        num_microbatches=len(batches),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    return torch.cat([one.main_grad.flatten() for one in chunk.parameters()]).clone()


def whole(step, number, output):
    """The right loss_func."""
    mb = step.microbatch([number], MASK, cu_seqlens=[0, LENGTH])
    return mb.outputs(mb.reduce(output.view(-1)))


def gradient_of(aggregator, seeds, *, loss_func=whole, zero=True, **options):
    batches = [batch(seed) for seed in seeds]
    counts = [LENGTH] * len(seeds)
    with aggregator.step(counts, num_microbatches=len(seeds), **options) as step:
        return train(aggregator, functools.partial(loss_func, step), batches, zero=zero)


def check_two_schedule_calls_add_up_their_gradients():
    parallel()
    aggregator = made()
    apart = [gradient_of(aggregator, seeds) for seeds in ([1, 2], [3, 4])]
    gradient_of(aggregator, [1, 2])
    for group in aggregator.chunks[0].bucket_groups:
        group.reset()
    both = gradient_of(aggregator, [3, 4], zero=False, accumulates=True)
    torch.testing.assert_close(both, sum(apart), rtol=1e-12, atol=1e-15)


def check_they_do_not_where_megatron_reduces_the_first_ones_again():
    experts = {"num_moe_experts": 2, "add_bias_linear": False}
    for sizes, config, ddp, words in (
        ({"tp": 2}, {}, {}, "tensor parallelism"),
        ({"pp": 2}, {}, {}, "pipeline parallelism"),
        ({"expert_model_parallel_size": 2}, experts, {}, "expert parallelism"),
        ({}, {}, {"overlap_grad_reduce": True}, "overlap_grad_reduce"),
        ({}, {}, {"use_distributed_optimizer": True}, "the distributed optimizer"),
        ({}, {"per_token": True}, {}, "--calculate-per-token-loss"),
    ):
        parallel(**sizes)
        aggregator = made(ddp=ddp, **config)
        with pytest.raises(ContractError, match=f"accumulates=True with {words}"):
            aggregator.step([LENGTH], num_microbatches=1, accumulates=True)


def two_of_three(step, number, output):
    loss, _, report = whole(step, number, output)
    return loss, report


def a_scaled_loss(step, number, output):
    loss, num_tokens, report = whole(step, number, output)
    return loss * 2, num_tokens, report


def check_what_the_schedule_does_not_scale_as_it_should_is_refused():
    """Without num_tokens Megatron multiplies by CP and divides by M in both loss scalings."""
    parallel(context_parallel_size=2)
    found = "arrived in the backward pass with the coefficient|the schedule got 0 tokens"
    for per_token in (False, True):
        aggregator = made(per_token=per_token)
        gradient_of(aggregator, [1, 2, 3])
        for loss_func in (two_of_three, a_scaled_loss):
            with pytest.raises(ContractError, match=found):
                gradient_of(aggregator, [1, 2, 3], loss_func=loss_func)
    parallel()
    aggregator = made()
    step = aggregator.step([LENGTH, LENGTH], num_microbatches=2)
    for number in (0, 1):  # no schedule: nothing divides by M
        whole(step, number, torch.ones(LENGTH, requires_grad=True))[0].backward()
    with pytest.raises(ContractError, match=r"coefficient 2, expected 1: .* let Megatron's sched"):
        step.finish()


def with_own_tokens(step, number, output):
    """As a loop whose ranks each count what they hold."""
    loss, num_tokens, report = whole(step, number, output)
    return loss, torch.full_like(num_tokens, output.numel()), report


def with_at_least_one(step, number, output):
    loss, num_tokens, report = whole(step, number, output)
    return loss, num_tokens.clamp_(min=1), report


def check_other_tokens_than_were_returned_are_refused_where_megatron_divides_by_them():
    message = "the schedule got .* tokens of this rank to divide by, mb.outputs returned"
    parallel()
    with pytest.raises(ContractError, match=message):  # CP / M is 1: the gradient shows nothing
        gradient_of(made(per_token=True), [1], loss_func=two_of_three)
    parallel(context_parallel_size=2)
    aggregator = made(per_token=True)
    with pytest.raises(ContractError, match=message):
        gradient_of(aggregator, [1, 2], loss_func=with_own_tokens)
    if aggregator.cp_rank == 1:  # 0 of its own; rank 0 finds nothing, and gets what the sum is
        with pytest.raises(ContractError, match=message):
            gradient_of(aggregator, [1, 2], loss_func=with_at_least_one)
    else:
        gradient_of(aggregator, [1, 2], loss_func=with_at_least_one)


def check_two_schedule_calls_in_one_step_are_refused_where_each_one_divides():
    parallel()
    for per_token in (False, True):
        aggregator = made(per_token=per_token)
        message = "after 2 of the 4 microbatches" if per_token else "coefficient 2, expected 1"
        step = aggregator.step([LENGTH] * 4, num_microbatches=4)
        for first in (0, 2):
            loss_func = functools.partial(later, first, step)
            train(aggregator, loss_func, [batch(1), batch(2)], zero=first == 0)
        with pytest.raises(ContractError, match=message):
            step.finish()
    stock = aggregator.chunks[0].config.finalize_model_grads_func
    assert stock is finalize_model_grads


def later(first, step, number, output):
    return whole(step, first + number, output)


def check_two_steps_of_a_model_at_once_are_refused_where_each_one_divides():
    parallel()
    first = made(per_token=True)
    second = LossAggregator(first.chunks, "sample_mean", options=Options(probe=False))
    with first.step([LENGTH], num_microbatches=1) as step:
        with pytest.raises(ContractError, match="a step of this model while another one runs"):
            second.step([LENGTH], num_microbatches=1)
        third = LossAggregator(first.chunks, "sample_mean", options=Options(probe=False))
        step.end()
    for aggregator in (second, third):
        gradient_of(aggregator, [1])
    first.step([LENGTH], num_microbatches=1)  # given up, with its aggregator
    del first, step
    gc.collect()
    gradient_of(second, [1])


def check_a_finalize_function_that_the_probe_could_not_measure_is_refused():
    parallel()
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=True))
    chunk.config.finalize_model_grads_func = None
    for later_on, words in ((finalize_model_grads, ""), (lambda *args: None, "was None when the")):
        aggregator = LossAggregator(chunk, "token_mean")
        chunk.config.finalize_model_grads_func = functools.partial(later_on)
        with pytest.raises(ContractError, match=words) if words else contextlib.nullcontext():
            gradient_of(aggregator, [1])
        chunk.config.finalize_model_grads_func = None


def check_an_overlapping_reduction_that_nothing_holds_back_is_refused():
    parallel()
    expected = gradient_of(made(), [1, 2])
    aggregator = made(ddp={"overlap_grad_reduce": True})
    (chunk,) = aggregator.chunks
    with pytest.raises(ContractError, match=r"2 microbatches .* config\.no_sync_func is None"):
        gradient_of(aggregator, [1, 2])
    other = made(ddp={"overlap_grad_reduce": True}).chunks[0].no_sync
    for wrong in (other, [other], contextlib.nullcontext):
        chunk.config.no_sync_func = wrong
        with pytest.raises(ContractError, match=r"config\.no_sync_func is not theirs"):
            gradient_of(aggregator, [1, 2])
    for right in (chunk.no_sync, lambda: chunk.no_sync()):
        chunk.config.no_sync_func = right
        found = gradient_of(aggregator, [1, 2])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def check_an_overlap_on_one_rank_reduces_nothing_and_is_no_fault():
    """Before 0.16 Megatron stops by itself."""
    parallel(tp=2)
    expected = gradient_of(made(), [1, 2])
    aggregator = made(ddp={"overlap_grad_reduce": True})
    if Version(megatron_version()) < Version("0.16"):
        with pytest.raises(AssertionError, match="Cannot set grad twice"):
            gradient_of(aggregator, [1, 2])
        return
    torch.testing.assert_close(gradient_of(aggregator, [1, 2]), expected, rtol=1e-12, atol=1e-15)


def main():
    tiny_gpt.start()
    run_checks(globals())


if __name__ == "__main__":
    main()
