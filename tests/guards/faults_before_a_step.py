"""Programs whose step should not begin: config, finalize function, M, plan or ranks are wrong."""

import contextlib
import functools
import pickle
from dataclasses import replace

import stock_step  # noqa: F401  installs the stand-ins
import torch.distributed as dist
from custom_reducer import custom
from faults import caught_by
from megatron.core.distributed import finalize_model_grads
from training_steps import Training, plan_of, right

from megatron_lossagg import Aggregation, LossAggregator, StepTotals

INTEGER_OF_CALLS = r"got accumulates=.*, expected a bool or an integer from 1"


def an_aggregator(training, mode="sample_mean", **options):
    options = replace(training.aggregator.options, **options)
    return LossAggregator(training.chunks, mode, options=options)


def doubled(*args, **kwargs):
    """Stand for a finalize function of the loop's own."""
    finalize_model_grads(*args, **kwargs)


@caught_by(
    "previous_step",
    "the previous step is open",
    r"the previous step was not finished.*with aggregator.step.*step\.finish\(\)",
)
def open_step(training):
    training.run(functools.partial(right, training.plan()))
    training.plan()


@caught_by("changed_config", "another scaling", "wrapped in the average loss scal")
def flipped_scaling(training):
    training.config.calculate_per_token_loss = True
    training.plan()


@caught_by("changed_config", "a router's", "router was built with .*=True", "MoE")
def flipped_router(training):
    modules = training.chunks[0].named_modules()
    next(one for name, one in modules if name.endswith("router")).calculate_per_token_loss = True
    training.plan()


@caught_by("changed_config", "a bucket's factor", r"scales gradients by \[0\.25, 0\.5\].*frozen")
def scaled_bucket(training):
    training.chunks[0].buffers[0].buckets[0].gradient_scaling_factor = 0.25
    training.plan()


@caught_by("changed_config", "another CP size", "eval_context_parallel_size of Meg")
def changed_cp(training):
    training.config.context_parallel_size = 2
    training.plan()


@caught_by(
    "changed_config",
    "an average in the collective",
    "average_in_collective is True .* in the per-token loss scaling, which sum",
    per_token=True,
)
def averaging(training):
    training.chunks[0].ddp_config.average_in_collective = True
    training.plan()


@caught_by("finalize_function", "none", "finalize_model_grads_func is None")
def no_finalize(training):
    training.config.finalize_model_grads_func = None
    training.plan()


@caught_by("finalize_function", "replaced", "doubled.*when the LossAggregator w")
def replaced_finalize(training):
    training.config.finalize_model_grads_func = doubled
    training.plan()


@caught_by("finalize_function", "replaced after a step", "doubled.*when the LossAg")
def replaced_later(training):
    training.step(right)
    replaced_finalize(training)


@caught_by("finalize_function", "other arguments", "a=2.* it was .*a=1")
def other_partial(training):
    training.config.finalize_model_grads_func = functools.partial(finalize_model_grads, a=1)
    training.aggregator = an_aggregator(training)
    training.config.finalize_model_grads_func = functools.partial(finalize_model_grads, a=2)
    training.plan()


@caught_by("finalize_function", "set by training, replaced", "doubled")
def set_twice(training):
    training.config.finalize_model_grads_func = None
    training.aggregator = an_aggregator(training)
    training.config.finalize_model_grads_func = finalize_model_grads
    training.step(right)
    replaced_finalize(training)


@caught_by("finalize_function", "not what was probed", "was None when the", per_token=True)
def not_probed(training):
    training.config.finalize_model_grads_func = None
    training.aggregator = an_aggregator(training, probe=True)
    replaced_finalize(training)


@caught_by(
    "finalize_function",
    "two steps of a model",
    "a step of this model while another one runs",
    per_token=True,
)
def two_steps(training):
    with training.plan():
        training.aggregator = an_aggregator(training)
        training.plan()


@caught_by(
    "numbers",
    "M is {!r}",
    "got num_microbatches {!r}, expected an integer from 1",
    each=("2", 2.0, True, 0, -1, None),
)
def with_m(training, m):
    training.aggregator.begin(plan_of(training), num_microbatches=m)


@caught_by(
    "numbers",
    "iteration {!r}",
    "got iteration {!r}, expected an integer from 1",
    each=("2", 2.0, True, 0, -1),
)
def of_iteration(training, iteration):
    training.plan(iteration=iteration)


@caught_by("numbers", "M of rank 1 is 0", "^rank 1 of .* got num_microbatches 0, expec")
def m_of_rank_1(training):
    training.aggregator.step(training.counts, num_microbatches=0 if dist.get_rank() == 1 else 2)


@caught_by("missing_plan", "no plan on the last stage", "got no counts on the last", "DP 2", None)
@caught_by("missing_plan", "no plan but 7", "got 7, expected what plan_step", "DP 2", 7)
def begun_with(training, plan):
    training.aggregator.begin(plan, num_microbatches=2)


@caught_by("plan_of_another_step", "another M", "made for 3 microbatches.*runs 2")
def plan_of_three(training):
    numbers = [index % 3 for index in range(len(training.counts))]
    plan = plan_of(training, microbatch=numbers, num_microbatches=3)
    training.aggregator.begin(plan, num_microbatches=2)


@caught_by(
    "plan_of_another_step",
    "other ranks",
    r"counted over ranks \[\d\], .* is \[0, 1\].*group=aggregator\.dp_group",
)
def plan_of_this_rank(training):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    training.aggregator.begin(plan_of(training, group=alone), num_microbatches=2)


@caught_by(
    "plan_of_another_step",
    "a plan that has trained",
    "has already begun to train a step.*plan_step for each.*forward_only=True",
)
def plan_used_again(training):
    plan = plan_of(training)
    with training.aggregator.begin(plan, num_microbatches=2) as step:
        training.run(functools.partial(right, step))
    training.aggregator.begin(plan.under("token_mean"), num_microbatches=2)


@caught_by(
    "plan_of_another_step", "a copy of a plan that has trained", "has already begun to train a step"
)
def copied_plan_used_again(training):
    plan = plan_of(training)
    with training.aggregator.begin(plan, num_microbatches=2) as step:
        training.run(functools.partial(right, step))
    training.aggregator.begin(pickle.loads(pickle.dumps(plan)), num_microbatches=2)


@caught_by(
    "aggregation_of_one_rank",
    "a mode of its own",
    r"under token_sum.*not agreed on.*aggregator\.agree_on",
)
def mode_of_one_rank(training):
    plan = plan_of(training, mode=Aggregation("token_sum"))
    training.aggregator.begin(plan, num_microbatches=2)


@caught_by("agree", "two modes", "rank 0 has token_mean.*rank 1 has sample_mean")
def modes_by_rank(training):
    training.aggregator.agree_on(Aggregation(("token_mean", "sample_mean")[dist.get_rank()]))


@caught_by(
    "unknown_divisor", "N is not known", r"active tokens.*StepTotals\(active_to", per_token=True
)
def unknown_n(training):
    plan = plan_of(training, totals=StepTotals(samples=10))
    training.aggregator.begin(plan, num_microbatches=2)


@caught_by("unknown_divisor", "N beyond int32", "2147483648.*int32", per_token=True)
def n_beyond_int32(training):
    plan = plan_of(training, totals=StepTotals(samples=10, active_tokens=2**31))
    training.aggregator.begin(plan, num_microbatches=2)


@caught_by(
    "early_reduction",
    "no no_sync_func",
    r"2 microbatches .* config\.no_sync_func is None",
    "DP 2",
    "none",
)
@caught_by(
    "early_reduction",
    "no_sync_func is {}",
    r"2 microbatches .* config\.no_sync_func is not theirs",
    each=("another's", "a list of another's", "a null context"),
)
def overlap_with(training, function):
    training = Training(training.layout, ddp={"overlap_grad_reduce": True})
    other = Training(training.layout, ddp={"overlap_grad_reduce": True}).chunks[0].no_sync
    functions = {"none": None, "another's": other, "a list of another's": [other]}
    training.config.no_sync_func = functions.get(function, contextlib.nullcontext)
    training.step(right)


@caught_by("accumulation", "TP 2", "accumulates=True with tensor parallelism", "TP 2")
@caught_by("accumulation", "PP 2", "accumulates=True with pipeline parallelism", "PP 2")
@caught_by("accumulation", "EP 2", "accumulates=True with expert parallelism", "EP 2")
@caught_by(
    "accumulation",
    "overlap",
    "accumulates=True with overlap_grad_reduce",
    "DP 2",
    "overlap_grad_reduce",
)
@caught_by(
    "accumulation",
    "sharded",
    "accumulates=True with the distributed opt",
    "DP 2",
    "distributed_optimizer",
)
@caught_by("accumulation", "per-token", "accumulates=True with --calculate-per-to", per_token=True)
def accumulated(training, *ddp):
    options = dict.fromkeys(ddp, True)
    training = Training(training.layout, per_token=training.per_token, ddp=options)
    training.plan(accumulates=True)


@caught_by("numbers", "accumulates={!r}", INTEGER_OF_CALLS, each=("2", 2.0, 0, -1, None))
@caught_by(
    "accumulation",
    "a sum of means",
    "accumulates=True with sample_mean.*accumulates=2, which trains their mean",
    "DP 2",
    True,
)
def accumulating(training, accumulates):
    training.plan(accumulates=accumulates)


@caught_by("accumulation", "calls of a custom reducer", "accumulates=2 with a custom reducer")
def accumulating_custom(training):
    training.aggregator = an_aggregator(training, custom(lambda context: lambda x: x.sum()))
    training.plan(accumulates=2)
