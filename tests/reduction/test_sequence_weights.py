"""A weight for each sequence multiplies w_s, and changes nothing that is counted."""

import math

import pytest
import torch
from steps import AGGREGATIONS, assign, make_sequences, sequences_of

from megatron_lossagg import Aggregation, Layout, Sequences, StepTotals, plan_step
from megatron_lossagg.errors import PlanError

STEP = make_sequences()
KEYS = [index for _, index in assign(STEP, [3])]
OMEGA = [(0.5, 3.0, 0.0, 1.0)[i % 4] for i in range(len(STEP))]


def planned(aggregation, sequence_weight=None, **more):
    given = {"microbatch": KEYS, "num_microbatches": 3, **more}
    return plan_step(aggregation, sequences_of(STEP, sequence_weight=sequence_weight, **given))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_it_multiplies_the_weight_of_every_mode_and_the_expected_sum(name):
    without, found = planned(AGGREGATIONS[name]), planned(AGGREGATIONS[name], OMEGA)
    wanted = [w * o for w, o in zip(without.weight_S.tolist(), OMEGA, strict=True)]
    assert found.weight_S.tolist() == wanted
    assert found.totals == without.totals
    total = math.fsum(w * n for w, n in zip(wanted, found.active_tokens.tolist(), strict=True))
    assert found.expected_weight == pytest.approx(total, rel=1e-14)


def test_under_token_weights_it_multiplies_too():
    sums = [0.5 * sum(one["counted"]) for one in STEP]
    mode = Aggregation("sample_mean", count="weights")
    without = planned(mode, token_weight_sums=sums)
    found = planned(mode, OMEGA, token_weight_sums=sums)
    wanted = [w * o for w, o in zip(without.weight_S.tolist(), OMEGA, strict=True)]
    assert found.weight_S.tolist() == wanted
    assert found.expected_weight == pytest.approx(math.fsum(map(float.__mul__, wanted, sums)))


def test_a_sequence_of_weight_0_next_to_others_of_one_weight_trains_nothing():
    """One weight may serve for all tokens that are kept only if all of them have it."""
    sequences = Sequences(active_tokens=[2, 3], sequence_weight=[0, 1])
    plan = plan_step(Aggregation("token_mean"), sequences)
    layout = Layout.thd_zigzag([0, 2, 5], cp_size=1, cp_rank=0)
    x = torch.tensor([7.0, 8.0, 1.0, 2.0, 3.0], requires_grad=True)
    reducer = plan.reducer([0, 1], torch.ones(5), layout)
    loss = reducer(x)
    loss.backward()
    assert loss.item() == pytest.approx(6 / 5, rel=1e-6)
    assert x.grad.tolist() == pytest.approx([0, 0, 0.2, 0.2, 0.2], rel=1e-6)
    assert reducer.weight_sum().item() == pytest.approx(plan.expected_weight, rel=1e-6)
    assert reducer.shadow_of(x, Aggregation("sample_sum")).item() == pytest.approx(3)


def test_it_may_say_which_sequences_to_keep():
    sequences = Sequences(active_tokens=[2, 3], sequence_weight=torch.tensor([True, False]))
    assert plan_step(Aggregation("sample_sum"), sequences).weights.tolist() == [0.5, 0]
    sequences = Sequences(active_tokens=[2, 3], sequence_weight=[False, True])
    assert plan_step(Aggregation("sample_sum"), sequences).weights.tolist() == [0, 0.5]


def test_its_product_with_a_weight_is_one_that_float32_holds():
    tiny = Sequences(active_tokens=[2], sequence_weight=[2.0**-53])
    with pytest.raises(PlanError, match="beyond what float32 holds"):
        plan_step(Aggregation("token_sum", divisor=1e30), tiny)


def test_with_totals_it_multiplies_and_the_expected_sum_is_not_known():
    sequences = Sequences(active_tokens=[2, 3], sequence_weight=[2, 0.5])
    plan = plan_step(
        Aggregation("token_mean"), sequences, totals=StepTotals(active_tokens=10, samples=4)
    )
    assert plan.weights.tolist() == [0.2, 0.05]
    assert plan.expected_weight is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, -1], r"got -1\.0 at index 1, expected 0 or numbers from 2\^-53 to 2\^53"),
        ([math.nan, 1], "got nan at index 0"),
        ([1, math.inf], "got inf at index 1"),
        ([1], r"got int64 of shape \(1,\), expected 2 numbers"),
        ([[1, 2]], r"of shape \(1, 2\)"),
        (["a", "b"], "expected 2 numbers"),
        ([1, 1e-17], "got 1e-17 at index 1"),
        ([1, 1e16], "got 1e\\+16 at index 1"),
    ],
)
@pytest.mark.parametrize("totals", [None, StepTotals(active_tokens=5)])
def test_what_is_no_weight_is_refused(given, message, totals):
    with pytest.raises(PlanError, match=message):
        plan_step(
            Aggregation("token_mean"),
            Sequences(active_tokens=[2, 3], sequence_weight=given),
            totals=totals,
        )


@pytest.mark.parametrize("name", ["sequence_weight", "token_weight_sums"])
@pytest.mark.parametrize("make", [torch.Tensor.clone, list])
def test_a_weight_that_requires_a_gradient_is_refused(name, make):
    learned = make(torch.tensor([1.0, 2.0], requires_grad=True))
    with pytest.raises(PlanError, match=rf"{name} requires a gradient.*pass {name}\.detach\(\)"):
        plan_step(Aggregation("token_mean"), Sequences(active_tokens=[2, 3], **{name: learned}))
