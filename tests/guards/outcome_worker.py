"""Steps whose weights are measured at the losses that a GPT returns, by Megatron's schedule."""

import contextlib
import functools
import io
import warnings

import pytest
import tiny_gpt
import torch
from check_runner import run_checks
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lossagg import LossAggregator, Options
from megatron_lossagg.reduction import faults

LENGTH, M = 8, 2
MASKS = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]])
ACTIVE = MASKS.sum(dim=1).tolist()


def made(*, per_token, **config):
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=per_token, **config))
    chunk.config.finalize_model_grads_func = finalize_model_grads
    return LossAggregator(chunk, "sample_mean", options=Options(probe=False))


def forward_step(step, loss_func, asks_logits, iterator, model):
    number = next(iterator)
    seed = torch.Generator().manual_seed(number + 10 * parallel_state.get_data_parallel_rank())
    tokens, labels = torch.randint(0, 16, (2, 1, LENGTH), generator=seed)
    positions = torch.arange(LENGTH)[None]
    output = model(tokens, positions, None, labels=None if asks_logits else labels)
    return output, functools.partial(loss_func, step, number)


def reduced(step, number, losses, **declared):
    mb = step.microbatch([number], MASKS[number], cu_seqlens=[0, LENGTH])
    partial_loss = mb.reduce(losses.view(-1))
    return mb.outputs(partial_loss * declared.get("coefficient", 1), **declared)


def as_it_is(step, number, output):
    return reduced(step, number, output)


def train(aggregator, loss_func=as_it_is, *, asks_logits=False, is_first=True):
    """Train a step; return the measured weights, its gradient, and what it warned of."""
    (chunk,) = aggregator.chunks
    chunk.zero_grad_buffer()
    if is_first:
        faults._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with aggregator.step(ACTIVE, num_microbatches=M) as step:
            get_forward_backward_func()(
                forward_step_func=functools.partial(forward_step, step, loss_func, asks_logits),
                data_iterator=iter(range(M)),
                model=[chunk],
                num_microbatches=M,
                seq_length=LENGTH,
                micro_batch_size=1,
                forward_only=False,
            )
    gradient = torch.cat([one.main_grad.flatten() for one in chunk.parameters()])
    found = [str(one.message) for one in caught if one.category is RuntimeWarning]
    return step._guards.recorded().get("ratios"), gradient, found


def both(check):
    def of_both():
        for per_token in (False, True):
            check(functools.partial(made, per_token=per_token))

    return of_both


@both
def check_a_right_step_has_the_weights_of_its_mode(aggregator):
    weights, _, warned = train(aggregator())
    assert weights == [1, 1]
    assert not warned


@both
def check_a_loss_scale_is_no_factor(aggregator):
    weights, _, warned = train(aggregator(grad_scale_func=lambda loss: loss * 1024))
    assert weights == [1, 1]
    assert not warned


@both
def check_losses_that_are_divided_are_named(aggregator):
    def divided(step, number, output):
        return reduced(step, number, output / ACTIVE[number])

    weights, _, (warned,) = train(aggregator(), divided)
    assert weights == pytest.approx([1 / 7, 1 / 3], rel=1e-5)
    assert warned.startswith("losses were divided by 7, the active tokens of their microbatch")


@both
def check_losses_that_are_multiplied_are_named(aggregator):
    weights, _, (warned,) = train(aggregator(), lambda s, n, x: reduced(s, n, x * 0.5))
    assert weights == [0.5, 0.5]
    assert "trained with 0.5 times its weight of sample_mean" in warned


@both
def check_a_declared_coefficient_is_no_factor(aggregator):
    def halved(step, number, output):
        return reduced(step, number, output, coefficient=0.5)

    weights, _, warned = train(aggregator(), halved)
    assert weights == [1, 1]
    assert not warned


@both
def check_losses_of_which_some_are_detached_are_named(aggregator):
    def half_detached(step, number, output):
        is_kept = torch.arange(LENGTH) % 2 == 0
        return reduced(step, number, torch.where(is_kept, output, output.detach()))

    weights, _, (warned,) = train(aggregator(), half_detached)
    assert weights == [0, 1]
    assert warned.startswith("4 of 10 tokens that sample_mean counts were not trained")


@both
def check_factors_of_tokens_are_no_fault(aggregator):
    """Importance ratios times advantages, and a clipped token."""

    def weighted(step, number, output):
        ratio = torch.linspace(-1, 2, LENGTH)
        return reduced(step, number, output * ratio * (ratio < 1.5))

    weights, _, warned = train(aggregator(), weighted)
    assert weights[0] == -1
    assert not warned


@both
def check_a_term_of_its_own_mode_is_no_fault(aggregator):
    def with_second_term(step, number, output):
        mb = step.microbatch([number], MASKS[number], cu_seqlens=[0, LENGTH])
        losses = output.view(-1)
        return mb.outputs(mb.reduce(losses) + 0.1 * mb.reduce(losses**2, "token_mean"))

    weights, _, warned = train(aggregator(), with_second_term)
    assert weights
    assert not warned


@both
def check_what_autograd_is_asked_for_is_not_trained(aggregator):
    def looking(step, number, output):
        torch.autograd.grad(output.sum(), output, retain_graph=True)
        return reduced(step, number, output)

    weights, _, warned = train(aggregator(), looking)
    assert weights == [1, 1]
    assert not warned


@both
def check_losses_changed_in_place_are_seen(aggregator):
    def halving(step, number, output):
        return reduced(step, number, output.clone().mul_(0.5))

    weights, _, warned = train(aggregator(), halving)
    assert weights == [0.5, 0.5]
    assert warned


@both
def check_a_model_of_logits_is_not_looked_at(aggregator):
    def of_logits(step, number, output):
        return reduced(step, number, output.float().logsumexp(dim=-1).view(-1))

    weights, _, warned = train(aggregator(), of_logits, asks_logits=True)
    assert weights is None
    assert not warned


@both
def check_a_weighed_step_trains_bit_by_bit_what_another_does(aggregator):
    run = aggregator()
    steps = [train(run) for _ in range(3)]
    assert [weights is not None for weights, _, _ in steps] == [True, True, False]
    assert torch.equal(steps[0][1], steps[2][1])
    assert not run.chunks[0]._forward_hooks


def check_the_first_rank_says_once_what_it_measured():
    said, run = io.StringIO(), made(per_token=False)
    with contextlib.redirect_stderr(said):
        train(run)
        train(run, is_first=False)
    lines = [line for line in said.getvalue().splitlines() if "trained with" in line]
    right = "tokens were trained with the weight of sample_mean, times 1.000000 to 1.000000"
    assert [right in line for line in lines] == [True] * run.groups.is_first


if __name__ == "__main__":
    tiny_gpt.start()
    run_checks(globals())
