"""Deferred steps that are refused."""

from contextlib import suppress
from functools import partial

import torch.distributed as dist
from faults import caught_by
from faults_before_a_step import an_aggregator
from megatron.core.distributed import finalize_model_grads
from torch.cuda import OutOfMemoryError
from training_steps import Training, microbatch, plan_of, returning, right

from megatron_lossagg import Aggregation

REDUCER_OF_THE_PLAN = (
    r"got a reducer of the plan that a schedule call was begun with.*step\.plan\.under"
)


def raising(step, batch, x):
    raise OutOfMemoryError


@caught_by(
    "deferred",
    "side losses",
    r"side losses \(MoE\), which .* by M of each call: train token_mean",
    "MoE",
    "token_mean",
)
@caught_by(
    "deferred",
    "side losses under sample_mean",
    r"side losses \(MoE\)",
    "MoE",
    "sample_mean",
    per_token=True,
)
def deferred_by_one(training, mode):
    training = Training(training.layout, per_token=training.per_token, mode=mode)
    with training.aggregator.deferred():
        training.plan()


@caught_by(
    "deferred",
    "a mode without a total",
    "deferred step under microbatch_token_mean, whose .* no one total.*train token_mean, ",
)
def deferred_by_microbatch(training):
    training = Training(training.layout, mode="microbatch_token_mean")
    microbatch = [0] * len(training.counts)
    with training.aggregator.deferred():
        training.plan(microbatch=microbatch)


@caught_by(
    "deferred",
    "two aggregations",
    "a schedule call under token_mean.*in a deferred step under sample_mean",
)
def deferred_under_two(training):
    aggregator, other = training.aggregator, Aggregation("token_mean")
    aggregator.agree_on(other)
    with aggregator.deferred():
        training.step(right)
        aggregator.begin(plan_of(training, mode=other), num_microbatches=training.m)


@caught_by("deferred", "accumulates=", "accumulates=2 in a deferred step.*leave it out")
def deferred_and_accumulated(training):
    with training.aggregator.deferred():
        training.plan(accumulates=2)


@caught_by("deferred", "a call that failed", "a schedule call of the deferred step failed")
def deferred_after_an_error(training):
    with training.aggregator.deferred():
        with suppress(OutOfMemoryError):
            training.step(raising)
        training.plan()


@caught_by(
    "deferred",
    "a schedule call without a step",
    "finalized 2 times in 1 steps of the deferred step",
)
def deferred_without_a_step(training):
    with training.aggregator.deferred():
        training.step(right)
        training.run(lambda batch, x: (x.sum() * 0, x.sum().int(), {}))
        training.plan()


@caught_by(
    "deferred",
    "a no_sync_func set inside",
    r"config\.no_sync_func was set inside the deferred step",
)
def deferred_with_no_sync(training):
    with training.aggregator.deferred():
        training.config.no_sync_func = training.chunks[0].no_sync
        training.plan()


@caught_by(
    "deferred",
    "a finalize function set inside",
    r"config\.finalize_model_grads_func was set inside the deferred step",
)
def deferred_with_finalize(training):
    with training.aggregator.deferred():
        training.config.finalize_model_grads_func = finalize_model_grads
        training.plan()


def with_term(aggregation):
    """Return the loss_func with a term under another aggregation."""
    return returning(lambda mb, x: mb.reduce(x) + mb.reduce(x * x, aggregation))


@caught_by(
    "Terms",
    "a term with another total",
    "a term under token_mean.* in a deferred step under sample_mean.*one number divides",
    "DP 2",
    *("sample_mean", "token_mean"),
)
@caught_by(
    "Terms",
    "a term with another exponent",
    r"a term under length_power: .*n_b\^0\.25 Z\) in a deferred step under .*n_b\^0\.5 Z",
    "DP 2",
    *(Aggregation("length_power", exponent=a) for a in (0.5, 0.25)),
    per_token=True,
)
def deferred_with_other_term(training, own, term, **more):
    training = Training(training.layout, per_token=training.per_token, mode=own)
    with training.aggregator.deferred():
        training.step(with_term(term), **more)


@caught_by(
    "deferred",
    "a total in place of C, and a term with another",
    "the total 9 in place of C in a deferred step that reduces with C = 6 and 30: leave total=",
    "DP 2",
    *(Aggregation("token_sum", divisor=c) for c in (6, 30)),
    9,
)
def deferred_with_total(training, own, term, total):
    training = Training(training.layout, per_token=training.per_token, mode=own)
    with training.aggregator.deferred() as deferred:
        training.step(with_term(term))
        deferred.finish(total)


@caught_by(
    "Terms",
    "a term that counts what is left out",
    "a term under token_mean: w_s = 1/N, which counts sequences that are left out in a defer",
)
def deferred_with_left_out(training):
    term = Aggregation("token_mean", count_left_out=True)
    left_out = [0] * len(training.counts)
    deferred_with_other_term(training, "token_mean", term, left_out=left_out)


@caught_by(
    "deferred",
    "a shadow with another total",
    "got a shadow under token_mean: w_s = 1/N in a deferred step under sample_mean",
    "DP 2",
    *("sample_mean", "constant:9,token_mean"),
)
def deferred_with_shadow(training, own, shadow):
    training.aggregator = an_aggregator(training, own, shadow=shadow)
    with training.aggregator.deferred():
        training.plan()


def with_reducer_of_the_plan(training, mode, **options):
    """Train a term of the plan that the call is begun with, and not of the call's own."""
    plan = plan_of(training)

    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        layout = training.aggregator.thd(batch.offsets)
        term = plan.under(mode).reducer(batch.sequences, batch.mask, layout)
        return mb.outputs(mb.reduce(x) + term(x))

    begun = training.aggregator.begin(plan, num_microbatches=training.m, **options)
    with begun as step:
        training.run(partial(loss_func, step))


@caught_by("Terms", "a reducer of the plan that a call was begun with", REDUCER_OF_THE_PLAN)
def deferred_by_own_plan(training):
    with training.aggregator.deferred():
        with_reducer_of_the_plan(training, "sample_sum")


@caught_by(
    "deferred",
    "a {} in two calls, read by a term under {}",
    "the same {} has sequences in two .*, which reduces under {}, whose weights",
    each=(
        ("sample", "sample_mean"),
        ("sample", "row_mean"),
        ("sample", "balanced"),
        ("group", "balanced"),
    ),
)
@caught_by(
    "deferred",
    "a sample in two calls, read by a term on CP ranks",
    "the same sample has sequences in two .*, which reduces under sample_mean, whose weights",
    "CP 2",
    *("sample", "sample_mean"),
    per_token=True,
)
@caught_by(
    "deferred",
    "a sample in two calls, read by a shadow",
    "the same sample has sequences in two .*, which reduces under row_mean, whose weights",
    "DP 2",
    *("sample", None, "row_mean"),
)
def in_two_calls(training, kind, reduced, shadow=()):
    """Train under ``constant`` with one sample, prompt or group in both calls."""
    constant = Aggregation("constant", divisor=5)
    training.aggregator = an_aggregator(training, constant, shadow=shadow)
    ids = [2**20 * dist.get_rank() + index for index in range(len(training.counts))]
    with training.aggregator.deferred() as deferred:
        for number, run in enumerate((training.step, training.kept_step)):
            anew = [2**40 * (number + 1) + one for one in ids]
            given = {"sample": anew, "group": anew, kind: [7, *anew[1:]]}
            given["group"] = given["sample"] if kind == "sample" else given["group"]
            run(right if reduced is None else with_term(reduced), **given)
        deferred.finish(3)


@caught_by(
    "GradientBuffers", "gradients before a deferred step", "gradients of chunk 0 were not zero"
)
def deferred_on_gradients(training):
    training.step(right)
    with training.aggregator.deferred():
        training.kept_step(right)


@caught_by(
    "GradientBuffers",
    "gradients zeroed in a deferred step",
    "gradients were zeroed after 1 schedule calls of a deferred step",
)
def deferred_and_zeroed(training):
    with training.aggregator.deferred():
        training.step(right)
        training.step(right)


@caught_by("GradientBuffers", "a call after the division", "gradients of chunk 0 were not zero")
def deferred_and_one_more(training):
    with training.aggregator.deferred() as deferred:
        training.step(right)
        deferred.finish()
        training.kept_step(right)
