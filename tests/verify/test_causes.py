"""Known faults are distinguished by their weights in every layout where they differ."""

from itertools import combinations

import pytest
import torch

from megatron_lossagg.scaling import LOSS_SCALINGS
from megatron_lossagg.verify.cases import CASES, expected
from megatron_lossagg.verify.causes import CAUSES, Facts, symbols
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import Reference
from megatron_lossagg.verify.sequences import assign_sequences, make_sequences, padding_sequence

BY_NAME = {cause.name: cause for cause in CAUSES}


def facts_of(parallelism, *, loss_scaling, copies=1):
    """Make a step with random token losses: causes depend on losses and never on gradients."""
    padded = 96
    sequences = make_sequences(copies)
    tokens = sum(
        -(-len(sequence) // padded) * padded for sequence in [*sequences, padding_sequence(padded)]
    )
    losses = torch.rand(tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = Reference(
        sequences=sequences,
        padded=padded,
        losses_Y=losses + 1.0,
        gradients_YP=torch.zeros(tokens, 0, dtype=torch.float64),
        parameters={},
    )
    return Facts(
        reference=reference,
        assignment=assign_sequences(sequences, parallelism.m_of_ranks),
        parallelism=parallelism,
        loss_scaling=loss_scaling,
    )


def predictions(cause, parallelism):
    """Concatenate slopes and losses of every case in both loss scalings, in one sequence."""
    parts = []
    for loss_scaling in LOSS_SCALINGS:
        facts = facts_of(parallelism, loss_scaling=loss_scaling)
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
def test_every_cause_trains_another_loss_than_the_configured_one(at_dp3_cp2_m4, name):
    layout = Parallelism(dp=3, cp=2, microbatches=4)
    configured = []
    for loss_scaling in LOSS_SCALINGS:
        facts = facts_of(layout, loss_scaling=loss_scaling)
        for case in CASES:
            wanted = expected(case, facts.reference, facts.assignment)
            configured += [wanted.slope_Y, torch.tensor([wanted.loss], dtype=torch.float64)]
    right = torch.cat(configured)
    assert (at_dp3_cp2_m4[name] - right).norm() > 1e-3 * right.norm()


def test_factors_of_cp_and_of_dp_are_equal_where_cp_is_dp():
    layout = Parallelism(dp=2, cp=2, microbatches=3)
    without_cp, without_dp = (
        predictions(BY_NAME[name], layout) for name in ("without_cp", "without_dp")
    )
    assert torch.equal(without_cp, without_dp)


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_token_weights_give_the_oracles_slope_and_loss(case, loss_scaling):
    facts = facts_of(Parallelism(dp=3, cp=2, microbatches=4), loss_scaling=loss_scaling)
    second = facts.token_weights(case.second) if case.second else None
    wanted = expected(case, facts.reference, facts.assignment)
    slope = facts.slope(case, facts.token_weights(case.aggregation), second)
    assert torch.allclose(slope, wanted.slope_Y, rtol=1e-13, atol=0)
    assert facts.loss(case, facts.token_weights(case.aggregation), second) == pytest.approx(
        wanted.loss, rel=1e-13
    )


# Of the gradient in either loss scaling, and of the report: worked out by hand for DP 3, CP 2, M 4.
FACTORS = {
    "times_cp": (2, 2, 1),
    "over_m": (1 / 4, 1, 1 / 4),
    "without_cp": (1 / 2, 1, 1 / 2),
    "without_dp": (1 / 3, 1, 1 / 3),
    "times_dp": (1, 3, 1),
    "num_tokens_on_every_cp_rank": (1, 1 / 2, 1),
    "report_without_m": (1, 1, 1 / 4),
    "schedule_without_m": (4, 1, 1),
    "reduced_by_sum": (6, 1, 1),
    "reduced_by_mean": (1, 1 / 6, 1),
    "not_divided_by_n": (1, 78, 1),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_wrong_factor_multiplies_gradient_and_report_as_computed_by_hand(name):
    aggregation = CASES[0].aggregation
    for loss_scaling, factor in zip(LOSS_SCALINGS, FACTORS[name], strict=False):
        facts = facts_of(Parallelism(dp=3, cp=2, microbatches=4), loss_scaling=loss_scaling)
        right = facts.token_weights(aggregation)
        gradient, reported = BY_NAME[name].weights(facts, aggregation)
        assert torch.allclose(gradient, factor * right, rtol=1e-12, atol=0)
        assert torch.allclose(reported, FACTORS[name][2] * right, rtol=1e-12, atol=0)


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
    facts = facts_of(Parallelism(dp=3, cp=2, microbatches=4), loss_scaling="average")
    assert symbols(factor, facts, tolerance=1e-9) == names


def test_a_factor_equal_to_several_sizes_is_named_by_all_of_them():
    facts = facts_of(Parallelism(dp=2, cp=2, microbatches=2), loss_scaling="average")
    assert symbols(4.0, facts, tolerance=1e-9) == ["M DP", "M CP", "DP CP"]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("copies", [1, 2])
def test_the_ones_of_the_training_masks_never_add_up_to_n(dp, cp, microbatches, copies):
    layout = Parallelism(dp=dp, cp=cp, microbatches=microbatches)
    facts = facts_of(layout, loss_scaling="per_token", copies=copies)
    assert facts.masked != facts.n


@pytest.mark.parametrize("packing", ["thd", "bshd"])
def test_a_mask_sliced_by_other_chunks_trains_another_loss_in_either_packing(packing):
    layout = Parallelism(cp=2, packing=packing)
    facts = facts_of(layout, loss_scaling="average")
    right = facts.token_weights(CASES[0].aggregation)
    for name in ("chunks_swapped", "contiguous_chunks"):
        weights, _ = BY_NAME[name].weights(facts, CASES[0].aggregation)
        assert (weights - right).norm() > 0.1 * right.norm()
