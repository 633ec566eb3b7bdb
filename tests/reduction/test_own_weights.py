"""A user's own weights: what the function is given, what it may return, and whose it is."""

import pickle
import re

import numpy as np
import pytest
import torch

from megatron_lossagg import Aggregation, Layout, Sequences, StepTotals, plan_step
from megatron_lossagg.errors import AggregationError, PlanError, ReducerPathError
from megatron_lossagg.verify.cases import mean_of_prompts

# Sample a has two rows, prompt 0 the samples a and b, of which b is masked; group 1 is b and c.
STEP = {
    "active_tokens": [4, 1, 0, 5],
    "sample": ["a", "a", "b", "c"],
    "prompt": [0, 0, 0, 1],
    "group": [7, 7, 1, 1],
}
COUNTS = {
    "N": 10, "B": 3, "P": 2, "n_s": [4, 1, 0, 5], "n_b": [5, 5, 0, 5], "n_p": [5, 5, 5, 5],
    "n_c": [5, 5, 5, 5], "R_b": [2, 2, 1, 1], "k_p": [2, 2, 2, 1], "k_c": [1, 1, 2, 2],
}  # fmt: skip
WITHOUT_EMPTY = {**COUNTS, "B": 2, "R_b": [2, 2, 0, 1], "k_p": [1, 1, 1, 1], "k_c": [1, 1, 1, 1]}


def planned(function, *, count_empty=True, **more):
    aggregation = Aggregation(weights=function, count_empty=count_empty)
    return plan_step(aggregation, Sequences(**{**STEP, **more}))


@pytest.mark.parametrize(("count_empty", "wanted"), [(True, COUNTS), (False, WITHOUT_EMPTY)])
def test_a_function_is_given_the_steps_counts(count_empty, wanted):
    found = {}

    def function(counts):
        found.update({name: np.asarray(getattr(counts, name)).tolist() for name in wanted})
        return 1

    planned(function, count_empty=count_empty)
    assert found == wanted


def test_under_token_weights_it_counts_these():
    aggregation = Aggregation(weights=lambda c: 1 / (c.N + c.n_b), count="weights")
    plan = plan_step(aggregation, Sequences(**STEP, token_weight_sums=[0.5, 0.25, 0, 2]))
    assert plan.weights.tolist() == [1 / 3.5, 1 / 3.5, 0, 1 / 4.75]
    assert plan.expected_weight == pytest.approx(0.75 / 3.5 + 2 / 4.75, rel=1e-15)


def test_a_sample_counts_if_any_of_its_sequences_has_tokens():
    """The first one of sample 0 has none; sample 2 has none at all."""
    given = Sequences(
        active_tokens=[0, 4, 5, 0], sample=[0, 0, 1, 2], prompt=[7] * 4, group=[7] * 4
    )
    for function in (lambda c: c.k_p, lambda c: c.k_c):
        for count_empty, samples in ((False, 2), (True, 3)):
            plan = plan_step(Aggregation(weights=function, count_empty=count_empty), given)
            assert plan.weights.tolist() == [0, samples, samples, 0]


@pytest.mark.parametrize("count", ["mask", "weights"])
def test_a_function_may_change_the_array_of_tokens_that_it_is_given(count):
    def halved(counts):
        n_s = counts.n_s
        n_s *= 2
        return 1 / n_s

    given = Sequences(active_tokens=[4, 1], token_weight_sums=[8.0, 0.5])
    plan = plan_step(Aggregation(weights=halved, count=count), given)
    assert plan.weights.tolist() == {"mask": [1 / 8, 1 / 2], "weights": [1 / 16, 1]}[count]
    assert plan.under("sample_sum").counts.n_s.sum() == {"mask": 5, "weights": 8.5}[count]


def test_the_partial_loss_has_its_weights_and_0_is_one():
    plan = planned(lambda c: np.where(c.n_s > 4, 0, 1 / c.n_s))
    layout = Layout.thd_zigzag([0, 4, 6, 7, 12], cp_size=1, cp_rank=0)
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1])
    x = torch.arange(12, dtype=torch.float64).requires_grad_()
    reducer = plan.reducer([0, 1, 2, 3], mask, layout)
    loss = reducer(x)
    loss.backward()
    assert loss.item() == (0 + 1 + 2 + 3) / 4 + 4
    assert x.grad.tolist() == [0.25] * 4 + [1, 0, 0] + [0] * 5
    assert reducer.weight_sum().item() == plan.expected_weight == 2


def test_one_weight_for_all_sequences_may_be_a_number():
    mean = plan_step(Aggregation("token_mean"), Sequences(**STEP))
    assert planned(lambda c: 1 / c.N).weights.tolist() == mean.weights.tolist()


def test_a_weight_may_say_which_sequences_to_keep():
    assert planned(lambda c: c.n_s > 1).weights.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda c: c.n_s[:3], r"returned float64 of shape \(3,\), expected 4 numbers"),
        (lambda c: ["a"] * 4, "expected 4 numbers"),
        (lambda c: None, "expected 4 numbers"),
        (lambda c: c.n_s - 2, r"returned -1\.0 for sequence 1 of the step"),
        (lambda c: 1 / (c.n_s - 1), "returned inf for sequence 1"),
        (lambda c: c.nonsense, "raised AttributeError"),
        (
            lambda c: c.n_s * 1e-40,
            "beyond what float32 holds, from the weights function .*<lambda>: change",
        ),
    ],
)
def test_what_is_no_weight_is_refused(function, message):
    with pytest.raises(PlanError, match=message):
        planned(function)


def test_of_a_sequence_without_tokens_nothing_is_read():
    assert planned(lambda c: 1 / c.n_s).weights.tolist() == [0.25, 1, 0, 0.2]
    with pytest.warns(RuntimeWarning, match="no active tokens"):
        plan = planned(lambda c: 1 / c.n_s.max(), active_tokens=[0] * 4)
    assert plan.weights.tolist() == [0] * 4


@pytest.mark.parametrize("name", ["P", "n_p", "k_p", "n_c", "k_c"])
def test_ids_that_were_not_passed_are_named(name):
    kind = "prompt" if name[-1] in "Pp" else "group"
    aggregation = Aggregation(weights=lambda c: getattr(c, name))
    with pytest.raises(PlanError, match=re.escape(f"needs Sequences({kind}=...)")):
        plan_step(aggregation, Sequences(active_tokens=[3]))


def test_totals_are_refused_because_the_function_sees_every_sequence():
    with pytest.raises(PlanError, match=r"needs the sequences of all ranks .* without totals="):
        plan_step(
            Aggregation(weights=mean_of_prompts),
            Sequences(active_tokens=[3]),
            totals=StepTotals(active_tokens=9, samples=2),
        )


def test_a_path_and_the_function_are_one_aggregation():
    path = "megatron_lossagg.verify.cases:mean_of_prompts"
    by_path, by_function = Aggregation(weights=path), Aggregation(weights=mean_of_prompts)
    assert by_path == by_function == pickle.loads(pickle.dumps(by_path))
    assert repr(by_path) == repr(by_function)
    assert path in repr(by_path)
    assert path in str(by_path)
    assert " at 0x" not in repr(Aggregation(weights=lambda c: 1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "no.such:f"}, ReducerPathError, "weights path 'no.such:f' raised Module"),
        ({"weights": "math:pi"}, ReducerPathError, "not callable"),
        ({"weights": 3}, AggregationError, "got weights 3, expected a function"),
        ({"weights": ""}, AggregationError, "got weights '', expected a function"),
        ({"mode": "token_mean", "weights": len}, AggregationError, "replaces the mode"),
        ({"mode": "own_weights"}, AggregationError, "without a weights function"),
        ({"weights": len, "divisor": 4}, AggregationError, "takes no divisor"),
        ({"weights": len, "reducer_path": "a:b"}, AggregationError, "replaces the mode"),
        ({}, AggregationError, "unknown mode ''"),
    ],
)
def test_a_wrong_configuration_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        Aggregation(**options)
