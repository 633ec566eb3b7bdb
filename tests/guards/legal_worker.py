"""What loops may do: the gradient is the plain program's.

On DP 2, CP 2, PP 2 and TP 2, in both loss scalings.
"""

import functools
import inspect
import warnings
from dataclasses import replace

import custom_reducer
import pytest
import torch
import torch.distributed as dist
from audit_cases import own
from check_runner import run_checks
from faults import LAYOUTS
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from packaging.version import Version
from ranks import begin
from training_steps import Training, microbatch, plan_of, returning, right

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.contract.megatron_options import megatron_version
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.sequences import ID_KINDS
from megatron_lossagg.reduction.table import StepTotals
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


def check_a_loss_scale_that_changes_between_steps(make):
    training = make()
    for scale in (1024.0, 512.0, torch.inf, 512.0):
        training.config.grad_scale_func = lambda loss, scale=scale: loss * scale
        if scale < torch.inf:
            trained_as_by_hand(training)
        else:
            training.step(right)


def check_a_loss_scale_that_changes_inside_a_step(make):
    """Microbatches are trained with the scale that each has; it warns once."""
    training = make()
    faults._warned.discard("a loss scale that changes")

    def scaling(function):
        scales = iter((1024.0, 512.0))

        def scaled(*given):
            scale = next(scales)
            training.config.grad_scale_func = lambda loss: loss * scale
            return function(*given)

        return scaled

    expected = training.plain(scaling(own))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            same(training.step(scaling(right)), expected)
    told = [one for one in caught if "scale was 512 and 1024 in one step" in str(one.message)]
    assert len(told) == parallel_state.is_pipeline_last_stage()


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


def check_a_metric_of_one_rank_that_is_not_detached(make):
    def measured(mb, x):
        if dist.get_rank() == 1:
            leaf = x.detach().requires_grad_()
            torch.autograd.grad(mb.reduce(leaf, "token_mean"), leaf)
            mb.reduce(x**2, "token_mean")
        return mb.reduce(x)

    trained_as_by_hand(make(), returning(measured))


def check_terms_in_an_order_of_each_rank(make):
    """As those of a set have; their gradients add up."""

    def in_turn(mb, x):
        terms = {"sample_mean": 1, "token_mean": 0.1}
        order = sorted(terms, reverse=dist.get_rank() == 1)
        return sum(terms[mode] * mb.reduce(x, mode) for mode in order)

    training = make()
    expected = training.plain(lambda x, w, t: ((w + 0.1 * t) * x).sum())
    same(training.step(returning(in_turn)), expected)


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
    of_release = inspect.signature(finalize_model_grads).parameters
    arguments = {"pg_collection": None} if "pg_collection" in of_release else {}
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


def check_an_overlap_on_one_rank_reduces_nothing(make):
    """No function holds it back until the last microbatch. Before 0.16 Megatron stops by itself."""
    training = make(ddp={"overlap_grad_reduce": True})
    if training.layout.tp == 1:
        return
    training.config.no_sync_func = None
    if Version(megatron_version()) < Version("0.16"):
        with pytest.raises(AssertionError, match="Cannot set grad twice"):
            training.step(right)
        return
    same(training.step(right), make().plain(own))


def check_a_no_sync_func_of_the_loops_own(make):
    training = make(ddp={"overlap_grad_reduce": True})
    (chunk,) = training.chunks
    training.config.no_sync_func = lambda: chunk.no_sync()
    trained_as_by_hand(training)


def check_the_factor_of_a_gradient_buffer_that_changes_in_a_step(make):
    """Its buckets have their own."""
    training = make()

    def loss_func(step, batch, x):
        training.chunks[0].buffers[0].gradient_scaling_factor = 0.25
        return right(step, batch, x)

    trained_as_by_hand(training, loss_func)


def check_groups_that_are_made_again(make):
    training = make()
    expected = training.plain(own)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=training.layout.cp)
    for _ in range(2):
        same(training.step(right), expected)
    trained_as_by_hand(make())


def check_more_tokens_than_int32_in_the_average_loss_scaling(make):
    training = make()
    for n in (2**31 - 1, 2**31):
        if training.per_token and n == 2**31:
            continue
        totals = StepTotals(samples=10, active_tokens=n)
        step = training.aggregator.begin(plan_of(training, totals=totals), num_microbatches=2)
        assert step.k == (n if training.per_token else 4)


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


def check_ids_that_no_mode_term_or_shadow_reads_may_differ_between_context_parallel_ranks(make):
    training = make()
    training.aggregator = LossAggregator(
        training.chunks, "token_mean", options=Options(probe=False, shadow="token_sum:7")
    )
    rank = dist.get_rank()
    ids = {kind: [100 * rank + one for one in range(len(training.counts))] for kind in ID_KINDS}
    expected = training.plain(lambda x, w, t: (t * (x + 100 * x * x)).sum())
    term = returning(
        lambda mb, x: (
            mb.reduce(x) + mb.reduce(x * x, Aggregation("token_sum", divisor=training.total / 100))
        )
    )
    same(training.step(term, **ids), expected)


def check_terms_of_one_context_parallel_rank_each(make):
    """Each of its own tokens; neither is the other's to compare."""
    training = make()
    rank = training.aggregator.cp_rank
    mode = ("prompt_mean", "balanced")[rank]

    def term(mb, x):
        return mb.reduce(x) + 0 * mb.reduce(x * x, mode)

    ids = list(range(len(training.counts)))
    trained_as_by_hand(training, returning(term), prompt=ids, group=ids)


def check_own_weights_that_differ_by_rounding(make):
    """As of two machines; more is refused."""
    training = make()
    rank = dist.get_rank()
    for error in (0.0, 1e-15, 3e-12):

        def weights(counts, error=error):
            return (1 + rank * error) / (counts.B * counts.n_b)

        training.aggregator = LossAggregator(
            training.chunks, Aggregation(weights=weights), options=Options(probe=False)
        )
        trained_as_by_hand(training)


def check_a_ratio_of_two_terms_of_the_whole_step(make):
    training = make()
    sums = torch.zeros(2, dtype=torch.float64)

    def evaluated(step, batch, x):
        mb = microbatch(step, batch)
        both = mb.reduce(x), mb.reduce(x**2)
        sums.add_(torch.stack(both).detach())
        return mb.outputs(both[0])

    with training.plan(forward_only=True) as step:
        training.run(functools.partial(evaluated, step), forward_only=True)
    dist.all_reduce(sums)
    a, b = sums.tolist()
    expected = training.plain(lambda x, w, t: (w * (x / b - a / b**2 * x**2)).sum())
    ratio = returning(
        lambda mb, x: mb.reduce(x) / b - a / b**2 * mb.reduce(x**2), coefficient=1 / b
    )
    same(training.step(ratio), expected)


OF_PIPELINES = (
    check_a_loss_scale_that_changes_between_steps,
    check_a_loss_scale_that_changes_inside_a_step,
    check_metrics_at_any_time_of_a_step,
)
OF_TENSOR_PARALLELISM = (
    check_an_overlap_on_one_rank_reduces_nothing,
    check_a_loss_func_that_runs_again_on_one_rank,
    check_a_metric_of_one_rank_that_is_not_detached,
    check_terms_in_an_order_of_each_rank,
)


def made(layout, per_token, *, ddp=None, of_last=None, **sizes):
    """Make a model, its aggregator and its microbatches."""
    return Training(replace(layout, **sizes), per_token=per_token, ddp=ddp, of_last=of_last)


def main(namespace, of_pipelines=(), of_tensor_parallelism=()):
    """Run a worker's checks on each parallelism, in both loss scalings."""
    begin()
    of_layouts = {
        "DP 2": namespace,
        "CP 2": namespace,
        "PP 2": {one.__name__: one for one in of_pipelines},
        "TP 2": {one.__name__: one for one in of_tensor_parallelism},
    }
    for name, checks in of_layouts.items():
        layout = LAYOUTS[name]
        with split_world(layout):
            for per_token in (False, True):
                run_checks(checks, functools.partial(made, layout, per_token))


if __name__ == "__main__":
    main(globals(), OF_PIPELINES, OF_TENSOR_PARALLELISM)
