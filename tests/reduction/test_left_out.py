"""What is left out leaves every count: the others weigh as if it had not been passed."""

import pytest
import torch
from steps import AGGREGATIONS, Threads, assign, in_threads, make_sequences, sequences_of

from megatron_lossagg import (
    Aggregation,
    Layout,
    Options,
    Sequences,
    StepTotals,
    plan_step,
)
from megatron_lossagg.errors import AggregationError, PlanError
from megatron_lossagg.record.step_record import hash_weights

STEP = make_sequences()
KEYS = [index for _, index in assign(STEP, [3])]
# Of a sample one row, a sample alone, and each sample of the first sequence's prompt.
LEFT_OUT = [i in (3, 5) or one["prompt"] == STEP[0]["prompt"] for i, one in enumerate(STEP)]
KEPT = [i for i, is_left_out in enumerate(LEFT_OUT) if not is_left_out]


def planned(aggregation, indices, **more):
    given = {
        "token_weight_sums": [0.5 * sum(STEP[i]["counted"]) for i in indices],
        "sequence_weight": [(0.5, 3.0, 0.0, 1.0)[i % 4] for i in indices],
        "microbatch": [KEYS[i] for i in indices],
    }
    sequences = sequences_of([STEP[i] for i in indices], **given, num_microbatches=3, **more)
    return plan_step(aggregation, sequences)


def own(counts):
    return 1 / (counts.R * counts.P * counts.k_p * counts.n_b)


OTHERS = {
    "weights": Aggregation("sample_mean", count="weights", count_empty=False),
    "own_weights": Aggregation(weights=own),
}


@pytest.mark.parametrize("name", [*AGGREGATIONS, *OTHERS])
def test_the_others_weigh_as_if_it_had_not_been_passed(name):
    aggregation = {**AGGREGATIONS, **OTHERS}[name]
    found = planned(aggregation, range(len(STEP)), left_out=LEFT_OUT)
    wanted = planned(aggregation, KEPT)
    assert 0 < len(KEPT) < len(STEP)
    assert any(found.active_tokens[i] for i in range(len(STEP)) if LEFT_OUT[i])
    assert found.weight_S[KEPT].tolist() == wanted.weight_S.tolist()
    assert not found.weight_S[LEFT_OUT].any()
    assert found.expected_weight == wanted.expected_weight
    assert found.counted == {
        **wanted.counted,
        "left_out": sum(LEFT_OUT),
    }
    kept = ~found.is_left_out_S
    hashes = [
        hash_weights(plan.counted_sequences.active_tokens, weight_S)
        for plan, weight_S in ((found, found.weight_S[kept]), (wanted, wanted.weight_S))
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_term_that_counts_all_weighs_as_if_nothing_was_left_out(name):
    plan = planned(Aggregation("sample_sum"), range(len(STEP)), left_out=LEFT_OUT)
    numbers = vars(AGGREGATIONS[name]) | {"count_left_out": True}
    every = plan.under(Aggregation(**numbers))
    wanted = planned(AGGREGATIONS[name], range(len(STEP)))
    assert every.weight_S.tolist() == wanted.weight_S.tolist()
    assert every.under("token_mean").aggregation.count_left_out
    assert plan.totals.active_tokens == wanted.totals.active_tokens  # which K divides by


def test_policy_and_kl_have_denominators_of_their_own_in_one_step():
    """A group of two samples without a signal, next to one with: against loops over tokens."""
    sequences = Sequences(active_tokens=[3, 1, 2, 4], left_out=[False, False, True, True])
    plan = plan_step(Aggregation("sample_mean"), sequences)
    layout = Layout.thd_zigzag([0, 3, 4, 6, 10], cp_size=1, cp_rank=0)
    x = torch.linspace(1, 2, 10, dtype=torch.float64, requires_grad=True)
    reducer = plan.reducer([0, 1, 2, 3], torch.ones(10), layout)
    kl = reducer.under(Aggregation("sample_mean", count_left_out=True))
    loss = reducer(x) + 0.1 * kl(x * x)
    loss.backward()
    y = x.detach().clone().requires_grad_()
    lengths, start, wanted = [3, 1, 2, 4], 0, 0
    for sequence, n in enumerate(lengths):
        for t in range(start, start + n):
            wanted = wanted + (sequence < 2) * y[t] / (2 * n) + 0.1 * y[t] * y[t] / (4 * n)
        start += n
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert x.grad.tolist() == pytest.approx(y.grad.tolist(), rel=1e-12)
    assert reducer.weight_sum(torch.float64).item() == pytest.approx(1)


@pytest.mark.parametrize("mode", ["sample_mean", "row_mean"])
def test_each_rank_finds_its_own_sequences_among_those_that_are_kept(mode, monkeypatch):
    """Of three ranks: the sequences of the second follow those that the first keeps."""
    monkeypatch.setattr("megatron_lossagg.reduction.plan.Exchange", Threads)
    # Of each rank: active tokens, sample, left out.
    ranks = [
        [(9, 1, True), (5, 2, False), (7, 1, True)],
        [(2, 2, False), (6, 3, False), (8, 5, True), (3, 3, False)],
        [(4, 4, False), (11, 3, False)],
    ]
    kept = [(n, sample) for rank in ranks for n, sample, left_out in rank if not left_out]

    def weights_of(rank, group):
        active, sample, left_out = zip(*ranks[rank], strict=True)
        sequences = Sequences(active_tokens=active, sample=sample, left_out=left_out)
        return plan_step(Aggregation(mode), sequences, group=group).weights.tolist()

    for rank, weights in zip(ranks, in_threads(weights_of, 3), strict=True):
        for (n, sample, left_out), weight in zip(rank, weights, strict=True):
            lengths = [other for other, of_sample in kept if of_sample == sample]
            n_b = sum(lengths) if mode == "sample_mean" else len(lengths) * n
            samples = len({of_sample for _, of_sample in kept})
            assert weight == (0 if left_out else pytest.approx(1 / (samples * n_b), rel=1e-12))


def test_a_step_of_which_all_is_left_out_is_an_empty_one():
    with pytest.warns(RuntimeWarning, match="counts no active tokens"):
        plan = plan_step(
            Aggregation("sample_mean"), Sequences(active_tokens=[3, 2], left_out=[1, 1])
        )
    assert plan.weights.tolist() == [0, 0]
    assert plan.expected_weight == 0


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ([True], r"left_out: got bool of shape \(1,\), expected 2"),
        ([0, 2], r"left_out: got \[0.0, 2.0\], expected bools, or 0 and 1"),
        (["a", "b"], "expected 2"),
    ],
)
def test_what_is_no_bool_is_refused(left_out, message):
    with pytest.raises(PlanError, match=message):
        plan_step(Aggregation("token_mean"), Sequences(active_tokens=[1, 2], left_out=left_out))


def test_what_is_left_out_elsewhere_is_not_known_with_totals():
    sequences = Sequences(active_tokens=[1, 2], left_out=[True, False])
    with pytest.raises(PlanError, match="got totals= and left_out=, but only counting"):
        plan_step(Aggregation("token_mean"), sequences, totals=StepTotals(active_tokens=3))
    with pytest.raises(AggregationError, match="got count_left_out 1, expected True or False"):
        Aggregation("token_mean", count_left_out=1)


def test_a_microbatch_says_which_of_its_segments_are_left_out():
    microbatch = Sequences(
        active_tokens=[3, 2, 0], is_padding=[0, 0, 1], left_out=[True, False, False]
    )
    assert microbatch.checked().left_out.tolist() == [True, False]
    assert microbatch.checked().num_padding == 1


def test_a_step_of_which_all_is_left_out_is_no_error():
    """Another term may count its sequences."""
    sequences = Sequences(active_tokens=[3, 2], left_out=[True, True])
    with pytest.warns(RuntimeWarning, match="counts no active tokens"):
        plan = plan_step(Aggregation("token_mean"), sequences, options=Options(empty_step="error"))
    assert plan.weights.tolist() == [0, 0]
    counts_all = Aggregation("token_mean", count_left_out=True)
    assert plan.under(counts_all).weights.tolist() == pytest.approx([0.2, 0.2])
    with pytest.raises(PlanError, match="no active tokens: its loss"):
        plan_step(
            Aggregation("token_mean"),
            Sequences(active_tokens=[0, 0], left_out=[True, False]),
            options=Options(empty_step="error"),
        )
