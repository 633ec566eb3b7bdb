"""Steps of several schedule calls that are refused; for ``fault_table``."""

from custom_reducer import custom
from training_steps import Training, right

from megatron_lossagg import LossAggregator
from megatron_lossagg.reduction.options import Options


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
