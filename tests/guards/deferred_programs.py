"""Deferred steps that are refused; for ``deferred_faults``."""

from contextlib import suppress

from megatron.core.distributed import finalize_model_grads
from torch.cuda import OutOfMemoryError
from training_steps import Training, plan_of, returning, right

from megatron_lossagg import Aggregation


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


def deferred_with_other_term(training):
    with training.aggregator.deferred():
        training.step(returning(lambda mb, x: mb.reduce(x) + mb.reduce(x * x, "token_mean")))


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
