"""The counts and ids that a plan is made of: what is refused, and what an id may be."""

import math
import warnings

import numpy as np
import pytest
import torch
from steps import weights_of

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.modes import CUSTOM, MODES, OWN_WEIGHTS
from megatron_lossagg.reduction.table import StepTotals

BAD = {
    "negative counts": (
        {"active_tokens": [2, -1]},
        "active_tokens: got -1 at index 1, the smallest is 0",
    ),
    "fractions": ({"active_tokens": [2.5]}, "got float64 of .* expected integers"),
    "two dimensions": ({"active_tokens": [[1, 2], [3, 4]]}, r"shape \(2, 2\)"),
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
    "sequences in no microbatch": (
        {"active_tokens": [1, 2], "num_microbatches": 0},
        r"got num_microbatches 0, expected an integer from 1 to 2\^53: pass what",
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
        known = StepTotals(active_tokens=100, samples=100, prompts=100)
        with pytest.raises(PlanError, match=message):
            plan_step(Aggregation("token_mean"), Sequences(**given), totals=known)


def test_a_callers_own_fault_is_raised_instead_of_a_plan():
    for known in (None, StepTotals(active_tokens=9)):
        with pytest.raises(PlanError, match="rank 0 of the data-parallel group: no file"):
            plan_step(
                Aggregation("token_mean"),
                Sequences(active_tokens=[]),
                fault="no file",
                totals=known,
            )


def test_sequences_only_stores():
    assert Sequences(active_tokens="nonsense").active_tokens == "nonsense"


def test_a_string_is_refused_as_an_aggregation():
    with pytest.raises(PlanError, match="got 'token_mean', expected an Aggregation"):
        plan_step("token_mean", Sequences(active_tokens=[1]))


def test_numpy_integers_of_any_width_are_counts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequences = np.array([1, 9], dtype=np.int32)
        assert weights_of("token_mean", active_tokens=sequences) == [1 / 10, 1 / 10]


def test_strings_are_ids_like_integers():
    sequences = {"active_tokens": [4, 2, 3, 1]}
    as_integers = {"sample": [5, 5, 9, 7], "prompt": [0, 0, 1, 1]}
    as_strings = {"sample": ["a", "a", "b9", ""], "prompt": np.array(["p", "p", "q", "q"])}
    as_objects = {
        "sample": np.array(["a", "a", "b9", ""], dtype=object),
        "prompt": ["p"] * 2 + ["q"] * 2,
    }
    for mode in ("sample_mean", "prompt_mean"):
        expected = weights_of(mode, **sequences, **as_integers)
        assert weights_of(mode, **sequences, **as_strings) == expected
        assert weights_of(mode, **sequences, **as_objects) == expected


def test_strings_that_differ_by_a_nul_at_the_end_differ():
    assert weights_of("prompt_mean", active_tokens=[1, 9], prompt=["a\0", "a"]) == [1 / 2, 1 / 18]


def test_strings_with_one_hash_are_refused(monkeypatch):
    monkeypatch.setattr("megatron_lossagg.reduction.sequences.hashed", lambda text: len(text))
    assert weights_of("prompt_mean", active_tokens=[1, 9], prompt=["a", "bb"]) == [1 / 2, 1 / 18]
    with pytest.raises(PlanError, match="two strings have one 63-bit hash: pass integer ids"):
        weights_of("prompt_mean", active_tokens=[1, 9], prompt=["a", "b"])


OTHER_IDS = {
    "mixed": (["7", 7], "['7', 7]"),
    "mixed objects": (np.array(["a", 3], dtype=object), "['a', 3]"),
    "pairs": ([(0, 1), (0, 2)], "int64 of shape (2, 2)"),
    "pairs of strings": ([("a", "b"), ("c", "d")], "[('a', 'b'), ('c', 'd')]"),
    "none": ([None, "a"], "[None, 'a']"),
    "floats": ([0.5, 1.0], "float64 of shape (2,)"),
    "bytes": ([b"a", b"b"], "[b'a', b'b']"),
    "beyond int64": ([1, 2**70], f"[1, {2**70}]"),
    "one string": ("ab", "'ab'"),
}


@pytest.mark.parametrize("name", OTHER_IDS)
@pytest.mark.parametrize("kind", ["sample", "prompt", "group"])
def test_ids_that_are_neither_integers_nor_strings_are_refused_with_what_may_be_passed(kind, name):
    ids, got = OTHER_IDS[name]
    with pytest.raises(PlanError) as caught:
        weights_of("token_mean", active_tokens=[1, 9], **{kind: ids})
    expected = f"Sequences.{kind}: got {got}, expected only integers below 2^63 or only strings"
    assert expected in str(caught.value)
    assert str(caught.value).endswith('of a pair f"{a}/{b}"')


def test_integers_in_an_array_of_objects_are_ids():
    """As a batch has them whose columns are NumPy arrays of any kind."""
    ids = np.array([3, 3, 8], dtype=object)
    assert weights_of("sample_mean", active_tokens=[1, 9, 5], sample=ids) == [0.05, 0.05, 0.1]


def test_samples_per_prompt_finds_prompts_that_were_merged():
    sequences = {"active_tokens": [1, 2, 3, 4], "sample": [0, 0, 1, 2], "prompt": [0, 0, 0, 7]}
    with pytest.raises(PlanError, match=r"prompt 7 has 1 samples .* is 2: ids are global over"):
        weights_of("prompt_mean", **sequences, samples_per_prompt=2)
    sequences["prompt"] = [0, 0, 7, 7]
    with pytest.raises(PlanError, match="prompt 0 has 1 samples over the step"):
        weights_of("prompt_mean", **sequences, samples_per_prompt=2)
    sequences["sample"] = [0, 1, 2, 3]
    whole = weights_of("prompt_mean", **sequences, samples_per_prompt=2)
    assert whole == weights_of("prompt_mean", **sequences)
    del sequences["sample"]
    assert weights_of("prompt_mean", **sequences, samples_per_prompt=2) == whole


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", True])
def test_samples_per_prompt_is_an_integer_from_1(number):
    sequences = {"active_tokens": [1], "prompt": [0], "samples_per_prompt": number}
    with pytest.raises(PlanError, match=r"samples_per_prompt .*, expected an integer from 1"):
        weights_of("prompt_mean", **sequences)


def test_samples_per_prompt_needs_prompts():
    with pytest.raises(PlanError, match=r"samples_per_prompt .* no prompt ids: pass prompt="):
        weights_of("token_mean", active_tokens=[1], samples_per_prompt=2)


@pytest.mark.parametrize("ids", ["prompt", "group"])
@pytest.mark.parametrize("mode", sorted(set(MODES) - {CUSTOM, OWN_WEIGHTS}))
def test_a_mode_needs_the_ids_that_it_says_and_no_others(mode, ids):
    """An integration asks ``Mode.needs`` which ids it has to read."""
    aggregation = Aggregation(
        mode,
        divisor=4.0 if MODES[mode].divisor == "required" else None,
        exponent=0.5 if MODES[mode].has_exponent else None,
    )
    passed = {
        "active_tokens": [1, 2, 3],
        "prompt": [0, 0, 1],
        "group": [0, 1, 2],
        "microbatch": [0, 0, 0],
        "num_microbatches": 1,
    }
    assert len(plan_step(aggregation, Sequences(**passed)).weights) == 3
    del passed[ids]
    if ids not in MODES[mode].needs:
        assert len(plan_step(aggregation, Sequences(**passed)).weights) == 3
        return
    with pytest.raises(PlanError, match=rf"needs Sequences\({ids}="):
        plan_step(aggregation, Sequences(**passed)).weights  # noqa: B018
