"""Steps of several schedule calls that are refused; for ``fault_table``."""

from custom_reducer import custom
from deferred_programs import with_reducer_of_the_plan
from training_steps import Training, returning, right

from megatron_lossagg import LossAggregator
from megatron_lossagg.reduction.aggregation import Options


def accumulated(training, *ddp):
    options = dict.fromkeys(ddp, True)
    training = Training(training.layout, per_token=training.per_token, ddp=options)
    training.plan(accumulates=True)


def accumulating(training, accumulates):
    training.plan(accumulates=accumulates)


def accumulating_custom(training):
    aggregation = custom(lambda context: lambda x: x.sum())
    training.aggregator = LossAggregator(training.chunks, aggregation, options=Options(probe=False))
    training.plan(accumulates=2)


def accumulating_term(training, mode):
    options = training.aggregator.options
    training.aggregator = LossAggregator(training.chunks, "token_sum", options=options)
    term = returning(lambda mb, x: mb.reduce(x) + mb.reduce(x * x, mode))
    training.step(term, accumulates=True)


def accumulating_by_own_plan(training):
    with_reducer_of_the_plan(training, "token_mean", accumulates=2)


def one_call_too_many(training):
    training.step(right, accumulates=2)
    training.kept_step(right, accumulates=2)
    training.kept_step(right, accumulates=2)


def one_call_declared(training):
    training.step(right, accumulates=1)
    training.kept_step(right, accumulates=1)


def declared_late(training):
    training.step(right)
    training.kept_step(right, accumulates=2)
