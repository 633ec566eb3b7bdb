"""Deferred steps that are refused; for ``deferred_faults``."""

from contextlib import suppress
from functools import partial

import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch.cuda import OutOfMemoryError
from training_steps import Training, microbatch, plan_of, returning, right

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.reduction.aggregation import Options


def raising(step, batch, x):
    raise OutOfMemoryError


def deferred_by_one(training, mode):
    training = Training(training.layout, per_token=training.per_token, mode=mode)
    with training.aggregator.deferred():
        training.plan()


def deferred_by_microbatch(training):
    training = Training(training.layout, mode="microbatch_token_mean")
    microbatch = [0] * len(training.counts)
    with training.aggregator.deferred():
        training.plan(microbatch=microbatch)


def deferred_under_two(training):
    aggregator, other = training.aggregator, Aggregation("token_mean")
    aggregator.agree_on(other)
    with aggregator.deferred():
        training.step(right)
        aggregator.begin(plan_of(training, mode=other), num_microbatches=training.m)


def deferred_and_accumulated(training):
    with training.aggregator.deferred():
        training.plan(accumulates=2)


def deferred_after_an_error(training):
    with training.aggregator.deferred():
        with suppress(OutOfMemoryError):
            training.step(raising)
        training.plan()


def deferred_without_a_step(training):
    with training.aggregator.deferred():
        training.step(right)
        training.run(lambda batch, x: (x.sum() * 0, x.sum().int(), {}))
        training.plan()


def deferred_with_no_sync(training):
    with training.aggregator.deferred():
        training.config.no_sync_func = training.chunks[0].no_sync
        training.plan()


def deferred_with_finalize(training):
    with training.aggregator.deferred():
        training.config.finalize_model_grads_func = finalize_model_grads
        training.plan()


def with_term(aggregation):
    """Return the loss_func with a term under another aggregation."""
    return returning(lambda mb, x: mb.reduce(x) + mb.reduce(x * x, aggregation))


def deferred_with_other_term(training, own, term, **more):
    training = Training(training.layout, per_token=training.per_token, mode=own)
    with training.aggregator.deferred():
        training.step(with_term(term), **more)


def deferred_with_total(training, own, term, total):
    training = Training(training.layout, per_token=training.per_token, mode=own)
    with training.aggregator.deferred() as deferred:
        training.step(with_term(term))
        deferred.finish(total)


def deferred_with_left_out(training):
    term = Aggregation("token_mean", count_left_out=True)
    left_out = [0] * len(training.counts)
    deferred_with_other_term(training, "token_mean", term, left_out=left_out)


def deferred_with_shadow(training, own, shadow):
    options = Options(probe=False, shadow=shadow)
    training.aggregator = LossAggregator(training.chunks, own, options=options)
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


def deferred_by_own_plan(training):
    with training.aggregator.deferred():
        with_reducer_of_the_plan(training, "sample_sum")


def in_two_calls(training, reduced, kind, total, shadow=()):
    """Train under ``constant`` with one sample, prompt or group in both calls."""
    options = Options(probe=False, shadow=shadow)
    training.aggregator = LossAggregator(training.chunks, "constant", divisor=5, options=options)
    ids = [2**20 * dist.get_rank() + index for index in range(len(training.counts))]
    with training.aggregator.deferred() as deferred:
        for number, run in enumerate((training.step, training.kept_step)):
            anew = [2**40 * (number + 1) + one for one in ids]
            given = {"sample": anew, "group": anew, kind: [7, *anew[1:]]}
            given["group"] = given["sample"] if kind == "sample" else given["group"]
            run(right if reduced is None else with_term(reduced), **given)
        deferred.finish(total)


def deferred_on_gradients(training):
    training.step(right)
    with training.aggregator.deferred():
        training.kept_step(right)


def deferred_and_zeroed(training):
    with training.aggregator.deferred():
        training.step(right)
        training.step(right)


def deferred_and_one_more(training):
    with training.aggregator.deferred() as deferred:
        training.step(right)
        deferred.finish()
        training.kept_step(right)
