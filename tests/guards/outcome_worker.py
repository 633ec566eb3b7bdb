"""Steps whose weights are measured at the losses that a GPT returns, by Megatron's schedule."""

import contextlib
import functools
import io
import warnings

import pytest
import tiny_gpt
import token_model
import torch
from check_runner import run_checks
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_lossagg import LossAggregator, Options
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.guards.replicas import Replicas
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
def check_losses_that_are_divided_and_scaled_are_named_by_their_graph(aggregator):
    weights, _, (warned,) = train(aggregator(), lambda s, n, x: reduced(s, n, 0.3 * x / ACTIVE[n]))
    assert weights == pytest.approx([0.3 / 7, 0.1], rel=1e-5)
    assert warned.startswith("losses were divided by 7, the active tokens of their microbatch")


@both
def check_losses_divided_by_the_length_of_a_microbatchs_one_sequence_may_be_right(aggregator):
    """Means under sample_sum train sample_mean, so that such a number is warned of, not refused."""
    chunk = aggregator().chunks[0]
    gradients = []
    for mode, divisors in (("sample_sum", ACTIVE), ("sample_mean", [1, 1])):
        run = LossAggregator(chunk, mode, options=Options(probe=False))
        gradients.append(train(run, lambda s, n, x, d=divisors: reduced(s, n, x / d[n]))[1])
    torch.testing.assert_close(*gradients)


@both
def check_losses_that_are_multiplied_are_named(aggregator):
    weights, _, (warned,) = train(aggregator(), lambda s, n, x: reduced(s, n, x * 0.5))
    assert weights == [0.5, 0.5]
    assert "trained with 0.5 = 1/M = 1/DP times its weight of sample_mean" in warned


@both
def check_another_number_is_measured_and_not_warned_of(aggregator):
    for factor in (-0.3, 1 / (M**2 * 2)):  # one over a product, but of a size that is there twice
        weights, _, warned = train(aggregator(), lambda s, n, x, f=factor: reduced(s, n, f * x))
        assert weights == pytest.approx([factor, factor], rel=1e-5)
        assert not warned


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
def check_losses_of_which_all_are_0_have_no_others(aggregator):
    weights, _, warned = train(aggregator(), lambda s, n, x: reduced(s, n, x * 0))
    assert weights == [0, 0]
    (found,) = (one for one in warned if one.startswith("10 of 10 tokens"))
    assert "the others" not in found


RATIO = torch.linspace(-1, 2, LENGTH)
OF_THEIR_OWN = {
    "importance ratios and advantages, clipped": lambda x: x * RATIO * (RATIO < 1.5),
    "one advantage of a sequence, by a ratio": lambda x: -0.7 * (x.detach() - x).exp(),
    "an advantage of 0 or 1": lambda x: x * (RATIO > 0.5).double(),
    "half of a distillation": lambda x: 0.5 * x + 0.5 * RATIO,
    "smoothed labels": lambda x: 0.9 * x + 0.1 * x.detach().mean(),
    "a squared error of values": lambda x: 0.5 * (x - RATIO) ** 2,
    "rolled by one": lambda x: x.roll(1, dims=-1),
    "the mean of two passes": lambda x: 0.5 * (x + x.clone()),
    "another order": lambda x: x.view(2, -1).T.reshape(-1),
}
"""Losses with factors, an order or terms of their own: what arrives is no number of the mode's."""


@both
def check_losses_of_their_own_are_not_measured_and_not_warned_of(aggregator):
    for name, made_of in OF_THEIR_OWN.items():
        weights, _, warned = train(aggregator(), lambda s, n, x, f=made_of: reduced(s, n, f(x)))
        assert weights is None, name
        assert not warned, name


@both
def check_two_terms_over_the_same_losses_are_not_measured(aggregator):
    for modes in ((None, "token_mean"), ("token_mean", None), (None, None)):

        def of_both(step, number, output, modes=modes):
            mb = step.microbatch([number], MASKS[number], cu_seqlens=[0, LENGTH])
            first = mb.reduce(output.view(-1), modes[0])
            second = mb.reduce((output * 1).view(-1), modes[1])
            return mb.outputs(first + 0.1 * second if modes[0] is None else 0.1 * first + second)

        weights, _, warned = train(aggregator(), of_both)
        assert weights is None, modes
        assert not warned, (modes, warned)


@both
def check_a_gradient_that_is_asked_for_at_parameters_is_not_trained(aggregator):
    """Of a model whose graph may be walked twice."""
    run = LossAggregator(
        token_model.wrapped(aggregator().chunks[0].config, LENGTH),
        "sample_mean",
        options=Options(probe=False),
    )
    (chunk,) = run.chunks
    chunk.zero_grad_buffer()
    with run.step(ACTIVE[:1], num_microbatches=1) as step:
        mb = step.microbatch([0], MASKS[0], cu_seqlens=[0, LENGTH])
        partial_loss = mb.reduce(chunk(torch.arange(LENGTH)))
        torch.autograd.grad(partial_loss, [*chunk.parameters()], retain_graph=True)
        loss, num_tokens, _ = mb.outputs(partial_loss)
        (loss * step.scaling.schedule_factor).backward()
        finalize_model_grads([chunk], num_tokens if run.loss_scaling == "per_token" else None)
    assert step._guards.recorded()["ratios"] == [1, 1]


@both
def check_a_step_that_ends_with_an_error_listens_no_longer(aggregator):
    def failing(step, number, output):
        raise ValueError("mine")

    run = aggregator()
    with pytest.raises(ValueError, match="mine"):
        train(run, failing)
    assert not run.chunks[0]._forward_hooks


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
def check_a_division_of_losses_from_logits_is_named_in_each_run(aggregator):
    """In the first of the next run too, whose graph says so alone."""

    def of_logits(step, number, output, divisor=1):
        losses = output.float().logsumexp(dim=-1).view(-1) / divisor
        return reduced(step, number, losses * torch.linspace(1, 2, LENGTH))

    def divided(step, number, output):
        return of_logits(step, number, output, torch.tensor(ACTIVE[number]))

    for loss_func, told in ((of_logits, []), (divided, ["losses were divided by 7, the active"])):
        run = aggregator()
        weights, _, warned = train(run, loss_func, asks_logits=True, is_first=not told)
        assert weights is None
        assert [one[: len(text)] for one, text in zip(warned, told, strict=True)] == told
        for _ in range(2):
            train(run, of_logits, asks_logits=True, is_first=False)


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


def check_factors_of_each_tensor_parallel_rank_are_refused():
    """The last one: the ranks hold the same tokens from here on."""
    guards = []

    def times(factor, step, number, output):
        guards.append({type(one) for one in step._guards.guards})
        return reduced(step, number, output * factor)

    train(made(per_token=False), functools.partial(times, 1))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    model_parallel_cuda_manual_seed(1)
    rank = parallel_state.get_tensor_model_parallel_rank()
    for per_token in (False, True):
        run = made(per_token=per_token)
        told = "the gradients of tensor-parallel ranks 0 and 1, .* at the model's losses"
        for factor in (1 + rank, 1 - 2 * rank):
            with pytest.raises(ReducerError, match=told):
                train(run, functools.partial(times, factor))
        for _ in range(2):
            train(run, functools.partial(times, 1 + 5e-5 * rank))  # as by rounding
    assert [Replicas in found for found in guards[::M]] == [False] + [True, True, False, True] * 2


if __name__ == "__main__":
    tiny_gpt.start()
    run_checks(globals())
