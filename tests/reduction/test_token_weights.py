"""``count="weights"``: token weights multiply the losses and enter every denominator."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import steps
import torch
from device_double import DEVICES, on
from steps import AGGREGATIONS, make_sequences, sequences_of, thd

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import AggregationError, PlanError, ReducerError
from megatron_lossagg.reduction.aggregation import require_mask_count
from megatron_lossagg.reduction.table import StepTotals
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options

STEP = make_sequences()
KEYS = [index % 3 for index in range(len(STEP))]


def weighing(aggregation):
    return replace(aggregation, count="weights")


def weights_of(sequences, seed=5):
    """Draw token weights: fractions, zeros, and one sequence whose weights are all 0."""
    generator = random.Random(seed)
    drawn = [
        [m * generator.choice([0.0, 0.3, generator.random() * 4]) for m in one["counted"]]
        for one in sequences
    ]
    active = next(i for i, one in enumerate(sequences) if sum(one["counted"]) > 3)
    drawn[active] = [0.0] * len(drawn[active])
    return drawn


def planned(aggregation, sequences, weights, keys=KEYS, **options):
    return plan_step(
        aggregation,
        sequences_of(
            sequences,
            microbatch=keys,
            num_microbatches=3,
            token_weight_sums=weights and [math.fsum(one) for one in weights],
        ),
        **options,
    )


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_and_expected_sum_are_the_references(name):
    weights = weights_of(STEP)
    aggregation = weighing(AGGREGATIONS[name])
    plan = planned(aggregation, STEP, weights)
    ones = [
        {
            **one,
            "trained": one["counted"],
            "weight": v,
            "microbatch": (0, key),
            "x": [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in v],
        }
        for one, v, key in zip(STEP, weights, KEYS, strict=True)
    ]
    options = reference_options(aggregation, [3])
    loss = reference_loss.step_loss(aggregation.mode, ones, **options)
    loss.backward()
    for one, v, w in zip(ones, weights, plan.weight_S, strict=True):
        found = [float(x.grad or 0.0) for x in one["x"]]
        assert found == pytest.approx([w * v_t for v_t in v], rel=1e-13, abs=0)
    assert plan.expected_weight == pytest.approx(loss.item(), rel=1e-13)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_that_are_the_mask_change_no_bit(name):
    found = planned(weighing(AGGREGATIONS[name]), STEP, [one["counted"] for one in STEP])
    unweighted = planned(AGGREGATIONS[name], STEP, None)
    assert found.weight_S.tolist() == unweighted.weight_S.tolist()
    assert found.expected_weight == unweighted.expected_weight


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_order_of_sequences_changes_no_bit(name):
    weights = weights_of(STEP)
    found = planned(weighing(AGGREGATIONS[name]), STEP, weights)
    order = np.random.default_rng(2).permutation(len(STEP))
    shuffled = planned(
        weighing(AGGREGATIONS[name]),
        [STEP[i] for i in order],
        [weights[i] for i in order],
        [KEYS[i] for i in order],
    )
    assert shuffled.weight_S.tolist() == found.weight_S[order].tolist()
    assert shuffled.expected_weight == found.expected_weight


MASK = [1, 0, 1, 1, 1, 0]
WEIGHTS = [0.5, 0.0, 2.0, 0.25, 1.5, 0.0]


def a_plan(sums=(2.75, 1.5), mode="token_mean", rejects_tokens=False, **options):
    return steps.a_plan(
        (3, 1), mode, sums=sums, rejects_tokens=rejects_tokens, count="weights", **options
    )


@DEVICES
def test_loss_and_gradient_are_the_weighted_mean(device):
    losses = [3.0, math.inf, -1.0, 4.0, 2.0, math.nan]
    with on(device) as to:
        x = to(torch.tensor(losses, dtype=torch.float64)).requires_grad_()
        reducer = a_plan().reducer([0, 1], to(MASK), thd(4, 2), token_weights=to(WEIGHTS))
        loss = reducer(x)
        loss.backward()
        found, slopes, weight_sum = loss.item(), x.grad.tolist(), reducer.weight_sum().item()
    expected = (0.5 * 3.0 - 2.0 + 0.25 * 4.0 + 1.5 * 2.0) / 4.25
    assert found == pytest.approx(expected, rel=1e-14)
    assert slopes == pytest.approx([v / 4.25 for v in WEIGHTS], rel=1e-14)
    assert weight_sum == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_weights_that_are_the_mask_train_the_same_bits(dtype):
    x = torch.randn(6, generator=torch.Generator().manual_seed(1))
    weighed = a_plan([3, 1]).reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), token_weights=torch.tensor(MASK, dtype=dtype)
    )
    unweighted = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[3, 1]))
    assert weighed(x).item() == unweighted.reducer([0, 1], torch.tensor(MASK), thd(4, 2))(x).item()


WRONG = {
    "negative": ({1: -1.0}, "hold -1 at position 1: a weight is finite and not negative"),
    "nan": ({2: math.nan}, "hold nan at position 2: a weight is finite"),
    "inf": ({3: math.inf}, "hold inf at position 3: a weight is finite"),
    "outside of the mask": ({5: 0.5}, "hold 0.5 at position 5: .* 0 where the mask is 0"),
    "more": ({4: 1.6}, "segment 1 has more than the 1.5 of its sequence 1"),
    "less": ({2: 1.9}, "segment 0 has less than the 2.75 of its sequence 0"),
}


@DEVICES
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_weights_are_named(device, wrong):
    changed, message = WRONG[wrong]
    plan, weights = a_plan(), WEIGHTS.copy()
    for position, value in changed.items():
        weights[position] = value

    def check(to):
        plan.reducer([0, 1], to(MASK), thd(4, 2), token_weights=to(weights))
        assert device != "cpu"
        assert not to.syncs
        plan.check()

    with on(device) as to, pytest.raises(ReducerError, match=message):
        check(to)


def test_weights_that_are_trained_are_refused():
    weights = torch.tensor(WEIGHTS, requires_grad=True)
    with pytest.raises(ReducerError, match="token weights that require a gradient"):
        a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2), token_weights=weights)


def test_sums_may_differ_by_rounding():
    a_plan([2.75 * (1 + 1e-7), 1.5]).reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), token_weights=torch.tensor(WEIGHTS)
    )


def test_where_tokens_are_rejected_weights_may_stay_and_sums_may_fall_but_not_grow():
    rejected = torch.tensor([1, 0, 0, 1, 1, 0])
    plan = a_plan(rejects_tokens=True)
    reducer = plan.reducer([0, 1], rejected, thd(4, 2), token_weights=torch.tensor(WEIGHTS))
    assert reducer.weight_sum().item() == pytest.approx(2.25 / 4.25)
    grown = torch.tensor([3.0, 0.0, 2.0, 0.25, 1.5, 0.0])
    with pytest.raises(ReducerError, match="segment 0 has more"):
        plan.reducer([0, 1], rejected, thd(4, 2), token_weights=grown)


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ([2.75], "expected 2 numbers, one per sequence"),
        ([2.75, -1.0], "got -1.0 at index 1"),
        ([math.nan, 1.0], "got nan at index 0"),
        ([2.0**54, 1.0], "0 or a number from 2\\^-53 to 2\\^53"),
        ([2.0**-54, 1.0], "got 5.55.* at index 0"),
        (["a", "b"], "expected 2 numbers"),
    ],
)
def test_wrong_sums_are_refused(sums, message):
    with pytest.raises(PlanError, match=message):
        a_plan(sums)


def test_a_sequence_without_active_tokens_has_no_weight():
    with pytest.raises(PlanError, match="0 for no active token"):
        plan_step(
            Aggregation("token_mean", count="weights"),
            Sequences(active_tokens=[0], token_weight_sums=[0.5]),
        )


def test_plan_and_reducer_need_both():
    with pytest.raises(PlanError, match="needs Sequences\\(token_weight_sums"):
        plan_step(Aggregation("token_mean", count="weights"), Sequences(active_tokens=[3]))
    with pytest.raises(PlanError, match="drop totals= or token_weight_sums="):
        plan_step(
            Aggregation("token_mean"),
            Sequences(active_tokens=[3], token_weight_sums=[1.0]),
            totals=StepTotals(active_tokens=3),
        )
    with pytest.raises(
        ReducerError, match=r"got no token_weights= in a plan with token_weight_sums"
    ):
        a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    with pytest.raises(ReducerError, match="in a plan with no token_weight_sums"):
        plan_step(Aggregation("token_mean"), Sequences(active_tokens=[3, 1])).reducer(
            [0, 1], torch.tensor(MASK), thd(4, 2), token_weights=torch.tensor(WEIGHTS)
        )
    with pytest.raises(ReducerError, match="packed, padded and sliced as the mask"):
        a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2), token_weights=torch.ones(4))
    with pytest.raises(ReducerError, match="expected a tensor of numbers"):
        a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2), token_weights=WEIGHTS)


def test_a_name_counts_what_the_plan_counts_and_an_aggregation_what_it_says():
    plan = a_plan()
    assert plan.under("token_sum").expected_weight == 4.25
    assert plan.under(Aggregation("token_sum")).expected_weight == 4
    x = torch.ones(6)
    reducer = plan.reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), token_weights=torch.tensor(WEIGHTS)
    )
    assert reducer.under("token_sum")(x).item() == 4.25
    assert reducer.under(Aggregation("token_sum"))(x).item() == 4


def test_a_step_that_weighs_nothing_is_an_empty_step():
    with pytest.warns(RuntimeWarning, match="no active tokens"):
        plan = a_plan([0.0, 0.0])
    assert not plan.weight_S.any()
    assert plan.expected_weight == 0


def test_only_known_counts_and_no_custom_reducer():
    with pytest.raises(AggregationError, match="expected mask, weights:"):
        Aggregation("token_mean", count="tokens")
    with pytest.raises(AggregationError, match="expected mask, weights:"):
        Aggregation("token_mean", count=["mask"])
    with pytest.raises(AggregationError, match="a custom reducer counts for itself"):
        Aggregation("custom", reducer_path="a.b:c", count="weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_weights_may_change_once_the_microbatch_is_made(dtype):
    weights = torch.tensor(WEIGHTS)
    reducer = a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2), token_weights=weights)
    weights.fill_(9)
    x = torch.ones(6, dtype=dtype, requires_grad=True)
    reducer(x).backward()
    torch.testing.assert_close(x.grad, torch.tensor(WEIGHTS, dtype=dtype) / 4.25)


def test_a_framework_that_passes_no_token_weights_refuses_to_count_them():
    require_mask_count(Aggregation("token_mean"), "mine")
    with pytest.raises(AggregationError, match="'weights', and mine passes no token weights"):
        require_mask_count(Aggregation("token_mean", count="weights"), "mine")
