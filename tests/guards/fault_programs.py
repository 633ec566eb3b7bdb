"""Programs whose step should not begin: config, finalize function, M, plan or ranks are wrong.

Each has one fault; ``fault_table.py`` says which.
"""

import contextlib
import functools
import pickle

import stock_step  # noqa: F401  installs the stand-ins
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from training_steps import Training, plan_of, right

from megatron_lossagg import Aggregation, LossAggregator, StepTotals
from megatron_lossagg.reduction.aggregation import Options


def an_aggregator(training, mode="sample_mean", **options):
    return LossAggregator(training.chunks, mode, options=Options(**{"probe": False, **options}))


def doubled(*args, **kwargs):
    """Stand for a finalize function of the loop's own."""
    finalize_model_grads(*args, **kwargs)


def open_step(training):
    training.run(functools.partial(right, training.plan()))
    training.plan()


def flipped_scaling(training):
    training.config.calculate_per_token_loss = True
    training.plan()


def flipped_router(training):
    modules = training.chunks[0].named_modules()
    next(one for name, one in modules if name.endswith("router")).calculate_per_token_loss = True
    training.plan()


def scaled_bucket(training):
    training.chunks[0].buffers[0].buckets[0].gradient_scaling_factor = 0.25
    training.plan()


def changed_cp(training):
    training.config.context_parallel_size = 2
    training.plan()


def averaging(training):
    training.chunks[0].ddp_config.average_in_collective = True
    training.plan()


def no_finalize(training):
    training.config.finalize_model_grads_func = None
    training.plan()


def replaced_finalize(training):
    training.config.finalize_model_grads_func = doubled
    training.plan()


def replaced_later(training):
    training.step(right)
    replaced_finalize(training)


def other_partial(training):
    training.config.finalize_model_grads_func = functools.partial(finalize_model_grads, a=1)
    training.aggregator = an_aggregator(training)
    training.config.finalize_model_grads_func = functools.partial(finalize_model_grads, a=2)
    training.plan()


def set_twice(training):
    training.config.finalize_model_grads_func = None
    training.aggregator = an_aggregator(training)
    training.config.finalize_model_grads_func = finalize_model_grads
    training.step(right)
    replaced_finalize(training)


def not_probed(training):
    training.config.finalize_model_grads_func = None
    training.aggregator = an_aggregator(training, probe=True)
    replaced_finalize(training)


def two_steps(training):
    with training.plan():
        training.aggregator = an_aggregator(training)
        training.plan()


def with_m(training, m):
    training.aggregator.begin(plan_of(training), num_microbatches=m)


def of_iteration(training, iteration):
    training.plan(iteration=iteration)


def m_of_rank_1(training):
    training.aggregator.step(training.counts, num_microbatches=0 if dist.get_rank() == 1 else 2)


def begun_with(training, plan):
    training.aggregator.begin(plan, num_microbatches=2)


def plan_of_three(training):
    numbers = [index % 3 for index in range(len(training.counts))]
    plan = plan_of(training, microbatch=numbers, num_microbatches=3)
    training.aggregator.begin(plan, num_microbatches=2)


def plan_of_this_rank(training):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    training.aggregator.begin(plan_of(training, group=alone), num_microbatches=2)


def plan_used_again(training):
    plan = plan_of(training)
    with training.aggregator.begin(plan, num_microbatches=2) as step:
        training.run(functools.partial(right, step))
    training.aggregator.begin(plan.under("token_mean"), num_microbatches=2)


def copied_plan_used_again(training):
    plan = plan_of(training)
    with training.aggregator.begin(plan, num_microbatches=2) as step:
        training.run(functools.partial(right, step))
    training.aggregator.begin(pickle.loads(pickle.dumps(plan)), num_microbatches=2)


def mode_of_one_rank(training):
    plan = plan_of(training, mode=Aggregation("token_sum"))
    training.aggregator.begin(plan, num_microbatches=2)


def modes_by_rank(training):
    training.aggregator.agree_on(Aggregation(("token_mean", "sample_mean")[dist.get_rank()]))


def unknown_n(training):
    plan = plan_of(training, totals=StepTotals(samples=10))
    training.aggregator.begin(plan, num_microbatches=2)


def n_beyond_int32(training):
    plan = plan_of(training, totals=StepTotals(samples=10, active_tokens=2**31))
    training.aggregator.begin(plan, num_microbatches=2)


def overlap_with(training, function):
    training = Training(training.layout, ddp={"overlap_grad_reduce": True})
    other = Training(training.layout, ddp={"overlap_grad_reduce": True}).chunks[0].no_sync
    functions = {"none": None, "another's": other, "a list of another's": [other]}
    training.config.no_sync_func = functions.get(function, contextlib.nullcontext)
    training.step(right)
