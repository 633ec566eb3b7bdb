"""What loops may do: the gradient is the plain program's; DP 2, CP 2 and PP 2, both scalings."""

import functools
import warnings
from dataclasses import replace

import custom_reducer
import torch
import torch.distributed as dist
from audit_cases import LAYOUTS, own
from check_runner import run_checks
from legal_losses import VARIED
from megatron.core.distributed import finalize_model_grads
from training_steps import Training, begin, microbatch, plan_of, returning, right

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.reduction.counts import StepTotals
from megatron_lossagg.reduction.options import Options
from megatron_lossagg.verify.world import split_world


def same(found, expected, tolerance=1e-10):
    assert expected.norm() > 0
    error = (found - expected).norm() / expected.norm()
    assert error <= tolerance, error.item()


def make_anew(training):
    options = Options(probe=False)
    training.aggregator = LossAggregator(training.chunks, "sample_mean", options=options)


def trained_as_by_hand(training, loss_func=right, *, tolerance=1e-10, scale=1.0, **options):
    """Train a step, and compare with the plain program's."""
    expected = training.plain(own) * scale
    same(training.step(loss_func, **options), expected, tolerance)


def check_inputs_of_other_kinds(make):
    training = make()
    expected = training.plain(own)
    for name, (loss_func, tolerance) in VARIED.items():
        if training.layout.cp > 1 and "CP 1" in name:
            continue
        try:
            same(training.step(loss_func), expected, tolerance)
        except Exception as error:
            error.add_note(name)
            raise


def check_a_loss_scale_that_changes_between_steps(make):
    training = make()
    for scale in (1024.0, 512.0, torch.inf, 512.0):
        training.config.grad_scale_func = lambda loss, scale=scale: loss * scale
        if scale < torch.inf:
            trained_as_by_hand(training)
        else:
            training.step(right)


def check_a_plan_of_known_totals(make):
    training = make()
    totals = StepTotals(samples=10, active_tokens=training.total)
    expected = training.plain(own)
    plan = plan_of(training, totals=totals)
    with training.aggregator.begin(plan, num_microbatches=2) as step:
        found = training.run(functools.partial(right, step))
    same(found, expected)


def check_a_loss_func_that_runs_again_on_one_rank(make):
    """As after an error of the device's memory."""

    def retrying(step, batch, x):
        if dist.get_rank() == 1:
            microbatch(step, batch).reduce(x)
        return right(step, batch, x)

    trained_as_by_hand(make(), retrying)


def check_metrics_at_any_time_of_a_step(make):
    training = make()
    other = plan_of(training)
    made = []

    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        loss = mb.reduce(x)
        returned = mb.outputs(loss, report={"loss": loss})
        mb.reduce(x), mb.reduce(x * 2, "token_mean")  # after outputs, and not trained
        for earlier, losses in made:
            earlier.reduce(losses)
        made.append((mb, x))
        with torch.no_grad():
            layout = training.aggregator.thd(batch.offsets)
            other.reducer(batch.sequences, batch.mask, layout)(x)
        return returned

    trained_as_by_hand(training, loss_func)


def check_microbatches_grow_in_number(make):
    for m in (1, 2, 3):
        trained_as_by_hand(make(microbatches=m))


def check_actor_and_critic(make):
    """One after the other, and both steps open."""
    actor, critic = make(), make()
    for training in (actor, critic):
        trained_as_by_hand(training)
    expected = actor.plain(own)
    with actor.plan() as outer:
        with critic.plan() as inner:
            found = critic.run(functools.partial(right, inner))
        same(found, expected)
        same(actor.run(functools.partial(right, outer)), expected)


def check_a_finalize_function_that_is_made_anew_with_the_same_arguments(make):
    training = make()
    arguments = {"pg_collection": None}
    for before_step in (make_anew, trained_as_by_hand):
        function = functools.partial(finalize_model_grads, **arguments)
        training.config.finalize_model_grads_func = function
        before_step(training)


def check_a_finalize_function_that_training_sets_after_the_aggregator(make):
    training = make()
    training.config.finalize_model_grads_func = None
    training.aggregator = LossAggregator(training.chunks, "sample_mean")  # with the probe
    training.config.finalize_model_grads_func = functools.partial(finalize_model_grads)
    trained_as_by_hand(training)


def check_an_aggregation_that_the_ranks_agreed_on(make):
    training = make()
    other = Aggregation("token_mean")
    training.aggregator.agree_on(other)
    expected = training.plain(lambda x, w, t: (t * x).sum())
    with training.aggregator.begin(plan_of(training, mode=other), num_microbatches=2) as step:
        same(training.run(functools.partial(right, step)), expected)


def check_ddp_of_other_kinds(make):
    for ddp in ("overlap_grad_reduce", "average_in_collective"):
        trained_as_by_hand(make(ddp={ddp: True}))


def check_a_no_sync_func_of_the_loops_own(make):
    training = make(ddp={"overlap_grad_reduce": True})
    (chunk,) = training.chunks
    training.config.no_sync_func = lambda: chunk.no_sync()
    trained_as_by_hand(training)


def check_more_tokens_than_int32_in_the_average_loss_scaling(make):
    training = make()
    for n in (2**31 - 1, 2**31):
        if training.per_token and n == 2**31:
            continue
        totals = StepTotals(samples=10, active_tokens=n)
        step = training.aggregator.begin(plan_of(training, totals=totals), num_microbatches=2)
        assert step.k == (n if training.per_token else 4)


def check_an_own_loop_that_finalizes_after_the_step(make):
    """Backward passes by hand, without the schedule; only where nothing divides at the end."""
    training = make()
    if training.per_token:
        return
    expected = training.plain(own)
    (chunk,) = training.chunks
    chunk.zero_grad_buffer()
    with training.plan() as step:
        for batch in training.batches:
            output = training.forward(batch)
            loss, _, _ = right(step, batch, output)
            (loss / training.m).backward()
    finalize_model_grads([chunk])
    same(training.gradient(), expected)


def check_token_weights_counted_in_a_second_term(make):
    weighing = Aggregation("sample_mean", count="weights")
    aggregator = make().aggregator
    weights = torch.full((8,), 0.5)
    with aggregator.step([8], num_microbatches=1, token_weight_sums=[4.0]) as step:
        mb = step.microbatch([0], torch.ones(8), cu_seqlens=[0, 8], token_weights=weights)
        x = torch.ones(mb.layout.num_local_tokens, requires_grad=True)
        loss = mb.outputs(mb.reduce(x) + mb.reduce(x, weighing))[0]
        (loss * step.scaling.schedule_factor).backward()
    assert x.grad.count_nonzero() == x.numel()


def empty(loss):
    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        is_empty = not batch.mask.any()
        return mb.outputs(loss(mb, x)) if is_empty else mb.outputs(mb.reduce(x))

    return loss_func


EMPTY = {
    "its losses reduced": lambda mb, x: mb.reduce(x),
    "zero times its losses": lambda mb, x: x.sum() * 0,
    "a constant": lambda mb, x: torch.zeros(()),
    "constants reduced": lambda mb, x: mb.reduce(torch.zeros_like(x)),
}
"""Losses of a microbatch without tokens."""


def check_an_empty_microbatch(make):
    training = make(microbatches=2, of_last=0)
    expected = training.plain(own)
    for loss in EMPTY.values():
        same(training.step(empty(loss)), expected)


def check_a_step_without_tokens_has_losses_without_a_graph(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = make().aggregator.step([0, 0], num_microbatches=1)
    with step:
        mb = step.microbatch([0, 1], torch.zeros(8), cu_seqlens=[0, 4, 8])
        mb.outputs(mb.reduce(torch.ones(mb.layout.num_local_tokens)))


def check_a_custom_reducer(make):
    def factory(context):
        return lambda x: x.sum() / context.plan.totals.active_tokens

    training = make()
    aggregation = custom_reducer.custom(factory)
    expected = training.plain(lambda x, w, t: (t * x).sum())
    training.aggregator = LossAggregator(training.chunks, aggregation, options=Options(probe=False))
    same(training.step(right), expected)


def check_a_loss_reduced_over_cp_in_place_for_the_log(make):
    training = make()
    group = training.aggregator.groups.cp_group

    def loss(mb, x):
        partial_loss = mb.reduce(x)
        dist.all_reduce(partial_loss.detach(), group=group)
        return partial_loss

    trained_as_by_hand(training, returning(loss))


LAYOUTS_AND_SCALINGS = (("DP 2", False), ("CP 2", True), ("PP 2", False))
OF_PIPELINES = (
    check_a_loss_scale_that_changes_between_steps,
    check_metrics_at_any_time_of_a_step,
)


def made(layout, per_token, *, ddp=None, of_last=None, **sizes):
    """Make a model, its aggregator and its microbatches."""
    return Training(replace(layout, **sizes), per_token=per_token, ddp=ddp, of_last=of_last)


def main():
    begin()
    for name, per_token in LAYOUTS_AND_SCALINGS:
        layout = LAYOUTS[name]
        checks = globals() if layout.pp == 1 else {one.__name__: one for one in OF_PIPELINES}
        with split_world(layout):
            run_checks(checks, functools.partial(made, layout, per_token))


if __name__ == "__main__":
    main()
