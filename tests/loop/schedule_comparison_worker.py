"""The comparison of a framework's own loss with the masked sum that is replaced; DP 2."""

import dataclasses
import functools
import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hooked_loop import (
    M,
    OfDicts,
    a_hook,
    assert_trains_by_hand,
    batches,
    forward_step,
    framework_loss,
    of_both_ranks,
    refused,
    run,
    run_worker,
    with_loss,
)
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from benchmarks.counting import counted
from megatron_lossagg.errors import PlanError, ReducerError
from megatron_lossagg.guards.framework_loss import compare_with_framework
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.faults import looks_again


def changed(change):
    """Return a forward_step whose loss_func gives ``change(loss, mask)`` instead of its loss."""

    def changed_loss(mask, output):
        loss, *rest = framework_loss(mask, output)
        return change(loss, mask), *rest

    return with_loss(lambda mask: functools.partial(changed_loss, mask))


def refilling():
    ids = torch.zeros(64)  # more than the tokens of a microbatch
    for number, data in enumerate(batches(0)):
        ids.fill_(number)
        yield {**data, "more": SimpleNamespace(held=SimpleNamespace(ids=[ids]))}


def check_a_loss_with_another_term_is_refused_in_whichever_microbatch_it_comes(chunk, stock):
    masked = batches(0)
    masked[0]["loss_mask"].zero_()
    for data, of in ((batches(0), 0), (masked, 1)):
        calls = itertools.count()
        step = changed(lambda loss, mask, n=calls, of=of: loss + 0.5 * (next(n) == of))
        with refused(
            ReducerError, f"microbatch {of} of rank {dist.get_rank()}: the script", "not known"
        ):
            run(a_hook().wrap(stock), chunk, data, forward_step_func=step)


def check_another_term_is_warned_of_and_trains_on_where_guards_only_warn(chunk, stock):
    weight = chunk.module.output_layer.weight
    for term in (lambda: 0.5, lambda: 1e-12 * weight.square().sum()):  # by its value, by its graph
        faults._warned.clear()  # it is warned of once
        step = changed(lambda loss, mask, term=term: loss + term())
        with pytest.warns(RuntimeWarning, match="^FrameworkLoss: microbatch 0 of rank"):
            run(a_hook(guards="warn").wrap(stock), chunk, batches(0), forward_step_func=step)


def check_a_loss_behind_a_reentrant_checkpoint_trains(chunk, stock):
    """It lets no one ask for gradients, so that values alone are compared."""

    def checkpointed(mask, output):
        return framework_loss(mask, checkpoint(torch.abs, output, use_reentrant=True))

    step = with_loss(lambda mask: functools.partial(checkpointed, mask))
    run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)


def check_memory_that_is_refilled_is_found_between_evaluations(chunk, stock):
    """Which do not count: training step 2 is looked at, and the third call is not."""
    schedule = a_hook().wrap(stock)
    run(schedule, chunk, batches(0))
    run(schedule, chunk, batches(0), forward_only=True)
    with refused(PlanError, "ids[0] of microbatch 0 was filled again after it was read"):
        run(schedule, chunk, refilling())


def check_a_penalty_that_warms_up_and_a_factor_from_a_later_step_on_are_refused(chunk, stock):
    for change in (lambda loss, beta: loss + beta, lambda loss, beta: loss * (1 - 0.9 * beta)):
        beta = torch.zeros(())
        step = changed(lambda loss, mask, change=change, beta=beta: change(loss, beta))
        schedule = a_hook().wrap(stock)
        for _ in range(2):
            run(schedule, chunk, batches(0), forward_step_func=step)
        beta += 1
        with refused(ReducerError, "terms or factors that are not known here"):
            run(schedule, chunk, batches(0), forward_step_func=step)


def check_the_comparison_waits_for_no_device(chunk, stock):
    losses = torch.ones(4, device="meta", requires_grad=True)
    mask = torch.ones(4, device="meta")
    loss_func = functools.partial(framework_loss_of_a_device, mask)
    framework = PretrainIntegration().loss(loss_func, losses)
    given = framework.masked_sum, framework.losses, framework.mask, None
    (value, *_), _ = compare_with_framework(*given, output=get_gradient_edge(losses))
    with pytest.raises(NotImplementedError, match="meta"):  # when it is read
        value.cpu()


def check_the_comparison_takes_few_operations(chunk, stock):
    for is_close, most in ((False, 8), (True, 24)):
        output = torch.rand(8, requires_grad=True) * 2
        edge = get_gradient_edge(output) if is_close else None
        mask = torch.ones(8)
        with counted() as found:
            compare_with_framework((output * mask).sum(), output, mask, None, output=edge)
        assert found.num_operations - 2 <= most, found  # 2 of the framework's loss


def framework_loss_of_a_device(mask, output):
    loss = (output * mask).sum()
    return loss, mask.sum().int(), {"lm loss": torch.stack([loss.detach(), mask.sum()])}


def check_an_inf_at_a_masked_position_is_no_term(chunk, stock):
    def poisoned(iterator, model):
        output, loss_func = forward_step(iterator, model)
        (mask,) = loss_func.args
        output = torch.where(mask == 0, torch.inf, output)
        return output, loss_func

    run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=poisoned)


def check_a_term_without_a_value_is_compared_by_its_gradient(chunk, stock):
    """As an unbiased estimate of a divergence has one."""
    step = changed(lambda loss, mask: loss + loss**2 - (loss**2).detach())
    with refused(ReducerError, "and their gradients differ by", "not known here"):
        run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)


def check_a_loss_func_may_mask_in_place(chunk, stock):
    def in_place(mask, output):
        output.view(-1).mul_(mask.view(-1))
        return framework_loss(mask, output)

    step = with_loss(lambda mask: functools.partial(in_place, mask))
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks(), forward_step_func=step)


def check_a_small_penalty_of_weights_is_refused_by_the_parameter_that_it_reaches(chunk, stock):
    """Its value is below what a comparison can tell from rounding, or 0."""
    weight = chunk.module.output_layer.weight
    start = weight.detach().clone()
    terms = (
        lambda: 1e-12 * weight.square().sum(),
        lambda: weight.sum() - start.sum(),
        lambda: (weight[:1] - start[:1]).sum(),
        lambda: 0 * weight.sum() + weight.view(-1)[0] * 1e-12,
    )
    for term in terms:
        step = changed(lambda loss, mask, term=term: loss + term())
        with refused(ReducerError, f"a parameter of shape {list(weight.shape)} not by", "penalty"):
            run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)


def check_a_distance_from_the_start_is_refused_once_the_weights_have_moved(chunk, stock):
    """In the first step it has no gradient."""
    weight, schedule = chunk.module.output_layer.weight, a_hook().wrap(stock)
    start = weight.detach().clone()
    step = changed(lambda loss, mask: loss + 1e-6 * (weight - start).square().sum())
    run(schedule, chunk, batches(0), forward_step_func=step)
    with torch.no_grad():
        weight += 1e-3
    with refused(ReducerError, "that reaches a parameter of shape", "penalty"):
        run(schedule, chunk, batches(0), forward_step_func=step)


def check_an_integration_that_compares_nothing_loses_no_penalty_of_weights(chunk, stock):
    class NotCompared(OfDicts):
        def loss(self, loss_func, output):
            return dataclasses.replace(super().loss(loss_func, output), masked_sum=None)

    step = changed(lambda loss, mask: loss + chunk.module.output_layer.weight.square().sum())
    hook = ScheduleHook("sample_mean", NotCompared())
    with refused(ReducerError, "that reaches a parameter of shape", "not by the model's output"):
        run(hook.wrap(stock), chunk, batches(0), forward_step_func=step)


class Halved(torch.autograd.Function):
    """A sum whose backward pass passes half on."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient / 2).expand(ctx.shape)


def check_a_term_without_a_gradient_and_a_leaf_of_the_script_are_no_terms(chunk, stock):
    """As for parameters that a microbatch does not use."""
    weight, zero = chunk.module.output_layer.weight, torch.zeros(())
    no, inf = torch.zeros(weight.shape, dtype=torch.bool), torch.tensor(torch.inf)
    signs = torch.tensor([1.0, -1.0])[:, None, None]
    terms = {
        "0.0 * sum": lambda: 0.0 * sum(one.sum() for one in chunk.module.parameters()),
        "p * 0": lambda: (weight * 0).sum(),
        "a sum of nothing": lambda: sum(
            one.view(-1)[:0].sum() for one in chunk.module.parameters()
        ),
        "zeros_like": lambda: (torch.zeros_like(weight) * weight).sum(),
        "a coefficient that is a tensor": lambda: zero.clone() * weight.square().sum(),
        "p - p": lambda: (weight - weight).sum(),
        "two sums": lambda: weight.sum() - weight.sum(),
        "two signs by broadcasting": lambda: (weight * signs).sum(),
        "alpha=0": lambda: torch.add(weight.new_zeros(()), weight.sum(), alpha=0),
        "where": lambda: torch.where(no, weight, 0).sum(),
        "lerp": lambda: torch.lerp(torch.zeros_like(weight), weight, 0.0).sum(),
        "a division by inf": lambda: weight.sum() / inf,
        "unbind": lambda: 0 * weight.unbind()[1].sum(),
        "a Function": lambda: 0 * Halved.apply(weight),
        "behind a Function": lambda: 0 * Halved.apply(weight.view(-1)),
        "a leaf of the script": lambda: torch.zeros((), requires_grad=True),
    }
    calls = []
    handle = weight.register_hook(calls.append)
    try:
        for name, term in terms.items():
            step = changed(lambda loss, mask, term=term: loss + term())
            found = of_both_ranks()
            assert_trains_by_hand(a_hook().wrap(stock), chunk, found, forward_step_func=step)
            assert len(calls) == M + 1, name  # of each backward pass, and of that by hand
            calls.clear()
    finally:
        handle.remove()


def check_a_term_whose_gradient_cannot_be_computed_is_refused_and_says_so(chunk, stock):
    """Neither by a Function of its own, nor through the model's output."""
    weight = chunk.module.output_layer.weight

    def shared(iterator, model):
        """A node that leads to a weight, for the model's output and for a term."""
        output, loss_func = forward_step(iterator, model)
        twice = weight * 2
        output = output + 0 * twice.sum()
        output.grad_fn.register_hook(lambda *_: passes.append(1))

        def with_term(mask, output):
            loss, *rest = framework_loss(mask, output)
            return loss + 1e-9 * twice.sum(), *rest

        return output, functools.partial(with_term, *loss_func.args)

    own, passes = changed(lambda loss, mask: loss + 1e-9 * Halved.apply(weight)), []
    for step, words in (
        (own, "What HalvedBackward passes on to it was not computed"),
        (shared, "Its gradient could not be computed: RuntimeError(\"the model's backward pass"),
    ):
        with refused(ReducerError, "that reaches a parameter of shape", words):
            run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)
    assert len(passes) == M  # of Megatron's own


def check_graph_and_gradient_are_compared_in_steps_1_2_4_and_8(chunk, stock):
    """A term without a value that begins in step 3 is refused in step 4."""
    beta, calls = torch.zeros(()), []

    def counted(loss, mask):
        loss = loss + beta * (loss**2 - (loss**2).detach())
        loss.register_hook(lambda gradient: calls.append(1))
        return loss

    schedule, found = a_hook().wrap(stock), []
    for _ in range(8):
        calls.clear()
        run(schedule, chunk, batches(0), forward_step_func=changed(counted))
        found.append(len(calls))
    assert found == [M, M, 0, M, 0, 0, 0, M]
    for step in range(9, 17):
        beta.fill_(step > 9)
        with refused(ReducerError, "their gradients differ") if step == 16 else nullcontext():
            run(schedule, chunk, batches(0), forward_step_func=changed(counted))
    closely = [step for step in range(1, 300) if looks_again(step)]
    assert closely == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def check_each_run_of_a_process_has_its_memory_looked_at_from_its_first_step(chunk, stock):
    """Of three in a row, for a count of the process's steps may be a power of two by chance."""
    for _ in range(3):
        with refused(PlanError, "ids[0] of microbatch 0 was filled again after it was read"):
            run(a_hook().wrap(stock), chunk, refilling())


class OnlyOnce(torch.autograd.Function):
    """A sum whose backward pass changes what it has saved, as Megatron's cross entropy does."""

    @staticmethod
    def forward(ctx, x):
        saved = torch.ones_like(x)
        ctx.save_for_backward(saved)
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved.mul_(gradient)


def check_a_shadow_runs_no_backward_pass_of_the_loss_that_is_trained(chunk, stock):
    def once(mask, output):
        _, *rest = framework_loss(mask, output)
        return OnlyOnce.apply(output.view(-1) * mask.view(-1)), *rest

    step = with_loss(lambda mask: functools.partial(once, mask))
    integration = OfDicts()
    hook = ScheduleHook(None, integration, options=Options(shadow="token_mean"))
    run(hook.wrap(stock), chunk, batches(0), forward_step_func=step)


def check_an_evaluation_is_not_compared(chunk, stock):
    step = changed(lambda loss, mask: loss + 0.5)
    with torch.no_grad():
        run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step, forward_only=True)


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
