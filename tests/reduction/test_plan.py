"""Counts to weights: by hand on small numbers, and over ranks with gloo."""

import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from check_runner import checks_of
from conftest import early, launched

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.counts import StepTotals
from megatron_lossagg.reduction.options import Options


def aggregation(label):
    """Read a mode with its number, and V if empty samples and prompts do not count."""
    mode, *number = label.removesuffix(", V").split()
    name = "exponent" if mode == "length_power" else "divisor"
    numbers = {name: float(number[0])} if number else {}
    return Aggregation(mode, **numbers, count_empty=not label.endswith(", V"))


def weights(label, **sequences):
    return plan_step(aggregation(label), Sequences(**sequences)).weights.tolist()


LARGEST = [2**52, 2**52 - 4096] + [1] * 4096  # B n_b is above 2^63
SPLIT = {"active_tokens": [4, 2, 3], "sample": [5, 5, 9], "prompt": [0, 0, 0]}
ONE_EMPTY = {"active_tokens": [1, 0, 3], "sample": [5, 6, 7], "prompt": [0, 1, 2]}
NAMES = {"active_tokens": [1, 2, 4], "sample": [-2, 2**40, 0], "prompt": [-2, -2, 2**62]}
BY_HAND = {
    "every token alike": ("token_mean", {"active_tokens": [1, 9]}, [1 / 10] * 2),
    "every sample alike": ("sample_mean", {"active_tokens": [1, 9]}, [1 / 2, 1 / 18]),
    "a prompt is sum over sum, not a mean of means": (
        "prompt_mean", {"active_tokens": [1, 9], "prompt": [0, 0]}, [1 / 10] * 2,
    ),
    "two prompts": (
        "prompt_mean",
        {"active_tokens": [1, 9, 5], "prompt": [7, 7, -3]},
        [1 / 20, 1 / 20, 1 / 10],
    ),
    "a constant and the number of samples": (
        "constant 8", {"active_tokens": [1, 9]}, [1 / 16] * 2,
    ),
    "a constant and more samples": ("constant 8", {"active_tokens": [1, 9, 3, 3]}, [1 / 32] * 4),
    "no constant": ("token_sum", {"active_tokens": [1, 9]}, [1, 1]),
    "only a constant": ("token_sum 8", {"active_tokens": [1, 9, 4]}, [1 / 8] * 3),
    "the number of samples": ("sample_sum", {"active_tokens": [1, 9, 4]}, [1 / 3] * 3),
    "empty microbatches count in M": (
        "microbatch_token_mean",
        {"active_tokens": [1, 9, 5], "microbatch": [0, 0, 2], "num_microbatches": 4},
        [1 / 40, 1 / 40, 1 / 20],
    ),
    "M is the largest microbatch plus one": (
        "microbatch_token_mean",
        {"active_tokens": [1, 9, 5], "microbatch": [0, 0, 2]},
        [1 / 30, 1 / 30, 1 / 15],
    ),
    "microbatch indices have gaps": (
        "microbatch_token_mean",
        {"active_tokens": [1, 3], "microbatch": [0, 2**50], "num_microbatches": 2**51},
        [1 / 2**51, 1 / (3 * 2**51)],
    ),
    "a masked sample counts": ("sample_mean", {"active_tokens": [2, 0, 2]}, [1 / 6, 0, 1 / 6]),
    "a masked sample counts in V": (
        "sample_mean, V", {"active_tokens": [2, 0, 2]}, [1 / 4, 0, 1 / 4],
    ),
    "a masked sample counts in a sum": (
        "sample_sum", {"active_tokens": [2, 0, 2]}, [1 / 3, 0, 1 / 3],
    ),
    "a masked sample counts in a sum over V": (
        "sample_sum, V", {"active_tokens": [2, 0, 2]}, [1 / 2, 0, 1 / 2],
    ),
    "a masked sample counts beside a constant": (
        "constant 4", {"active_tokens": [2, 0, 2]}, [1 / 12, 0, 1 / 12],
    ),
    "a masked sample counts beside a constant in V": (
        "constant 4, V", {"active_tokens": [2, 0, 2]}, [1 / 8, 0, 1 / 8],
    ),
    "a masked prompt counts": (
        "prompt_mean", {"active_tokens": [2, 0], "prompt": [0, 1]}, [1 / 4, 0],
    ),
    "a masked prompt counts in Q": (
        "prompt_mean, V", {"active_tokens": [2, 0], "prompt": [0, 1]}, [1 / 2, 0],
    ),
    "one active token keeps a sample": ("sample_sum, V", ONE_EMPTY, [1 / 2, 0, 1 / 2]),
    "one active token keeps a prompt": ("prompt_mean, V", ONE_EMPTY, [1 / 2, 0, 1 / 6]),
    "a split sample is one sample": ("sample_mean", SPLIT, [1 / 12, 1 / 12, 1 / 6]),
    "a split sample in a sum": ("sample_sum", SPLIT, [1 / 2] * 3),
    "the prompt of a split sample": ("prompt_mean", SPLIT, [1 / 9] * 3),
    "an empty first sequence": ("sample_mean", {"active_tokens": [0, 2]}, [0, 1 / 4]),
    "an empty last sequence": ("sample_mean", {"active_tokens": [2, 0]}, [1 / 4, 0]),
    "an empty first sequence of a prompt": (
        "prompt_mean", {"active_tokens": [0, 2], "prompt": [0, 0]}, [0, 1 / 2],
    ),
    "an empty first microbatch": (
        "microbatch_token_mean", {"active_tokens": [0, 2], "microbatch": [0, 1]}, [0, 1 / 4],
    ),
    "an id is only a name": ("sample_mean", NAMES, [1 / 3, 1 / 6, 1 / 12]),
    "a prompt id is only a name": ("prompt_mean", NAMES, [1 / 6, 1 / 6, 1 / 8]),
    "the largest counts do not wrap": (
        "sample_mean", {"active_tokens": LARGEST}, [1 / (4098 * 2**52)],
    ),
    "the largest counts of prompts do not wrap": (
        "prompt_mean",
        {"active_tokens": LARGEST, "prompt": range(4098)},
        [1 / (4098 * 2**52)],
    ),
}  # fmt: skip
"""Mode, with divisor and V where empty ones do not count; sequences; the first weights."""


@pytest.mark.parametrize("what", BY_HAND)
def test_the_weights_are_those_calculated_by_hand(what):
    label, sequences, expected = BY_HAND[what]
    assert weights(label, **sequences)[: len(expected)] == expected


def test_microbatch_token_mean_alone_depends_on_the_microbatches():
    whole = {"active_tokens": [1, 9], "microbatch": [0, 0]}
    split = {"active_tokens": [1, 9], "microbatch": [0, 1]}
    assert weights("microbatch_token_mean", **whole) == [1 / 10, 1 / 10]
    assert weights("microbatch_token_mean", **split) == [1 / 2, 1 / 18]
    for mode in ("token_mean", "sample_mean", "sample_sum", "token_sum"):
        assert weights(mode, **whole) == weights(mode, **split)


def test_masked_sequences_add_no_phantom_token():
    assert weights("token_mean", active_tokens=[4, 0, 0, 4]) == [1 / 8, 0, 0, 1 / 8]


def test_counts_are_exact_beyond_2_24_and_2_31():
    assert weights("token_mean", active_tokens=[2**24, 1])[0] == 1 / (2**24 + 1)
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[2**31, 2**33, 1]))
    assert plan.totals.active_tokens == 2**31 + 2**33 + 1


def test_weights_are_float64_on_the_cpu():
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=torch.tensor([1, 2])))
    assert plan.weights.dtype == torch.float64
    assert plan.weights.device.type == "cpu"


def test_under_is_the_same_step_under_another_aggregation():
    plan = plan_step(
        Aggregation("constant", divisor=8), Sequences(active_tokens=[1, 9], prompt=[0, 1])
    )
    assert plan.under("token_mean").weights.tolist() == [1 / 10, 1 / 10]
    assert plan.under("trl:grpo").weights.tolist() == [1 / 2, 1 / 18]
    assert plan.under(Aggregation("prompt_mean")).weights.tolist() == [1 / 2, 1 / 18]
    assert plan.weights.tolist() == [1 / 16, 1 / 16]


def test_a_step_with_no_active_tokens_has_weight_0_and_warns_once():
    for mode in ("token_mean", "sample_mean", "sample_sum", "token_sum"):
        with pytest.warns(RuntimeWarning, match="no active tokens") as caught:
            assert weights(mode, active_tokens=[0, 0]) == [0, 0]
        assert len(caught) == 1
    with pytest.raises(PlanError, match="--loss-aggregation-empty-step"):
        plan_step(
            Aggregation("token_mean"),
            Sequences(active_tokens=[0]),
            options=Options(empty_step="error"),
        )


def test_the_warning_of_an_empty_step_points_at_its_caller():
    with pytest.warns(RuntimeWarning, match="no active tokens") as caught:
        plan_step(Aggregation("token_mean"), Sequences(active_tokens=[0]))
    assert caught[0].filename == __file__


def test_known_totals_may_be_those_of_an_empty_step():
    with pytest.warns(RuntimeWarning, match="no active tokens"):
        plan = plan_step(
            Aggregation("token_mean"), Sequences(active_tokens=[0]), totals=totals(active_tokens=0)
        )
    assert plan.weights.tolist() == [0]


def totals(**known):
    return StepTotals(**known)


def test_totals_replace_counting():
    sequences = Sequences(active_tokens=[2, 3])
    plan = plan_step(Aggregation("constant", divisor=4), sequences, totals=totals(samples=8))
    assert plan.weights.tolist() == [1 / 32, 1 / 32]
    assert plan.expected_weight is None  # N is not known
    plan = plan_step(Aggregation("sample_mean"), sequences, totals=totals(samples=8))
    assert plan.weights.tolist() == [1 / 16, 1 / 24]


def test_the_expected_weight_is_unknown_where_its_counts_are():
    plan = plan_step(
        Aggregation("token_sum"), Sequences(active_tokens=[2]), totals=totals(active_tokens=5)
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
        plan = plan_step(Aggregation(mode), Sequences(**sequences), totals=totals(**known))
        assert plan.weights.tolist() == [weight, 0]


# Totals that cannot be those of a step with these sequences: without a check the weight is
# infinite, negative or quietly another loss's.
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:the plan has no active tokens")
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
        plan_step(aggregation, Sequences(active_tokens=n), totals=totals(**{name: value}))


def test_totals_equal_to_the_local_counts_are_accepted():
    sequences = Sequences(active_tokens=[2, 0])
    least = {"active_tokens": 2, "samples": 2, "active_samples": 1}
    for mode in ("token_mean", "sample_mean", "sample_sum"):
        for count_empty in (True, False):
            aggregation = Aggregation(mode, count_empty=count_empty)
            known = plan_step(aggregation, sequences, totals=totals(**least))
            counted = plan_step(aggregation, sequences)
            assert known.weights.tolist() == counted.weights.tolist()
            assert known.expected_weight == counted.expected_weight


@pytest.mark.parametrize("kind", ["sample", "prompt"])
def test_ids_are_refused_with_known_totals(kind):
    """A sample or prompt may have sequences on ranks that nobody asks."""
    sequences = Sequences(active_tokens=[2], **{kind: [0]})
    with pytest.raises(PlanError, match=rf"got totals= and {kind}=, .* drop totals= or {kind}="):
        plan_step(Aggregation("token_mean"), sequences, totals=totals(active_tokens=2))


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
            totals=None if known is None else totals(**known),
        )


def test_v_and_q_are_required_where_empty_ones_do_not_count():
    with pytest.raises(PlanError, match=r"StepTotals\(active_samples="):
        plan_step(
            Aggregation("sample_sum", count_empty=False),
            Sequences(active_tokens=[2]),
            totals=totals(samples=3),
        )


def test_a_custom_reducers_plan_has_totals_and_no_weights():
    custom = Aggregation("custom", reducer_path="math:fsum")
    plan = plan_step(custom, Sequences(active_tokens=[2, 3]))
    assert plan.totals.active_tokens == 5
    assert plan.expected_weight is None
    with pytest.raises(PlanError, match=r"plan\.under\(mode\)\.weights"):
        plan.weights  # noqa: B018
    assert plan.under("token_mean").weights.tolist() == [1 / 5, 1 / 5]


BAD = {
    "negative counts": (
        {"active_tokens": [2, -1]},
        "active_tokens: got -1 at index 1, the smallest is 0",
    ),
    "fractions": ({"active_tokens": [2.0]}, "got float64 of .* expected integers"),
    "two dimensions": ({"active_tokens": [[1, 2]]}, r"shape \(1, 2\)"),
    "too few ids": (
        {"active_tokens": [1, 2], "sample": [1]},
        "sample: got 1 entries, expected 2, one per sequence",
    ),
    "too many prompts": (
        {"active_tokens": [1], "prompt": [1, 2]},
        "prompt: got 2 entries, expected 1",
    ),
    "a microbatch below 0": (
        {"active_tokens": [1], "microbatch": [-1]},
        "microbatch: got -1 at index 0",
    ),
    "a microbatch beyond M": (
        {"active_tokens": [1], "microbatch": [3], "num_microbatches": 3},
        "names microbatch 3, num_microbatches is 3",
    ),
    "a sample under two prompts": (
        {"active_tokens": [1, 2, 3], "sample": [4, 4, 5], "prompt": [0, 1, 1]},
        "sample 4 has sequences under 2 prompts",
    ),
    "a sample under two prompts among others": (
        {"active_tokens": [1, 2, 3], "sample": [3, 4, 4], "prompt": [0, 0, 1]},
        r"sample 4 has sequences under 2 prompts \(0, 1\)",
    ),
    "a sample under four prompts": (
        {"active_tokens": [1] * 4, "sample": [4] * 4, "prompt": [0, 1, 2, 3]},
        r"under 4 prompts \(0, 1, 2, 3\)",
    ),
    "a sample under five prompts": (
        {"active_tokens": [1] * 5, "sample": [4] * 5, "prompt": [0, 1, 2, 3, 4]},
        r"under 5 prompts \(0, 1, 2, 3, \.\.\.\)",
    ),
    "counts on a device": (
        {"active_tokens": torch.zeros(2, dtype=torch.int64, device="meta")},
        "active_tokens is on meta: .* pass a list or a CPU tensor",
    ),
    "microbatches of another number": (
        {"active_tokens": [1, 2], "microbatch": [0]},
        "microbatch: got 1 entries, expected 2",
    ),
    "a fraction of a microbatch": (
        {"active_tokens": [1], "microbatch": [0], "num_microbatches": 2.5},
        r"got num_microbatches 2\.5, expected an integer",
    ),
    "fewer than no microbatch": (
        {"active_tokens": [1], "num_microbatches": -1},
        "num_microbatches.*-1",
    ),
    "a count that float64 does not hold": (
        {"active_tokens": [2**53 + 1]},
        r"of 1 sequences sum to 9007199254740993, the most .* 2\^53",
    ),
    "counts whose sum wraps int64": (
        {"active_tokens": [2**62, 2**62]},
        "of 2 sequences sum to 9223372036854775808, the most",
    ),
    "counts whose sum wraps to 0": ({"active_tokens": [2**62] * 4}, "sum to 18446744073709551616"),
    "more microbatches than there can be": (
        {"active_tokens": [1], "num_microbatches": 2**70},
        "num_microbatches 1180591620717411303424, expected",
    ),
    "NaN ids": ({"active_tokens": [1], "sample": [math.nan]}, "sample: got float64"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_counts_and_ids_are_refused(what):
    given, message = BAD[what]
    with pytest.raises(PlanError, match=message):
        plan_step(Aggregation("token_mean"), Sequences(**given))
    if not {"sample", "prompt"} <= given.keys():  # ids are refused next to totals
        known = totals(active_tokens=100, samples=100, prompts=100)
        with pytest.raises(PlanError, match=message):
            plan_step(Aggregation("token_mean"), Sequences(**given), totals=known)


def test_a_plan_keeps_the_microbatch_of_each_sequence():
    sequences = Sequences(active_tokens=[1, 9], microbatch=[1, 0])
    plan = plan_step(Aggregation("token_mean"), sequences)
    assert plan.under("sample_mean").sequences.microbatch.tolist() == [1, 0]


def test_a_callers_own_fault_is_raised_instead_of_a_plan():
    for known in (None, totals(active_tokens=9)):
        with pytest.raises(PlanError, match="rank 0 of the data-parallel group: no file"):
            plan_step(
                Aggregation("token_mean"),
                Sequences(active_tokens=[]),
                fault="no file",
                totals=known,
            )


def test_num_microbatches_without_microbatch_is_only_stored():
    sequences = Sequences(active_tokens=[1, 9], num_microbatches=3)
    plan = plan_step(Aggregation("token_mean"), sequences)
    assert plan.sequences.num_microbatches == 3
    assert plan.totals.microbatch_means is None
    assert plan.weights.tolist() == [1 / 10, 1 / 10]


def test_sequences_only_stores():
    assert Sequences(active_tokens="nonsense").active_tokens == "nonsense"


def test_a_string_is_refused_as_an_aggregation():
    with pytest.raises(PlanError, match="got 'token_mean', expected an Aggregation"):
        plan_step("token_mean", Sequences(active_tokens=[1]))


def test_numpy_integers_of_any_width_are_counts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequences = np.array([1, 9], dtype=np.int32)
        assert weights("token_mean", active_tokens=sequences) == [1 / 10, 1 / 10]


def test_strings_are_ids_like_integers():
    sequences = {"active_tokens": [4, 2, 3, 1]}
    as_integers = {"sample": [5, 5, 9, 7], "prompt": [0, 0, 1, 1]}
    as_strings = {"sample": ["a", "a", "b9", ""], "prompt": np.array(["p", "p", "q", "q"])}
    as_objects = {
        "sample": np.array(["a", "a", "b9", ""], dtype=object),
        "prompt": ["p"] * 2 + ["q"] * 2,
    }
    for mode in ("sample_mean", "prompt_mean"):
        expected = weights(mode, **sequences, **as_integers)
        assert weights(mode, **sequences, **as_strings) == expected
        assert weights(mode, **sequences, **as_objects) == expected


def test_strings_that_differ_by_a_nul_at_the_end_differ():
    assert weights("prompt_mean", active_tokens=[1, 9], prompt=["a\0", "a"]) == [1 / 2, 1 / 18]


def test_a_mode_by_its_name_counts_what_the_plan_counts():
    aggregation = Aggregation("sample_sum", count_empty=False)
    plan = plan_step(aggregation, Sequences(active_tokens=[3, 0]))
    assert plan.under("sample_sum").weights.tolist() == plan.weights.tolist() == [1, 0]
    assert plan.under("sample_mean").weights.tolist() == [1 / 3, 0]
    assert plan.under(Aggregation("sample_mean")).weights.tolist() == [1 / 6, 0]
    assert plan.under("verl:seq-mean-token-sum").weights.tolist() == [1 / 2, 0]  # it says so
    with pytest.raises(PlanError, match="got 5, expected an Aggregation or the name of a mode"):
        plan.under(5)


def test_strings_with_one_hash_are_refused(monkeypatch):
    monkeypatch.setattr("megatron_lossagg.reduction.sequences.hashed", lambda text: len(text))
    assert weights("prompt_mean", active_tokens=[1, 9], prompt=["a", "bb"]) == [1 / 2, 1 / 18]
    with pytest.raises(PlanError, match="two strings have one 63-bit hash: pass integer ids"):
        weights("prompt_mean", active_tokens=[1, 9], prompt=["a", "b"])


def test_ids_of_mixed_kinds_are_refused():
    for mixed in (np.array(["a", 3], dtype=object), ["7", 7]):
        with pytest.raises(PlanError, match=r"prompt: got .*, expected integers"):
            weights("prompt_mean", active_tokens=[1, 9], prompt=mixed)


def test_samples_per_prompt_finds_prompts_that_were_merged():
    sequences = {"active_tokens": [1, 2, 3, 4], "sample": [0, 0, 1, 2], "prompt": [0, 0, 0, 7]}
    with pytest.raises(PlanError, match=r"prompt 7 has 1 samples .* is 2: ids are global over"):
        weights("prompt_mean", **sequences, samples_per_prompt=2)
    sequences["prompt"] = [0, 0, 7, 7]
    with pytest.raises(PlanError, match="prompt 0 has 1 samples over the step"):
        weights("prompt_mean", **sequences, samples_per_prompt=2)
    sequences["sample"] = [0, 1, 2, 3]
    whole = weights("prompt_mean", **sequences, samples_per_prompt=2)
    assert whole == weights("prompt_mean", **sequences)
    del sequences["sample"]
    assert weights("prompt_mean", **sequences, samples_per_prompt=2) == whole


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", True])
def test_samples_per_prompt_is_an_integer_from_1(number):
    sequences = {"active_tokens": [1], "prompt": [0], "samples_per_prompt": number}
    with pytest.raises(PlanError, match=r"samples_per_prompt .*, expected an integer from 1"):
        weights("prompt_mean", **sequences)


def test_samples_per_prompt_needs_prompts():
    with pytest.raises(PlanError, match=r"samples_per_prompt .* no prompt ids: pass prompt="):
        weights("token_mean", active_tokens=[1], samples_per_prompt=2)


def test_a_divisor_below_the_longest_sample_warns_once(monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    weights("constant 6", active_tokens=[6, 2])
    weights("token_sum 2", active_tokens=[6, 2])
    with pytest.warns(RuntimeWarning, match="divides by 5, and a sample has 6 tokens"):
        weights("constant 5", active_tokens=[6, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights("constant 4", active_tokens=[6, 2])
    monkeypatch.setattr(faults, "_warned", set())
    with pytest.warns(RuntimeWarning, match="a sample has 8 tokens"):
        weights("constant 7", active_tokens=[6, 2], sample=[0, 0])


def test_a_divisor_below_the_longest_sample_warns_under_too(monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[300]))
    with pytest.warns(RuntimeWarning, match="divides by 10, and a sample has 300 tokens"):
        plan.under(Aggregation("constant", divisor=10))


@pytest.mark.parametrize("divisor", [1e308, 1e40, 1e-40])
def test_a_weight_that_float32_does_not_hold_is_refused(divisor):
    with pytest.raises(
        PlanError, match=r"gives a sequence a weight of .*, beyond what float32 holds"
    ):
        weights(f"constant {divisor}", active_tokens=[0, 3])


def test_a_reducer_path_that_leads_nowhere_is_refused_when_the_step_is_planned():
    custom = Aggregation("custom", reducer_path="no.such:f")
    with pytest.raises(PlanError, match=r"'no\.such:f' raised ModuleNotFoundError"):
        plan_step(custom, Sequences(active_tokens=[3]))


CHECKS = checks_of(Path(__file__).parent / "plan_worker.py")


@early
def printed():
    """Return what the worker printed, by number of processes."""
    return {n: launched("reduction/plan_worker.py", processes=n, timeout=120) for n in (2, 3)}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_over_ranks(printed, check, processes):
    assert f"PASSED check_{check}" in printed[processes].splitlines()
