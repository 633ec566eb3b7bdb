"""What a loop of one's own may do wrong, through Megatron's own schedule; two ranks."""

import functools

import pytest
import tiny_gpt
import torch
from check_runner import run_checks
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from packaging.version import Version

from megatron_lossagg import LossAggregator
from megatron_lossagg.contract.live import megatron_version
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
    gradient_of(aggregator, [1, 2], accumulates=2)
    for group in aggregator.chunks[0].bucket_groups:
        group.reset()
    both = gradient_of(aggregator, [3, 4], zero=False, accumulates=2)
    torch.testing.assert_close(both, sum(apart) / 2, rtol=1e-12, atol=1e-15)


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
