"""What a step counted, in numbers, and the number of samples that the caller knows."""

import pytest

from megatron_lossagg import Aggregation, Sequences, StepTotals, plan_step
from megatron_lossagg.errors import PlanError

SAMPLE_MEAN = Aggregation("sample_mean")
# Sample a has two rows; prompt 1 and group 6 have the masked sample c only.
STEP = {
    "active_tokens": [4, 1, 5, 0],
    "sample": ["a", "a", "b", "c"],
    "prompt": [0, 0, 0, 1],
    "group": [7, 7, 8, 6],
}


def test_a_plan_says_what_it_counted_and_what_of_it_is_empty():
    counted = plan_step(SAMPLE_MEAN, Sequences(**STEP, num_padding=2)).counted
    assert counted == {
        "active_tokens": 10,
        "sequences": 4,
        "samples": 3,
        "prompts": 2,
        "groups": 3,
        **{f"empty_{kind}": 1 for kind in ("sequences", "samples", "prompts", "groups")},
        "padding": 2,
    }
    assert str(counted) == (
        "10 active tokens, 4 sequences (1 empty), 3 samples (1 empty), 2 prompts (1 empty), "
        "3 groups (1 empty), 2 of padding"
    )


def test_what_is_not_known_is_not_said():
    alone = plan_step(SAMPLE_MEAN, Sequences(active_tokens=[3])).counted
    assert str(alone) == "3 active tokens, 1 sequences, 1 samples, each sequence one"
    totals = StepTotals(active_tokens=9, samples=4)
    known = plan_step(SAMPLE_MEAN, Sequences(active_tokens=[3]), totals=totals).counted
    assert str(known) == "9 active tokens, 4 samples"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sample": [0, 1, 0, 1]}, "ids have 2 samples; .* restart in each prompt"),
        ({"sample": [0, 1, 2, 3], "sample_count": 2}, "ids have 4 samples; .* one id"),
        ({"sample_count": 3}, "ids have 4 samples; without sample= each sequence is one"),
        ({"sample_count": -1}, "got sample_count -1, expected an integer from 0"),
        ({"sample_count": True}, "got sample_count True"),
        ({"num_padding": 0.5}, "got num_padding 0.5, expected an integer from 0"),
    ],
)
def test_another_number_of_samples_than_the_caller_knows_is_refused(given, message):
    with pytest.raises(PlanError, match=message):
        plan_step(SAMPLE_MEAN, Sequences(active_tokens=[1] * 4, **{"sample_count": 4, **given}))


def test_the_right_number_of_samples_is_taken():
    ids = {"sample": ["0/0", "0/1", "1/0", "1/1"], "prompt": [0, 0, 1, 1]}
    plan = plan_step(SAMPLE_MEAN, Sequences(active_tokens=[1] * 4, sample_count=4, **ids))
    assert plan.weights.tolist() == [0.25] * 4


def test_it_is_compared_with_totals_that_are_passed():
    totals = StepTotals(samples=5)
    plan_step(SAMPLE_MEAN, Sequences(active_tokens=[2], sample_count=5), totals=totals)
    with pytest.raises(PlanError, match="got sample_count 4"):
        plan_step(SAMPLE_MEAN, Sequences(active_tokens=[2], sample_count=4), totals=totals)
