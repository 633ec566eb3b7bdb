"""The step of every verification has each degenerate case, and its ranks get uneven shares."""

from collections import Counter

import pytest
from own_columns import per_turn

from megatron_lossagg import Aggregation
from megatron_lossagg.verify.cases import columns_of
from megatron_lossagg.verify.step_data import assign_sequences, make_sequences

ONE = make_sequences()


def of(key):
    """Group the step's sequences by a number of theirs."""
    groups = {}
    for one in ONE:
        groups.setdefault(getattr(one, key), []).append(one)
    return list(groups.values())


def active(sequences):
    return sum(sum(one.counted) for one in sequences)


def of_live_prompts():
    """List the samples of prompts with an active token."""
    live = {one.prompt for one in ONE if any(one.counted)}
    return [sample for sample in of("sample") if sample[0].prompt in live]


def distances():
    """List how far apart the sequences of samples of two are."""
    places = [[ONE.index(one) for one in sample] for sample in of("sample")]
    return [pair[1] - pair[0] for pair in places if len(pair) == 2]


CASES = {
    "a sequence of one token": any(len(one) == 1 for one in ONE),
    "a token that is not counted next to one that is": any(
        0 < sum(s.counted) < len(s) for s in ONE
    ),
    "a counted token that is rejected": any(0 < sum(s.trained) < sum(s.counted) for s in ONE),
    "a sequence of which every counted token is rejected": any(
        any(one.counted) and not any(one.trained) for one in ONE
    ),
    "a fully masked sample of a live prompt": any(not active(one) for one in of_live_prompts()),
    "a prompt without an active token": any(not active(prompt) for prompt in of("prompt")),
    "a sample of two sequences, next to each other": 1 in distances(),
    "a sample of two sequences, far apart": max(distances()) > 3,
    "a prompt of both signs": any(len({s.group for s in prompt}) == 2 for prompt in of("prompt")),
    "an active sequence of which every token weighs 0": any(
        any(one.trained) and not any(one.weight) for one in ONE
    ),
    "a sequence of one weight other than 0 and 1": any(
        len({v for v, m in zip(s.weight, s.counted, strict=True) if m} - {0.0, 1.0}) == 1
        and all(v for v, m in zip(s.weight, s.counted, strict=True) if m)
        and sum(s.counted) > 1
        for s in ONE
    ),
    "token weights that differ, and 0 among them": any(
        len({v for v, m in zip(s.weight, s.counted, strict=True) if m}) > 2
        and 0.0 in [v for v, m in zip(s.weight, s.counted, strict=True) if m]
        for s in ONE
    ),
    "coefficients of both signs": min(ONE[0].coefficient) < 0 < max(ONE[0].coefficient),
    "active sequences of other weights than 1, and of 0": {0.0, 1.0}
    < {one.sequence_weight for one in ONE if any(one.trained)},
    "a sample of which one sequence is left out": any(
        len({one.left_out for one in sample if any(one.counted)}) == 2 for sample in of("sample")
    ),
    "an active prompt that is left out": any(
        active(prompt) and all(one.left_out for one in prompt) for prompt in of("prompt")
    ),
    "an empty sequence that is left out": any(s.left_out and not any(s.counted) for s in ONE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_has(case):
    assert CASES[case]


@pytest.mark.parametrize("m_of_ranks", [[4], [3, 3], [4, 4], [3, 5], [3, 3, 3]])
def test_microbatches_get_uneven_numbers_of_sequences_and_some_get_none(m_of_ranks):
    keys = Counter(assign_sequences(ONE, m_of_ranks).keys)
    slots = [(rank, m) for rank, number in enumerate(m_of_ranks) for m in range(number)]
    assert {*keys} <= {*slots}
    assert len({keys[slot] for slot in slots}) > 1
    assert 0 in [keys[slot] for slot in slots]


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_with_three_microbatches_each_the_last_rank_has_no_active_token(dp):
    assignment = assign_sequences(ONE, [3] * dp)
    counts = [active(ONE[index] for index in assignment.of_rank(rank)) for rank in range(dp)]
    assert counts[-1] == 0
    assert all(counts[:-1])
    assert assignment.of_rank(dp - 1)


def test_the_columns_of_a_weights_function_are_whole_numbers_that_differ():
    (column,) = columns_of(ONE, Aggregation(weights=per_turn)).values()
    assert {2.0, 3.0} < {*column} <= {1.0, 2.0, 3.0, 4.0}
    assert columns_of(ONE, Aggregation("token_mean")) == {}
