"""Steps of several schedule calls that are refused; for ``fault_table``."""

from functools import partial

from custom_reducer import custom
from training_steps import Training, microbatch, plan_of, returning, right

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


def accumulating_term(training, mode):
    training = Training(training.layout, mode="token_sum")
    term = returning(lambda mb, x: mb.reduce(x) + mb.reduce(x * x, mode))
    training.step(term, accumulates=True)


def accumulating_by_own_plan(training):
    plan = plan_of(training)

    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        layout = training.aggregator.thd(batch.offsets)
        own = plan.under("token_mean").reducer(batch.sequences, batch.mask, layout)
        return mb.outputs(mb.reduce(x) + own(x))

    begun = training.aggregator.begin(plan, num_microbatches=training.m, accumulates=2)
    with begun as step:
        training.run(partial(loss_func, step))


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
