"""What loops may do: the gradient is the plain program's.

On DP 2, CP 2, PP 2 and TP 2, in both loss scalings.
"""

import functools
import itertools
import warnings
from dataclasses import replace

import custom_reducer
import pytest
import torch
import torch.distributed as dist
from audit_cases import own
from check_runner import run_checks
from fault_table import LAYOUTS
from legal_losses import VARIED
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from packaging.version import Version
from training_steps import (
    Training,
    begin,
    changing,
    microbatch,
    plan_of,
    returning,
    right,
)

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.contract.live import megatron_version
from megatron_lossagg.reduction import faults
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


def check_counts_of_other_kinds(make):
    training = make()
    expected, counts = training.plain(own), training.counts
    for kind in (torch.tensor, lambda numbers: [torch.tensor(one) for one in numbers]):
        training.counts = kind(counts)
        same(training.step(right), expected)


def trained_weights(training, counts, mask, offsets):
    """Return the weights with which this rank's tokens are trained in one microbatch."""
    with training.aggregator.step(counts, num_microbatches=1) as step:
        mb = step.microbatch(range(len(counts)), mask, cu_seqlens=offsets)
        x = torch.ones(mb.layout.num_local_tokens, dtype=torch.float64, requires_grad=True)
        (mb.outputs(mb.reduce(x))[0] * step.scaling.schedule_factor).backward()
    return x.grad / (step.k * step.scaling.schedule_factor)


def check_a_mask_that_is_expanded_from_one_element(make):
    training = make()
    found = trained_weights(training, [8], torch.ones(1).expand(8), [0, 8])
    same(found, torch.full_like(found, 1 / (8 * training.layout.dp)))


def check_a_counted_sequence_of_no_tokens(make):
    training = make()
    found = trained_weights(training, [8, 0, 8], torch.ones(16), [0, 8, 8, 16])
    same(found, torch.full_like(found, 1 / (8 * 3 * training.layout.dp)))


def check_a_mask_that_differs_where_a_context_parallel_rank_holds_nothing(make):
    """The number of each sequence's tokens is the same."""
    training = make()
    changed = []

    def loss_func(step, batch, x):
        mask, offsets = batch.mask.clone(), batch.offsets.tolist()
        held = training.layout.held(offsets, training.aggregator.cp_rank)
        if training.aggregator.cp_rank == 1:
            for start, end in itertools.pairwise(offsets):
                elsewhere = [index for index in range(start, end) if index not in held]
                mask[elsewhere] = batch.mask[elsewhere].flip(0)
        changed.append(not mask.equal(batch.mask))
        mb = step.microbatch(batch.sequences, mask, cu_seqlens=batch.offsets)
        return mb.outputs(mb.reduce(x))

    trained_as_by_hand(training, loss_func)
    assert any(changed) == (training.aggregator.cp_rank == 1)


def check_outputs_without_num_tokens(make):
    """As long as Megatron neither divides by them nor, without them, multiplies by CP."""
    training = make()
    if not training.per_token and training.layout.cp == 1:
        trained_as_by_hand(training, changing(lambda loss, num_tokens, report: (loss, report)))


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


def check_an_overlap_on_one_rank_reduces_nothing(make):
    """Before 0.16 Megatron stops by itself."""
    training = make(ddp={"overlap_grad_reduce": True})
    if training.layout.tp == 1:
        return
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


OF_PIPELINES = (
    check_a_loss_scale_that_changes_between_steps,
    check_a_loss_scale_that_changes_inside_a_step,
    check_metrics_at_any_time_of_a_step,
)


def made(layout, per_token, *, ddp=None, of_last=None, **sizes):
    """Make a model, its aggregator and its microbatches."""
    return Training(replace(layout, **sizes), per_token=per_token, ddp=ddp, of_last=of_last)


def main(namespace, of_pipelines, of_tensor_parallelism=()):
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
    main(globals(), OF_PIPELINES, [check_an_overlap_on_one_rank_reduces_nothing])
