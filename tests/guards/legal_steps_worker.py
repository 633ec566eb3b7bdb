"""Which steps loops may begin: evaluations, several schedule calls, steps that are given up.

The gradient is the plain program's; on DP 2, CP 2 and PP 2, in both loss scalings.
"""

import contextlib
import functools
import gc
import multiprocessing
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from audit_cases import own
from legal_worker import main, make_anew, same, trained_as_by_hand
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from training_steps import plan_of, right

from benchmarks.counting import counted
from megatron_lossagg import (
    Aggregation,
    Layout,
    LossAggregator,
    Sequences,
    StepTotals,
    plan_step,
)
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.aggregation import Options


def check_evaluations_between_training_steps(make):
    training = make()
    for stock in (finalize_model_grads, None, finalize_model_grads):
        training.config.finalize_model_grads_func = stock
        with training.plan(forward_only=True) as step, torch.no_grad():
            training.run(functools.partial(right, step), forward_only=True)
        training.config.finalize_model_grads_func = finalize_model_grads
        trained_as_by_hand(training)
    step = training.plan()
    training.run(functools.partial(right, step))
    step.finish()
    with torch.no_grad(), training.plan(forward_only=True) as step:
        training.run(functools.partial(right, step), forward_only=True)


def check_an_evaluation_with_gradients(make):
    """Nobody called ``torch.no_grad``."""
    training = make()
    faults._warned.discard("a gradient in an evaluation")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with training.plan(forward_only=True) as step:
                training.run(functools.partial(right, step), forward_only=True)
    if parallel_state.is_pipeline_last_stage():
        told = [one for one in caught if "detached it: run evaluations" in str(one.message)]
        assert len(told) == 1
    assert training.config.finalize_model_grads_func is finalize_model_grads
    trained_as_by_hand(training)


def check_a_stage_without_a_loss_may_have_a_plan_and_has_nothing_to_read(make):
    training = make()
    with training.aggregator.begin(plan_of(training), num_microbatches=training.m) as step:
        gradient = training.run(functools.partial(right, step))
        with counted() as found:
            step.finish()
    assert bool(found.num_operations) == parallel_state.is_pipeline_last_stage()
    same(training.step(right), gradient)


def check_an_evaluation_may_find_gradients(make):
    training = make()
    training.chunks[0].buffers[0].grad_data.fill_(1)
    with training.plan(forward_only=True) as step, torch.no_grad():
        training.run(functools.partial(right, step), forward_only=True)


def check_a_plan_is_evaluated_before_and_after_it_has_trained(make):
    training = make()
    plan = plan_of(training)

    def evaluate():
        begun = training.aggregator.begin(plan, num_microbatches=2, forward_only=True)
        with begun as step, torch.no_grad():
            training.run(functools.partial(right, step), forward_only=True)

    expected = training.plain(own)
    evaluate()
    evaluate()
    with training.aggregator.begin(plan, num_microbatches=2) as step:
        found = training.run(functools.partial(right, step))
    evaluate()
    same(found, expected)


def check_a_step_that_is_given_up_leaves_the_finalize_function_as_it_was(make):
    for error in (MemoryError, KeyboardInterrupt, KeyError):
        training = make()
        calls = []

        def failing(step, batch, x, calls=calls, error=error):
            calls.append(0)
            if len(calls) == 2:
                raise error("of the framework")
            return right(step, batch, x)

        with pytest.raises(error, match="of the framework"):
            training.step(failing)
        assert training.config.finalize_model_grads_func is finalize_model_grads
        trained_as_by_hand(training)


def check_a_step_that_is_collected_leaves_the_finalize_function_as_it_was(make):
    training = make()
    training.plan()  # made ahead, and given up
    assert training.config.finalize_model_grads_func is not finalize_model_grads
    make_anew(training)
    gc.collect()
    assert training.config.finalize_model_grads_func is finalize_model_grads
    trained_as_by_hand(training)


def check_a_step_made_ahead_and_given_up(make):
    training = make()
    training.plan()
    trained_as_by_hand(training)
    assert training.config.finalize_model_grads_func is finalize_model_grads


def check_a_thread_plans_the_next_step_meanwhile(make):
    training = make()
    plans = []
    expected = training.plain(own)
    group = training.aggregator.dp_group
    with training.plan() as step:
        thread = threading.Thread(target=lambda: plans.append(plan_of(training, group=group)))
        if training.layout.dp == 1:  # no collective that could mix with the schedule's
            thread.start()
            thread.join()
        same(training.run(functools.partial(right, step)), expected)
    for plan in plans:
        with training.aggregator.begin(plan, num_microbatches=2) as step:
            same(training.run(functools.partial(right, step)), expected)


def planned_in_a_child(queue, aggregation):
    sequences = Sequences(active_tokens=[2, 3])
    plan = plan_step(aggregation, sequences, totals=StepTotals(samples=4))
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    reducer = plan.reducer([0, 1], torch.ones(5), Layout.local([2, 3], cp_size=1, cp_rank=0))
    queue.put(reducer(losses).item())


def check_a_process_that_is_forked_plans_too(make):
    """As a loader's workers do, after the aggregator was made and between its steps."""
    training = make()
    fork = multiprocessing.get_context("fork")
    for _ in range(2):
        queue = fork.Queue()
        arguments = (queue, training.aggregator.aggregation)
        worker = fork.Process(target=planned_in_a_child, args=arguments)
        worker.start()
        assert queue.get(timeout=120) == pytest.approx((1.5 + 4) / 4)
        worker.join()
        trained_as_by_hand(training)


def check_a_hundred_thousand_sequences_and_ids(make):
    """Of both ranks together, in four microbatches each; losses without a model."""
    training = make()
    if training.layout.cp > 1 or training.per_token:
        return
    size, group = 50_000, 8
    aggregator = LossAggregator(training.chunks, "prompt_mean", options=Options(probe=False))
    first = dist.get_rank() * size
    prompts = [f"prompt {(first + index) // group}" for index in range(size)]
    with aggregator.step([2] * size, num_microbatches=4, prompt=prompts) as step:
        for here in torch.arange(size).chunk(4):
            offsets, mask = torch.arange(len(here) + 1) * 3, torch.tensor([1, 1, 0])
            mb = step.microbatch(here, mask.repeat(len(here)), cu_seqlens=offsets)
            losses = torch.rand(3 * len(here), dtype=torch.float64, requires_grad=True)
            (mb.outputs(mb.reduce(losses))[0] / 4).backward()
            found = losses.grad / 2  # what DDP divides by
            expected = mask.repeat(len(here)) / (2 * size / group) / (2 * group)
            torch.testing.assert_close(found, expected.double(), rtol=1e-12, atol=0)


def check_a_step_whose_tokens_are_all_rejected(make):
    """It trains nothing, and warns once."""
    training = make()
    options = Options(probe=False, rejects_tokens=True)
    training.aggregator = LossAggregator(training.chunks, "sample_mean", options=options)
    faults._warned.discard("zero gradients")

    def loss_func(step, batch, x):
        mb = step.microbatch(batch.sequences, batch.mask * 0, cu_seqlens=batch.offsets)
        return mb.outputs(mb.reduce(x))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert not training.step(loss_func).count_nonzero()
    told = [one for one in caught if "or all its tokens were rejected" in str(one.message)]
    assert len(told) == 1


class OutOfMemoryError(Exception):
    """As a device's."""


def raising(step, batch, x):
    raise OutOfMemoryError


def other(step, batch, x):
    return right(step, batch, x * x)


def check_gradients_of_two_schedule_calls(make):
    """A mean trains the mean of the calls, each with its own N; a sum their sum."""
    training = make()
    if training.per_token:
        with pytest.raises(ContractError, match="accumulates=2 with --calculate-per-token"):
            training.plan(accumulates=2)
        return
    first, second = training.plain(own), training.plain(lambda x, w, t: own(x * x, w, t))
    for _ in range(2):  # steps of the optimizer
        same(training.step(right, accumulates=2), first / 2)
        same(training.kept_step(other, accumulates=2), (first + second) / 2)
    training.step(right, accumulates=2)
    with contextlib.suppress(OutOfMemoryError):  # both calls are made again
        training.kept_step(raising, accumulates=2)
    training.aggregator._latest.end()
    same(training.step(right, accumulates=2), first / 2)
    same(training.kept_step(other, accumulates=2), (first + second) / 2)
    with training.plan(forward_only=True, accumulates=2) as step, torch.no_grad():
        training.run(functools.partial(right, step), forward_only=True)
        assert step.plan.num_calls == 1
    same(training.step(right, accumulates=1), first)
    training.aggregator = LossAggregator(
        training.chunks, Aggregation("token_sum", divisor=7), options=Options(probe=False)
    )
    first = training.step(right)
    second = training.step(other)
    same(training.step(right, accumulates=True), first)
    same(training.kept_step(other, accumulates=True), first + second)


OF_PIPELINES = (
    check_evaluations_between_training_steps,
    check_an_evaluation_with_gradients,
    check_a_step_made_ahead_and_given_up,
    check_a_stage_without_a_loss_may_have_a_plan_and_has_nothing_to_read,
)


if __name__ == "__main__":
    main(globals(), OF_PIPELINES)
