"""What is weighed is the gradient, on every layout; and the verdicts of weights by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import each_check

from megatron_lossagg.weigh.causes import Explanation, equal_to, likely
from megatron_lossagg.weigh.compare import RankWeights, compare, parts_of
from megatron_lossagg.weigh.report import as_json, text

output_of_dp2, test_dp2 = each_check("weigh/weigh_worker.py", processes=2)
output_of_dp2_cp2, test_dp2_cp2 = each_check("weigh/weigh_worker.py", processes=4)
output_of_calls_dp2, test_calls_dp2 = each_check("weigh/weigh_calls_worker.py", processes=2)
output_of_calls_cp2, test_calls_cp2 = each_check("weigh/weigh_calls_worker.py", processes=4)

LENGTHS = ((3, 5), (4,))
"""Tokens of the sequences of two microbatches of one rank."""


def weighing(low, tokens, high=None, **more):
    """Return parts of one microbatch with the tokens, whose weights are ``low`` to ``high``."""
    low, tokens = np.array(low, float), np.broadcast_to(tokens, len(low))
    high = low if high is None else np.array(high, float)
    columns = {"weight_min": low, "weight_max": high, "lowest": low, "highest": high}
    columns |= {"weight_sum": tokens * (low + high) / 2, "n": tokens, "length": tokens}
    return parts_of(len(low), tokens=tokens, sequence=range(len(low)), **columns, **more)


def placed(parts, places):
    """Put parts into microbatches; ``places``: the microbatch and the number of each."""
    parts["microbatch"], parts["sequence"] = np.array(places).T
    return parts


def ranks(weight, **more):
    """Return one rank whose tokens weigh ``weight(n_mb, n)``: of a microbatch, of a sequence."""
    places = [(m, s) for m, lengths in enumerate(LENGTHS) for s in range(len(lengths))]
    w = [weight(sum(LENGTHS[m]), LENGTHS[m][s]) for m, s in places]
    one = RankWeights(
        sizes={"M": 2, "DP": 1, "CP": 1, "TP": 1, "PP": 1},
        parts=placed(weighing(w, [LENGTHS[m][s] for m, s in places]), places),
        num_tokens=None,
        is_finalized=True,
        counts=True,
        tolerance=1e-4,
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


def with_empty(weight, *places):
    """Return the rank of ``ranks``, which also holds sequences without a token at (mb, number)."""
    (one,) = ranks(weight)
    empty = placed(parts_of(len(places)), places)
    return [replace(one, parts=np.concatenate([one.parts, empty]))]


@pytest.mark.parametrize(
    ("weight", "mode", "k"),
    [
        (lambda n_mb, n: 1 / (4 * n), "sample_mean", 1),
        (lambda n_mb, n: 1 / (5 * n), "sample_mean", 2),
        (lambda n_mb, n: 1 / 5, "sample_sum", 2),
    ],
)
def test_a_number_of_empty_sequences_that_nobody_told_is_a_hint_only(weight, mode, k):
    step = compare(with_empty(weight, (0, 2), (1, 1)))
    assert (step.trains, step.num_empty) == (None, 2)
    assert f"or {mode}, if B counts {k} of 2 empty sequences: pass sample=" in step.causes
    assert not step.fits_mode(mode)
    assert "12 tokens in 3 sequences and 2 empty" in text(step)


@pytest.mark.parametrize("times", [1, 0.1])
@pytest.mark.parametrize("b", [3, 5])
def test_empty_samples_are_counted_or_not_where_their_ids_are_known(times, b):
    (one,) = with_empty(lambda n_mb, n: times / (b * n), (0, 2), (1, 1), (1, 2))
    one.parts["sample"] = ["a", "b", "c", "d", "e", None]  # the last one is padding
    step = compare([one])
    name = "sample_mean" if b == 5 else "sample_mean without its 2 empty"
    assert step.factors[name] == pytest.approx(times)
    assert step.fits_mode("sample_mean") == (times == 1)
    assert step.num_empty == 3
    if times == 1:
        assert (step.trains, step.counted_empty) == (name, 2 * (b == 5))
    else:
        assert step.nearest == "sample_mean"
        assert not [cause for cause in step.causes if "if B counts" in cause]


@pytest.mark.parametrize("factor", [1 / 6, 3 / 4.5, 3 / 2, -3 / 4])
def test_no_number_of_empty_sequences_explains_another_factor(factor):
    step = compare(with_empty(lambda n_mb, n: factor / (3 * n), (0, 2), (1, 1)))
    assert (step.trains, step.nearest, step.factor) == (
        None,
        "sample_mean",
        pytest.approx(factor),
    )
    assert not step.fits_mode("sample_mean")


def test_a_factor_of_the_sizes_may_be_a_count_of_empty_sequences_and_is_not_trained():
    step = compare(with_empty(lambda n_mb, n: 1 / (6 * n), (0, 2), (0, 3), (1, 1)))
    assert (step.trains, step.factor) == (None, pytest.approx(1 / 2))
    assert step.causes == (
        "a constant factor on sample_mean: 0.5 = 1/M",
        "or sample_mean, if B counts 3 of 3 empty sequences: pass sample=",
    )


@pytest.mark.parametrize(("factor", "k"), [(0.9, 0), (4096 / 4352, 256), (4096 / 5120, 1024)])
def test_in_a_large_step_a_factor_is_no_count_unless_it_is_one_to_six_digits(factor, k):
    v, n = 4096, [3, 5]
    w = [factor / (v * n[number % 2]) for number in range(v)]
    empty = parts_of(1024, microbatch=1, sequence=range(1024))
    parts = np.concatenate([weighing(w, n * (v // 2)), empty])
    (one,) = ranks(lambda n_mb, n: 1.0)
    step = compare([replace(one, parts=parts)])
    hint = f"or sample_mean, if B counts {k} of 1024 empty sequences: pass sample="
    assert (hint in step.causes) == (k > 0)
    assert not step.fits_mode("sample_mean")
    coarse = compare([replace(one, parts=parts, tolerance=2**-7)])
    assert (hint in coarse.causes) == (k == 1024)


def test_tokens_that_are_all_weighed_with_0_train_nothing():
    step = compare(ranks(lambda n_mb, n: 0.0))
    assert (step.trains, step.tokens) == (None, 12)
    assert "verdict: trains nothing" in text(step)


def test_num_tokens_divide_what_was_measured():
    step = compare(ranks(lambda n_mb, n: 1.0, num_tokens=12))
    assert step.trains == "token_mean"


def test_a_step_without_num_tokens_is_named():
    step = compare(ranks(lambda n_mb, n: 1.0, num_tokens=0))
    assert step.causes == ("num_tokens is 0: finalize divides by nothing",)


def test_a_loss_function_that_divides_by_itself_needs_no_num_tokens():
    step = compare(ranks(lambda n_mb, n: 1 / 12, num_tokens=0))
    assert (step.trains, [*step.causes]) == ("token_mean", [])


def test_a_factor_is_named_by_what_it_equals():
    step = compare(ranks(lambda n_mb, n: 1 / 24))
    assert (step.trains, step.factor) == (None, pytest.approx(0.5))
    assert step.causes == (
        "a constant factor on token_mean: 0.5 = 1/M",
        "or constant, if L is 8: pass divisor= (--divisor)",
    )


def test_a_constant_other_than_the_one_passed_is_named():
    (rank,) = ranks(lambda n_mb, n: 1 / 24)
    step = compare([replace(rank, given={"divisor": 320.0})])
    assert step.causes[1:] == ("or 40 times constant, which it is if L is 8",)


def test_the_flag_that_trains_a_token_mean_is_advised_where_stock_trains():
    flag = "--calculate-per-token-loss"
    assert flag in text(compare(ranks(lambda n_mb, n: 1 / (4 * n_mb))))
    assert flag not in text(compare(ranks(lambda n_mb, n: 1 / n_mb, num_tokens=12.0)))  # it is on
    other = text(compare(ranks(lambda n_mb, n: 1 / 24)))
    assert flag not in other
    assert "next: for a mode, run with --loss-aggregation MODE" in other


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
    lines = text(replace(step, faults=(words,)), number=12).splitlines()
    assert max(map(len, lines)) <= 80


def test_of_all_causes_those_with_the_fewest_factors_are_named():
    """Three of four means have 4 tokens each, of a sequence: B/(M CP) of a token mean too."""
    (one,) = ranks(lambda n_mb, n: 1.0)
    parts = placed(weighing([1 / 16] * 3, 4, cp_rank=[0, 1, 0]), [(0, 0), (0, 1), (1, 0)])
    step = compare([replace(one, parts=parts, sizes={**one.sizes, "CP": 2})])
    assert step.trains is None
    where = "microbatch and context-parallel rank"
    assert step.causes[0] == f"a mean of one token mean per {where}; 1 of 4 have no token"
    assert step.factors["token_mean"] == pytest.approx(3 / 4)


def of_two_ranks(weight):
    """Return two ranks, each as in ``ranks``; ``weight(n_mb, b_mb, n)``: also by its sequences."""
    sequences_of = {sum(lengths): len(lengths) for lengths in LENGTHS}
    (one,) = ranks(lambda n_mb, n: weight(n_mb, sequences_of[n_mb], n))
    first = replace(one, sizes={**one.sizes, "DP": 2})
    second = one.parts[:2].copy()
    second["dp_rank"] = 1
    return [first, replace(first, parts=second)]  # of two and of one microbatch


@pytest.mark.parametrize(
    ("weight", "cause"),
    [
        (
            lambda n_mb, b_mb, n: 1 / (4 * b_mb * n),
            "a mean of one sample mean per microbatch; 1 of 4 have no token",
        ),
        (
            lambda n_mb, b_mb, n: 1 / (2 * (16 if n_mb == 8 else 4)),
            "a mean of one token mean per microbatch of all ranks",
        ),
        (
            lambda n_mb, b_mb, n: 1 / (2 * n * (4 if n_mb == 8 else 1)),
            "a mean of one sample mean per microbatch of all ranks",
        ),
    ],
)
def test_means_of_samples_and_of_all_ranks_are_named(weight, cause):
    step = compare(of_two_ranks(weight))
    assert (step.trains, step.causes) == (None, (cause,))


def test_means_of_data_parallel_ranks_are_named():
    first, second = of_two_ranks(lambda n_mb, b_mb, n: 1 / (2 * 12))
    second = replace(second, parts=weighing([1 / 16] * 2, LENGTHS[0], dp_rank=1))
    step = compare([first, second])
    assert step.causes == ("a mean of one token mean per data-parallel rank",)


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_rank_that_heard_fewer_microbatches_does_not_say_how_many_there_are(fewer):
    """Whichever of the ranks it is: M divides the weights of both, with 4 microbatches on one."""
    both = of_two_ranks(lambda n_mb, b_mb, n: 1 / (4 * 2 * n_mb))
    sizes = [{**one.sizes, "M": 2 if number == fewer else 4} for number, one in enumerate(both)]
    step = compare([replace(one, sizes=its) for one, its in zip(both, sizes, strict=True)])
    assert step.trains == "microbatch_token_mean by the largest M"
    assert step.fits_mode("microbatch_token_mean")


def test_ranks_with_unequal_numbers_of_microbatches_have_each_its_own():
    both = of_two_ranks(lambda n_mb, b_mb, n: 1 / (4 * 2 * n_mb))
    parts = weighing([1 / 16] * 2, LENGTHS[0], dp_rank=1)
    first = replace(both[0], sizes={**both[0].sizes, "M": 4})
    second = replace(both[1], sizes={**both[1].sizes, "M": 1}, parts=parts)
    step = compare([first, second])
    assert (step.trains, step.fits) == ("microbatch_token_mean", ["microbatch_token_mean"])


@pytest.mark.parametrize(
    ("mode", "weight"),
    [("token_mean", lambda n_mb, n: -1 / 12), ("sample_mean", lambda n_mb, n: -0.01 / (3 * n))],
)
def test_negative_weights_are_a_factor_on_the_mode_whose_form_they_have(mode, weight):
    step = compare(ranks(weight))
    assert (step.trains, step.nearest) == (None, mode)
    assert step.factor == pytest.approx({"token_mean": -1, "sample_mean": -0.01}[mode])
    assert step.inside == 1.0


def test_a_step_without_a_trained_token_trains_nothing():
    step = compare([replace(ranks(lambda n_mb, n: 1.0)[0], parts=parts_of(0))])
    assert (step.trains, step.causes) == (None, ())
    assert "trains nothing" in text(step, number=1)


def test_the_object_has_one_entry_per_sequence_and_their_weights_sum():
    made = as_json(compare(ranks(lambda n_mb, n: 1 / 12)), number=3)
    assert [entry["tokens"] for entry in made["sequences"]] == [3, 5, 4]
    assert sum(entry["weight_sum"] for entry in made["sequences"]) == pytest.approx(1.0)
    assert {entry["step"] for entry in made["sequences"]} == {3}


@pytest.mark.parametrize(
    ("factor", "only_products", "names"),
    [
        (6.0, True, ["N"]),
        (1 / 2, True, ["1/M"]),
        (1 / 6, True, ["1/N"]),
        (12.0, False, ["M N"]),
        (24.0, False, ["M^2 N"]),
        (1.5, False, ["DP/M"]),
        (1.5, True, []),
        (4.0, True, []),
        (0.0, False, []),
        (1.0, False, []),
    ],
)
def test_the_quotients_with_the_fewest_factors_are_named(factor, only_products, names):
    sizes, rest = {"M": 2, "DP": 3, "CP": 1}, {"tolerance": 1e-9, "only_products": only_products}
    assert equal_to(factor, sizes, {"N": 6}, **rest) == names


def test_all_modes_that_a_step_cannot_tell_apart_are_named():
    one = replace(ranks(lambda n_mb, n: 1.0)[0], parts=weighing([1 / 8] * 2, 4))
    step = compare([replace(one, sizes={**one.sizes, "M": 1})])
    assert step.trains == "token_mean"
    assert [*step.fits] == ["token_mean", "sample_mean", "microbatch_token_mean"]
    assert "trains token_mean, and so sample_mean" in step.verdict


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.1), (-0.1, 0.3)])
def test_weights_inside_a_sequence_that_differ_in_sign_are_infinitely_apart(low, high):
    step = compare([replace(ranks(lambda n_mb, n: 1.0)[0], parts=weighing([low], 4, [high]))])
    assert step.inside == float("inf")
    assert "one sequence, token to token" in text(step)


def test_of_many_sequences_those_with_the_smallest_and_the_largest_weight_are_reported():
    step = compare([replace(ranks(lambda n_mb, n: 1.0)[0], parts=weighing(range(1, 100), 4))])
    lines = text(step).splitlines()
    at = lines.index("6 of 99 sequences, those with the smallest and the largest mean weight")
    named = [line.split()[0] for line in lines[at + 2 : -2]]
    assert named == [f"0/0/{number}" for number in (0, 1, 2, 96, 97, 98)]


def test_a_sequence_is_reported_by_its_name_within_80_columns():
    parts = weighing([1 / 8, 1 / 4], 4, name=["u" * 90] * 2)
    step = compare([replace(ranks(lambda n_mb, n: 1.0)[0], parts=parts)])
    assert [one.name for one in step.sequences] == ["u" * 90] * 2
    lines = text(step).splitlines()
    assert any(line.startswith("  0/0/1 uuuu") for line in lines)
    assert max(map(len, lines)) <= 80
    assert "next:" in text(step)
    assert "next:" not in text(step, advises=False)


def test_weights_that_are_not_finite_are_named_and_none_in_the_object():
    step = compare([replace(ranks(lambda n_mb, n: 1.0)[0], parts=weighing([np.nan], 4))])
    assert step.trains is None
    assert step.causes[0].startswith("weights of 1 sequences are not finite")
    json.dumps(as_json(step, number=1), allow_nan=False)


def test_an_infinite_weight_is_no_factor():
    one = replace(ranks(lambda n_mb, n: 1.0)[0], parts=weighing([0.125], 4, [np.inf]))
    assert compare([one]).factor is None


def test_a_step_that_was_not_finalized_trains_no_mode_that_is_known():
    step = compare(ranks(lambda n_mb, n: 1 / 12, is_finalized=False))
    assert (step.trains, [*step.fits]) == (None, [])
    assert step.verdict == "not known, for it was not finalized"


def test_num_tokens_need_not_be_integers():
    step = compare(ranks(lambda n_mb, n: 0.5 / 12, num_tokens=0.5))
    assert step.trains == "token_mean"


def test_losses_of_a_coarser_dtype_have_its_tolerance():
    coarse = ranks(lambda n_mb, n: 1.003 / 12, tolerance=2**-7)
    assert compare(coarse).trains == "token_mean"
    assert compare(ranks(lambda n_mb, n: 1.003 / 12)).trains is None


def test_of_many_equal_quotients_few_are_named_and_the_others_counted():
    found = [
        Explanation("token_mean", name, 2.0, 2, is_mode=True, note="")
        for name in ("M/DP", "M/CP", "DP/CP", "CP/DP", "CP/M", "DP/M")
    ]
    (said,) = likely(found, is_mode=False)
    assert said.endswith(
        "2 = M/DP = M/CP = DP/CP = CP/DP, or 2 more quotients: weigh a second step"
    )


def test_columns_of_small_negative_weights_stand_apart():
    step = compare(ranks(lambda n_mb, n: 1.0))
    step = replace(step, modes={"token_sum": (-0.0022079, -0.00033967)})
    assert "-0.002208 -0.0003397" in text(step)
