"""A step's integers, by hand: what is counted of one process's sequences."""

import numpy as np
import pytest

from megatron_lossagg import Aggregation, Sequences, StepTotals
from megatron_lossagg.counts import Rows, count_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.exchange import Exchange

# Two samples of prompt 5, one split into two sequences; a masked sample of prompt 9.
SEQUENCES = {
    "active_tokens": [4, 2, 3, 0],
    "sample": [7, 7, 8, 3],
    "prompt": [5, 5, 5, 9],
    "microbatch": [0, 2, 2, 3],
    "num_microbatches": 5,
}


def counted(**sequences):
    checked = Rows.checked(Sequences(**sequences))
    return checked, count_step(Aggregation("token_mean"), checked, "", Exchange(None))


def test_totals_and_tokens_by_hand():
    sequences, counts = counted(**SEQUENCES)
    assert counts.totals == StepTotals(
        active_tokens=9, samples=3, prompts=2, active_samples=2, active_prompts=1,
        microbatch_means=2 / 5,
    )  # fmt: skip
    assert counts.sample_tokens.tolist() == [6, 6, 3, 0]
    assert counts.prompt_tokens.tolist() == [9, 9, 9, 0]
    assert sequences.microbatch_tokens.tolist() == [4, 5, 5, 0]


def test_counts_of_a_rank_keep_no_memory_of_the_other_ranks_sequences():
    _, counts = counted(**SEQUENCES)
    assert counts.sample_tokens.base is None
    assert counts.prompt_tokens.base is None


def test_without_ids_each_sequence_is_a_sample_and_there_are_no_prompts():
    _, counts = counted(active_tokens=[4, 0])
    assert counts.totals == StepTotals(active_tokens=4, samples=2, active_samples=1)
    assert counts.sample_tokens.tolist() == [4, 0]
    assert counts.prompt_tokens is None


def test_no_sequences_give_counts_of_zero():
    _, counts = counted(active_tokens=[], sample=[], prompt=[])
    assert (counts.totals.samples, counts.totals.prompts, counts.totals.active_tokens) == (0, 0, 0)
    assert counts.sample_tokens.tolist() == counts.prompt_tokens.tolist() == []


@pytest.mark.parametrize("spread", [1, 2**40])
@pytest.mark.parametrize("shift", [0, -300, 2**50])
def test_renaming_ids_changes_no_count(spread, shift):
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 6, 40)
    sample = prompt * 4 + rng.integers(0, 4, 40)
    n = rng.integers(0, 9, 40)
    _, plain = counted(active_tokens=n, sample=sample, prompt=prompt)
    named = {"sample": sample * spread + shift, "prompt": prompt * spread + shift}
    _, renamed = counted(active_tokens=n, **named)
    assert renamed.totals == plain.totals
    assert renamed.sample_tokens.tolist() == plain.sample_tokens.tolist()
    assert renamed.prompt_tokens.tolist() == plain.prompt_tokens.tolist()
    by_hand = [sum(n[sample == one]) for one in sample]
    assert plain.sample_tokens.tolist() == by_hand


def test_known_totals_are_used_together_with_the_claimed_tokens():
    sequences = Rows.checked(
        Sequences(**SEQUENCES, sample_tokens=[6, 6, 8, 0], prompt_tokens=[20] * 3 + [0])
    )
    totals = StepTotals(active_tokens=100, samples=9, prompts=4)
    counts = sequences.with_totals(totals)
    assert counts.totals is totals
    assert counts.sample_tokens.tolist() == [6, 6, 8, 0]  # sample 8 has sequences elsewhere
    assert counts.prompt_tokens.tolist() == [20, 20, 20, 0]


def test_a_fault_is_raised_instead_of_counting():
    sequences = Rows.empty()
    with pytest.raises(PlanError, match="rank 0 of the data-parallel group: no file"):
        count_step(Aggregation("token_mean"), sequences, "no file", Exchange(None))


@pytest.mark.parametrize("kind", ["sample", "prompt"])
def test_minus_1_is_no_id(kind):
    with pytest.raises(
        PlanError, match=rf"Sequences\.{kind}: got the id -1 at index 1, .* leave {kind}="
    ):
        Rows.checked(Sequences(active_tokens=[1, 2], **{kind: [0, -1]}))
