"""A step's integers, by hand: what is counted of one process's sequences."""

import numpy as np
import pytest

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences, _is_every_id_on_one_rank
from megatron_lossagg.reduction.table import StepCounts, StepTotals, count_step

# Two samples of prompt 5, one split into two sequences; a masked sample of prompt 9.
SEQUENCES = {
    "active_tokens": [4, 2, 3, 0],
    "sample": [7, 7, 8, 3],
    "prompt": [5, 5, 5, 9],
    "microbatch": [0, 2, 2, 3],
    "num_microbatches": 5,
}


def counted(**sequences):
    return count_step(Aggregation("token_mean"), Sequences(**sequences).checked())


def test_totals_and_tokens_by_hand():
    table = counted(**SEQUENCES)
    assert table.totals == StepTotals(
        active_tokens=9, samples=3, prompts=2, active_samples=2, active_prompts=1,
        microbatch_means=2 / 5,
    )  # fmt: skip
    assert table.counts.n_b.tolist() == [6, 6, 3, 0]
    assert table.counts.n_p.tolist() == [9, 9, 9, 0]
    assert table.counts.n_mb.tolist() == [4, 5, 5, 0]


def test_every_letter_of_the_page_by_hand():
    """Rows 0 and 1 are sample 7; prompt 9 and group 2 have the masked sample only."""
    mode = Aggregation("constant", divisor=8, count_empty=False)
    given = {**SEQUENCES, "group": [4, 4, 5, 2], "columns": {"turns": [1, 2, 3, 4]}}
    c = StepCounts(counted(**given), mode)
    assert (c.N, c.B, c.P, c.V, c.Q, c.R, c.L, c.C, c.a, c.DP) == (9, 2, 1, 2, 1, 3, 8, 8, 0, 1)
    assert (c.n_s.tolist(), c.R_b.tolist()) == ([4, 2, 3, 0], [2, 2, 1, 0])
    assert (c.n_c.tolist(), c.k_c.tolist()) == ([6, 6, 3, 0], [1, 1, 1, 0])
    assert (c.k_p.tolist(), c.M.tolist()) == ([2, 2, 2, 0], [5, 5, 5, 5])
    assert c.columns["turns"].tolist() == [1, 2, 3, 4]
    c = StepCounts(counted(**given), Aggregation("length_power", exponent=0.5))
    assert (c.B, c.P, c.R, c.a) == (3, 2, 4, 0.5)
    assert pytest.approx(6**0.5 + 3**0.5, rel=1e-15) == c.Z
    assert c.n_b_to_a.tolist() == pytest.approx([6**0.5, 6**0.5, 3**0.5, 0], rel=1e-15)


def test_without_ids_each_sequence_is_a_sample_and_there_are_no_prompts():
    table = counted(active_tokens=[4, 0])
    assert table.totals == StepTotals(active_tokens=4, samples=2, active_samples=1)
    assert table.counts.n_b.tolist() == [4, 0]
    with pytest.raises(PlanError, match=r"needs Sequences\(prompt="):
        print(table.counts.n_p)


def test_no_sequences_give_counts_of_zero():
    table = counted(active_tokens=[], sample=[], prompt=[])
    totals = table.totals
    assert (totals.samples, totals.prompts, totals.active_tokens) == (0, 0, 0)
    assert table.counts.n_b.tolist() == table.counts.n_p.tolist() == []


@pytest.mark.parametrize("spread", [1, 2**58])
@pytest.mark.parametrize("shift", [0, -300, 2**50])
def test_renaming_ids_changes_no_count(spread, shift):
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 6, 40)
    sample = prompt * 4 + rng.integers(0, 4, 40)
    n = rng.integers(0, 9, 40)
    plain = counted(active_tokens=n, sample=sample, prompt=prompt)
    named = {"sample": sample * spread + shift, "prompt": prompt * spread + shift}
    renamed = counted(active_tokens=n, **named)
    assert renamed.totals == plain.totals
    assert renamed.counts.n_b.tolist() == plain.counts.n_b.tolist()
    assert renamed.counts.n_p.tolist() == plain.counts.n_p.tolist()
    by_hand = [sum(n[sample == one]) for one in sample]
    assert plain.counts.n_b.tolist() == by_hand


@pytest.mark.parametrize("kind", ["sample", "prompt"])
def test_minus_1_is_no_id(kind):
    with pytest.raises(
        PlanError, match=rf"Sequences\.{kind}: got the id -1 at index 1, .* leave {kind}="
    ):
        Sequences(active_tokens=[1, 2], **{kind: [0, -1]}).checked()


def test_a_group_may_be_a_prompt_times_a_sign():
    sequences = Sequences(active_tokens=[1, 3, 2], group=[1, -1, -1])
    weights = plan_step(Aggregation("balanced"), sequences).weights
    assert weights.tolist() == [1 / 3, 2 / (3 * 5), 2 / (3 * 5)]


@pytest.mark.parametrize("seed", range(50))
def test_ids_of_every_rank_are_found_as_by_their_sets(seed):
    random = np.random.default_rng(seed)
    sequences_W = random.integers(0, 6, size=4)
    ids_A = random.integers(0, 3, size=sequences_W.sum())
    of_ranks = [set(ids) for ids in np.split(ids_A, np.cumsum(sequences_W)[:-1]) if len(ids)]
    expected = len(of_ranks) > 1 and set(ids_A) in of_ranks
    assert _is_every_id_on_one_rank(ids_A, len(set(ids_A)), sequences_W) == expected


def test_what_the_modes_total_counts_and_one_for_a_mode_without():
    plan = plan_step(Aggregation("sample_mean"), Sequences(**SEQUENCES))
    assert plan.counted_total == 3
    assert plan.under(Aggregation("sample_sum", count_empty=False)).counted_total == 2
    assert plan.under(Aggregation("token_sum", divisor=7)).counted_total == 7
    assert plan.under("microbatch_token_mean").counted_total == 1
