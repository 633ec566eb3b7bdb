"""Known faults are told apart by the weights they leave, wherever the layout tells them apart."""

from itertools import combinations

import pytest
import torch

from megatron_lossagg.verify.cases import CASES, expected
from megatron_lossagg.verify.causes import CAUSES, Facts, symbols
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference import Reference
from megatron_lossagg.verify.rows import deal, filler_row, make_rows

BY_NAME = {cause.name: cause for cause in CAUSES}


def facts_of(parallelism, *, per_token, copies=1):
    """A step whose token losses are drawn: causes look at losses and never at gradients."""
    padded = 96
    rows = make_rows(copies)
    tokens = sum(-(-len(row) // padded) * padded for row in [*rows, filler_row(padded)])
    losses = torch.rand(tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = Reference(
        rows=rows,
        padded=padded,
        losses_Y=losses + 1.0,
        gradients_YP=torch.zeros(tokens, 0, dtype=torch.float64),
        parameters={},
    )
    dealt = deal(rows, parallelism.m_of_ranks)
    return Facts(reference=reference, deal=dealt, parallelism=parallelism, per_token=per_token)


def predictions(cause, parallelism):
    """Slopes and losses of every case in both regimes, in one row."""
    parts = []
    for per_token in (False, True):
        facts = facts_of(parallelism, per_token=per_token)
        for case in CASES:
            slope, loss = cause.predict(facts, case)
            parts += [slope, torch.tensor([loss], dtype=torch.float64)]
    return torch.cat(parts)


@pytest.fixture(scope="module")
def at_dp3_cp2_m4():
    layout = Parallelism(dp=3, cp=2, microbatches=4)
    return {cause.name: predictions(cause, layout) for cause in CAUSES}


@pytest.mark.parametrize(("one", "other"), list(combinations(BY_NAME, 2)), ids=lambda name: name)
def test_no_two_causes_are_equal_where_m_dp_and_cp_differ(at_dp3_cp2_m4, one, other):
    apart = (at_dp3_cp2_m4[one] - at_dp3_cp2_m4[other]).norm()
    assert apart > 1e-3 * at_dp3_cp2_m4[one].norm()


@pytest.mark.parametrize("name", BY_NAME)
def test_every_cause_trains_another_loss_than_the_one_named(at_dp3_cp2_m4, name):
    layout = Parallelism(dp=3, cp=2, microbatches=4)
    named = []
    for per_token in (False, True):
        facts = facts_of(layout, per_token=per_token)
        for case in CASES:
            wanted = expected(case, facts.reference, facts.deal)
            named += [wanted.slope_Y, torch.tensor([wanted.loss], dtype=torch.float64)]
    assert (at_dp3_cp2_m4[name] - torch.cat(named)).norm() > 1e-3 * torch.cat(named).norm()


def test_factors_of_cp_and_of_dp_are_equal_where_cp_is_dp():
    layout = Parallelism(dp=2, cp=2, microbatches=3)
    without_cp, without_dp = (
        predictions(BY_NAME[name], layout) for name in ("without_cp", "without_dp")
    )
    assert torch.equal(without_cp, without_dp)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_named_weights_give_the_oracles_slope_and_loss(case, per_token):
    facts = facts_of(Parallelism(dp=3, cp=2, microbatches=4), per_token=per_token)
    second = facts.named(case.second) if case.second else None
    wanted = expected(case, facts.reference, facts.deal)
    slope = facts.slope(case, facts.named(case.aggregation), second)
    assert torch.allclose(slope, wanted.slope_Y, rtol=1e-13, atol=0)
    assert facts.loss(case, facts.named(case.aggregation), second) == pytest.approx(
        wanted.loss, rel=1e-13
    )


@pytest.mark.parametrize(
    ("factor", "names"),
    [
        (2.0, ["CP"]),
        (0.5, ["1/CP"]),
        (3.0, ["DP"]),
        (1 / 24, ["1/(M DP CP)"]),
        (6.0, ["DP CP"]),
        (78.0, ["N"]),
        (0.7, []),
        (1.0, []),
        (float("nan"), []),
    ],
)
def test_a_measured_factor_is_named_by_the_sizes_it_equals(factor, names):
    facts = facts_of(Parallelism(dp=3, cp=2, microbatches=4), per_token=False)
    assert symbols(factor, facts, tolerance=1e-9) == names


def test_a_factor_that_several_sizes_equal_has_all_their_names():
    facts = facts_of(Parallelism(dp=2, cp=2, microbatches=2), per_token=False)
    assert symbols(4.0, facts, tolerance=1e-9) == ["M DP", "M CP", "DP CP"]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("copies", [1, 2])
def test_ones_of_the_training_masks_are_never_n_by_accident(dp, cp, microbatches, copies):
    layout = Parallelism(dp=dp, cp=cp, microbatches=microbatches)
    facts = facts_of(layout, per_token=True, copies=copies)
    assert facts.masked != facts.n


@pytest.mark.parametrize("packing", ["thd", "bshd"])
def test_a_mask_sliced_by_other_chunks_trains_another_loss_in_either_packing(packing):
    layout = Parallelism(cp=2, packing=packing)
    facts = facts_of(layout, per_token=False)
    named = facts.named(CASES[0].aggregation)
    for name in ("chunks_swapped", "contiguous_chunks"):
        weights, _ = BY_NAME[name].weights(facts, CASES[0].aggregation)
        assert (weights - named).norm() > 0.1 * named.norm()
