"""What is weighed is the gradient, on every layout; and the verdicts of weights by hand."""

from dataclasses import replace

import pytest
from conftest import each_check

from megatron_lossagg.weigh.compare import Part, RankWeights, compare, equal_products
from megatron_lossagg.weigh.report import as_json, text

output_of_dp2, test_dp2 = each_check("weigh/weigh_worker.py", processes=2)
output_of_dp2_cp2, test_dp2_cp2 = each_check("weigh/weigh_worker.py", processes=4)

LENGTHS = ((3, 5), (4,))
"""Tokens of the sequences of two microbatches of one rank."""


def ranks(weight, **more):
    """Return one rank whose tokens weigh ``weight(n_mb, n)``: of a microbatch, of a sequence."""
    parts = []
    for microbatch, lengths in enumerate(LENGTHS):
        for sequence, n in enumerate(lengths):
            w = weight(sum(lengths), n)
            bounds = {"weight_sum": n * w, "weight_min": w, "weight_max": w}
            parts.append(Part(microbatch=microbatch, sequence=sequence, tokens=n, **bounds))
    one = RankWeights(
        dp_rank=0,
        cp_rank=0,
        sizes={"M": 2, "DP": 1, "CP": 1, "TP": 1, "PP": 1},
        parts=parts,
        num_tokens=None,
        is_divided=False,
        is_finalized=True,
        counts=True,
    )
    return [replace(one, **more)]


@pytest.mark.parametrize(
    ("mode", "weight"),
    [
        ("token_mean", lambda n_mb, n: 1 / 12),
        ("sample_mean", lambda n_mb, n: 1 / (3 * n)),
        ("sample_sum", lambda n_mb, n: 1 / 3),
        ("token_sum", lambda n_mb, n: 1.0),
        ("microbatch_token_mean", lambda n_mb, n: 1 / (2 * n_mb)),
    ],
)
def test_each_mode_is_recognised_by_its_weights(mode, weight):
    step = compare(ranks(weight))
    assert step.trains == mode
    assert step.modes[mode] == pytest.approx((1.0, 1.0))
    assert f"verdict: trains {mode}" in text(step, number=1)


def test_num_tokens_divide_what_was_measured():
    step = compare(ranks(lambda n_mb, n: 1.0, num_tokens=12, is_divided=True))
    assert step.trains == "token_mean"


def test_a_step_without_num_tokens_is_named():
    step = compare(ranks(lambda n_mb, n: 1.0, num_tokens=0, is_divided=True))
    assert step.causes == ("num_tokens is 0: finalize divides by nothing",)


def test_a_factor_is_named_by_what_it_equals():
    step = compare(ranks(lambda n_mb, n: 1 / 24))
    assert (step.trains, step.factor) == (None, pytest.approx(0.5))
    assert step.causes == ("a constant factor on token_mean: 0.5 = 1/M",)


def test_weights_of_no_mode_name_the_sequences_that_are_off():
    step = compare(ranks(lambda n_mb, n: {3: 0.1, 5: 0.3, 4: 0.2}[n]))
    assert (step.trains, step.factor, step.causes) == (None, None, ())
    shown = text(step, number=7)
    assert "verdict: trains no mode; nearest is" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_microbatches_without_a_token_are_means_too():
    (one,) = ranks(lambda n_mb, n: 1 / (4 * n_mb))
    step = compare([replace(one, sizes={**one.sizes, "M": 4})])
    assert step.weight_sum == pytest.approx(0.5)
    assert step.causes == ("a mean of one token mean per microbatch; 2 of 4 have no token",)
    words = "a mean of one token mean per microbatch and context-parallel rank; 13 of 132 have none"
    lines = text(replace(step, causes=(words,)), number=12).splitlines()
    assert max(map(len, lines)) <= 80


def test_negative_weights_train_no_mode():
    step = compare(ranks(lambda n_mb, n: -1 / 12))
    assert step.trains is None
    assert step.factor == pytest.approx(-1)


def test_a_step_without_a_trained_token_trains_nothing():
    step = compare([replace(ranks(lambda n_mb, n: 1.0)[0], parts=[])])
    assert step.trains is None
    assert "trains nothing" in text(step, number=1)


def test_the_object_has_one_entry_per_sequence_and_their_weights_sum():
    made = as_json(compare(ranks(lambda n_mb, n: 1 / 12)), number=3)
    assert [entry["tokens"] for entry in made["sequences"]] == [3, 5, 4]
    assert sum(entry["weight_sum"] for entry in made["sequences"]) == pytest.approx(1.0)
    assert {entry["step"] for entry in made["sequences"]} == {3}


def test_products_of_sizes_are_named_shortest_first():
    sizes = {"M": 2, "DP": 3, "CP": 1}
    assert equal_products(6.0, sizes, {"N": 6}, tolerance=1e-9) == ["N", "M DP"]
    assert equal_products(1 / 2, sizes, {"N": 6}, tolerance=1e-9) == ["1/M"]
