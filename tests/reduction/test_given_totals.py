"""A number in place of a mode's total: each weight by its formula, and the expected sum."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.reduction.modes import MODES

SEQUENCES = Sequences(
    active_tokens=[3, 0, 2, 5, 4],
    sample=[0, 1, 2, 2, 3],
    prompt=[0, 0, 1, 1, 1],
    group=[0, 0, 1, 1, 2],
    token_weight_sums=[1.5, 0.0, 2.0, 0.5, 4.0],
    num_microbatches=2,
)
N_B, N_P = [3, 0, 7, 7, 4], [3, 3, 11, 11, 11]
BY_HAND = {
    "token_mean": [1, 0, 1, 1, 1],
    "sample_mean": [1 / 3, 0, 1 / 7, 1 / 7, 1 / 4],
    "prompt_mean": [1 / 3, 0, 1 / 11, 1 / 11, 1 / 11],
    "constant": [1 / 40, 0, 1 / 40, 1 / 40, 1 / 40],
    "sample_sum": [1, 0, 1, 1, 1],
    "token_sum": [1, 0, 1, 1, 1],
    "length_power": [1 / 3**0.5, 0, 1 / 7**0.5, 1 / 7**0.5, 1 / 2],
    "balanced": [2 / 3, 0, 1 / 7, 1 / 7, 1 / 4],
    "row_mean": [1 / 3, 0, 1 / 4, 1 / 10, 1 / 4],
}
NUMBERS = {
    "constant": {"divisor": 40},
    "token_sum": {"divisor": 7},
    "length_power": {"exponent": 0.5},
}


def plan_of(mode, **more):
    return plan_step(Aggregation(mode, **NUMBERS.get(mode, {}), **more), SEQUENCES)


@pytest.mark.parametrize("mode", BY_HAND)
def test_each_weight_has_the_number_in_place_of_the_total(mode):
    plan = plan_of(mode)
    for total in (1.0, 2.5):
        given = replace(plan, total=total)
        assert given.weights.tolist() == pytest.approx([w / total for w in BY_HAND[mode]])
        found = sum(w * n for w, n in zip(given.weights.tolist(), [3, 0, 2, 5, 4], strict=True))
        assert given.expected_weight == pytest.approx(found)


@pytest.mark.parametrize("count", ["mask", "weights"])
@pytest.mark.parametrize("mode", BY_HAND)
def test_the_counted_total_gives_the_same_bits(mode, count):
    if count == "weights" and mode not in ("token_mean", "sample_mean", "constant"):
        pytest.skip("counts the mask")
    plan = plan_of(mode, count=count)
    given = replace(plan, total=plan.counted_total)
    np.testing.assert_array_equal(given.weight_S, plan.weight_S)


def test_a_term_has_the_number_in_place_of_its_own_total():
    given = replace(plan_of("sample_mean"), total=1.0)
    assert given.under("token_mean").weights.tolist() == [1, 0, 1, 1, 1]


def test_every_mode_with_a_total_is_computed_by_hand():
    assert set(BY_HAND) == {name for name, mode in MODES.items() if mode.total}


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("sample_mean", "sample_sum", True),
        ("sample_mean", "balanced", True),
        ("token_mean", "sample_mean", False),
        ("prompt_mean", "sample_mean", False),
    ],
)
def test_two_modes_have_one_total_if_both_divide_by_it(one, other, is_one):
    assert (Aggregation(one).total == Aggregation(other).total) == is_one


def test_samples_that_count_only_if_active_are_another_total():
    assert Aggregation("sample_mean").total != Aggregation("sample_sum", count_empty=False).total
