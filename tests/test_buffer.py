"""StepBuffer: read a step, count it, plan it, replay it."""

import itertools

import pytest

from megatron_lossagg import Aggregation, StepBuffer, StepTotals
from megatron_lossagg.errors import PlanError


def count(microbatch):
    return [len(row) for row in microbatch]


def test_a_step_is_read_planned_and_replayed_in_order():
    source = iter([["a", "bbb"], [], ["cc"], ["the next step's"]])
    buffer = StepBuffer(source, 3)
    plan = buffer.plan(Aggregation("token_mean"), count)
    assert plan.weights.tolist() == [1 / 6] * 3
    replayed = [(mb.rows, mb.data) for mb in buffer]
    assert replayed == [([0, 1], ["a", "bbb"]), ([], []), ([2], ["cc"])]
    assert [(mb.rows, mb.data) for mb in buffer] == replayed
    assert next(source) == ["the next step's"]


def test_microbatches_without_rows_count_in_m():
    buffer = StepBuffer(iter([["a", "bbb"], [], ["cc"]]), 3)
    plan = buffer.plan(Aggregation("microbatch_token_mean"), count)
    assert plan.num_microbatches == 3
    assert plan.weights.tolist() == [1 / 12, 1 / 12, 1 / 6]


def test_an_iterator_that_ends_within_a_step_is_an_error():
    with pytest.raises(PlanError, match="ended after 2 of 3 microbatches: give whole steps"):
        StepBuffer(iter([["a"], ["b"]]), 3)


def test_replaying_before_planning_is_an_error():
    with pytest.raises(PlanError, match=r"call plan\(\) before iterating"):
        next(iter(StepBuffer(iter([["a"]]), 1)))


def test_a_rank_without_iterator_needs_the_tensor_parallel_group():
    with pytest.raises(PlanError, match="pass tp_group=, whose first rank reads"):
        StepBuffer(None, 1).plan(Aggregation("token_mean"), count)


def test_an_endless_iterator_is_read_no_further_than_the_step():
    source = itertools.count()
    buffer = StepBuffer(source, 4)
    plan = buffer.plan(
        Aggregation("constant", divisor=2), lambda n: [n], totals=StepTotals(samples=4)
    )
    assert plan.weights.tolist() == [0, 1 / 8, 1 / 8, 1 / 8]
    assert next(source) == 4
