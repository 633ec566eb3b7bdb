"""Totals of a step that are known instead of counted."""

import math
import re
import threading

import pytest
from steps import Threads

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction import plan as plans
from megatron_lossagg.reduction.table import StepTotals


def test_known_totals_may_be_those_of_an_empty_step():
    with pytest.warns(RuntimeWarning, match="no active tokens"):
        plan = plan_step(
            Aggregation("token_mean"),
            Sequences(active_tokens=[0]),
            totals=StepTotals(active_tokens=0),
        )
    assert plan.weights.tolist() == [0]


def test_totals_replace_counting():
    sequences = Sequences(active_tokens=[2, 3])
    plan = plan_step(Aggregation("constant", divisor=4), sequences, totals=StepTotals(samples=8))
    assert plan.weights.tolist() == [1 / 32, 1 / 32]
    assert plan.expected_weight is None  # N is not known
    plan = plan_step(Aggregation("sample_mean"), sequences, totals=StepTotals(samples=8))
    assert plan.weights.tolist() == [1 / 16, 1 / 24]


def test_the_expected_weight_is_unknown_where_its_counts_are():
    plan = plan_step(
        Aggregation("token_sum"), Sequences(active_tokens=[2]), totals=StepTotals(active_tokens=5)
    )
    assert plan.expected_weight == 5
    assert plan.under("sample_sum").expected_weight is None
    assert plan.under(Aggregation("constant", divisor=4)).expected_weight is None
    assert plan.under("sample_mean").expected_weight is None


def test_only_the_totals_that_the_mode_needs_are_required():
    sequences = {"active_tokens": [2, 0]}
    for mode, known, weight in (
        ("token_sum", {}, 1),
        ("token_mean", {"active_tokens": 10}, 1 / 10),
        ("sample_sum", {"samples": 5}, 1 / 5),
        ("sample_mean", {"samples": 5}, 1 / 10),
    ):
        plan = plan_step(Aggregation(mode), Sequences(**sequences), totals=StepTotals(**known))
        assert plan.weights.tolist() == [weight, 0]


# Totals that cannot be those of a step with these sequences: without a check the weight is
# infinite, negative or quietly another loss's.
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:the plan counts no active tokens")
@pytest.mark.parametrize(
    ("mode", "n", "name", "value"),
    [
        ("sample_sum", [2], "samples", 0),
        ("sample_sum", [2], "samples", -3),
        ("sample_sum", [2], "samples", 1.5),
        ("sample_sum", [2], "samples", math.nan),
        ("sample_sum", [2, 0], "samples", 1),
        ("sample_sum, V", [1], "active_samples", 0),
        ("sample_sum, V", [2, 0, 2], "active_samples", 1),
        ("token_mean", [2], "active_tokens", 0),
        ("token_mean", [2, 2], "active_tokens", 3),
        ("token_sum", [2], "prompts", -1),
        ("token_sum", [2], "active_prompts", 0.5),
    ],
)
def test_totals_that_contradict_the_sequences_are_refused(mode, n, name, value):
    aggregation = Aggregation(mode.split(",")[0], count_empty="," not in mode)
    with pytest.raises(PlanError, match=re.escape(f"got StepTotals({name}={value!r})")):
        plan_step(aggregation, Sequences(active_tokens=n), totals=StepTotals(**{name: value}))


def test_totals_equal_to_the_local_counts_are_accepted():
    sequences = Sequences(active_tokens=[2, 0])
    least = {"active_tokens": 2, "samples": 2, "active_samples": 1}
    for mode in ("token_mean", "sample_mean", "sample_sum"):
        for count_empty in (True, False):
            aggregation = Aggregation(mode, count_empty=count_empty)
            known = plan_step(aggregation, sequences, totals=StepTotals(**least))
            counted = plan_step(aggregation, sequences)
            assert known.weights.tolist() == counted.weights.tolist()
            assert known.expected_weight == counted.expected_weight


@pytest.mark.parametrize("kind", ["sample", "prompt"])
def test_ids_are_refused_with_known_totals(kind):
    """A sample or prompt may have sequences on ranks that nobody asks."""
    sequences = Sequences(active_tokens=[2], **{kind: [0]})
    with pytest.raises(PlanError, match=rf"got totals= and {kind}=, .* drop totals= or {kind}="):
        plan_step(Aggregation("token_mean"), sequences, totals=StepTotals(active_tokens=2))


@pytest.mark.parametrize(
    ("mode", "known", "message"),
    [
        ("token_mean", {}, r"^rank.*: token_mean.* StepTotals\(active"),
        ("constant", {}, r"^rank.*: constant.* StepTotals\(samples="),
        ("prompt_mean", {"prompts": 2}, r"^rank.*: prompt_mean.* Sequences\(prompt="),
        ("prompt_mean", None, r"prompt_mean.* Sequences\(prompt="),
        ("microbatch_token_mean", None, r"Sequences\(microbatch="),
    ],
)
def test_a_mode_raises_for_what_it_lacks_before_any_forward(mode, known, message):
    aggregation = Aggregation(mode, divisor=4 if mode == "constant" else None)
    with pytest.raises(PlanError, match=message):
        plan_step(
            aggregation,
            Sequences(active_tokens=[2]),
            totals=None if known is None else StepTotals(**known),
        )


def test_v_and_q_are_required_where_empty_ones_do_not_count():
    with pytest.raises(PlanError, match=r"StepTotals\(active_samples="):
        plan_step(
            Aggregation("sample_sum", count_empty=False),
            Sequences(active_tokens=[2]),
            totals=StepTotals(samples=3),
        )


def test_the_sequences_of_a_plan_whose_totals_are_passed_are_not_this_steps():
    earlier = plan_step(Aggregation("row_mean"), Sequences(active_tokens=[8, 1, 1]))
    with pytest.raises(PlanError, match="row_mean: "):
        plan_step(
            Aggregation("row_mean"), Sequences(active_tokens=[2, 3, 5]), totals=earlier.totals
        )


def test_totals_of_another_type_are_refused_where_the_step_is_counted(monkeypatch):
    """As totals that differ from the counts are, and not with an error of the comparison."""
    monkeypatch.setattr(plans, "looks_again", lambda steps: True)
    monkeypatch.setattr(plans, "Exchange", Threads)
    group = (0, threading.Barrier(1), [None])
    totals, given = StepTotals(active_tokens=3, samples="1"), Sequences(active_tokens=[3])
    with pytest.raises(PlanError, match=r"got StepTotals\(samples='1'\), the group's .* have 1"):
        plan_step(Aggregation("token_mean"), given, totals=totals, group=group)


def test_the_expected_weight_over_no_samples_is_unknown():
    totals = StepTotals(samples=0, active_samples=0)  # which a rank without sequences may pass
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[]), totals=totals)
    assert (plan.weights.tolist(), plan.expected_weight) == ([], None)
