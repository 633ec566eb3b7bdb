"""The causes of verification and the faults of tests/wrong_factors train different steps."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch
from wrong_factors import predictions as faults

from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.verify.cases import CASES, expected
from megatron_lossagg.verify.causes import CAUSES, Facts, symbols
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import Reference, relative
from megatron_lossagg.verify.step_data import assign_sequences, make_sequences, padding_sequence

BY_NAME = {cause.name: cause for cause in (*CAUSES, *faults.CAUSES)}
ALL_APART = Parallelism(dp=3, cp=2, microbatches=4)
INTERVALS = Parallelism(dp=3, cp=2, microbatches=4, cp_partition="contiguous")


def facts_of(parallelism, *, loss_scaling="average", copies=1):
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


@cache
def wanted_of(case):
    """Compute what a case expects, in either loss scaling and partition: both assign alike."""
    facts = facts_of(ALL_APART)
    return expected(case, facts.reference, facts.assignment)


def all_cases():
    """Yield every case in both loss scalings and partitions, with what it expects."""
    for loss_scaling, parallelism in product(LOSS_SCALINGS, (ALL_APART, INTERVALS)):
        facts = facts_of(parallelism, loss_scaling=loss_scaling)
        for case in CASES:
            yield facts, case, wanted_of(case)


def test_in_bf16_half_of_a_reported_loss_is_noticed_in_every_case():
    deepest = Parallelism(pp=4, vpp=2, microbatches=4, bf16=True)
    for facts, _, wanted in all_cases():
        terms = facts.reference.size_of_loss_terms(wanted.slope_Y)
        assert relative(wanted.loss / 2, wanted.loss, terms) > deepest.tolerance


def test_a_second_term_is_a_part_of_the_loss_and_the_gradient():
    (case,) = [case for case in CASES if case.second is not None]
    both, first = wanted_of(case), wanted_of(replace(case, second=None))
    assert abs(both.loss - first.loss) > 0.01 * abs(first.loss)
    assert (both.slope_Y - first.slope_Y).norm() > 0.01 * first.slope_Y.norm()


def over_cases(predict, cases):
    """Concatenate the slopes and losses of the cases."""
    parts = []
    for facts, case, wanted in cases:
        slope, loss = predict(facts, case, wanted)
        parts += [slope, torch.tensor([loss], dtype=torch.float64)]
    return torch.cat(parts)


def test_no_two_causes_are_equal_where_m_dp_and_cp_differ_and_none_is_the_configured_loss():
    cases = list(all_cases())
    trained = {name: over_cases(cause.predict, cases) for name, cause in BY_NAME.items()}
    trained["right"] = over_cases(lambda facts, case, wanted: (wanted.slope_Y, wanted.loss), cases)
    for one, other in combinations(trained, 2):
        apart = (trained[one] - trained[other]).norm()
        assert apart > 1e-3 * trained[one].norm(), (one, other)


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_right_token_weights_predict_the_references_slope_and_loss(case, loss_scaling):
    facts, wanted = facts_of(ALL_APART, loss_scaling=loss_scaling), wanted_of(case)
    right = faults.weighted(lambda facts, term: faults.twice(faults.token_weights(facts, term)))
    slope, loss = right(facts, case, wanted)
    assert torch.allclose(slope, wanted.slope_Y, rtol=1e-13, atol=0)
    assert loss == pytest.approx(wanted.loss, rel=1e-13)


# Of the gradient in either loss scaling, and of the report: worked out by hand for DP 3, CP 2, M 4.
FACTORS = {
    "times_cp": (2, 2, 1),
    "over_m": (1 / 4, 1, 1 / 4),
    "without_cp": (1 / 2, 1, 1 / 2),
    "without_instances": (1 / 3, 1, 1 / 3),  # of three
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
    for loss_scaling, factor in zip(LOSS_SCALINGS, FACTORS[name], strict=False):
        facts, wanted = facts_of(ALL_APART, loss_scaling=loss_scaling), wanted_of(CASES[0])
        slope, loss = BY_NAME[name].predict(facts, CASES[0], wanted)
        assert torch.allclose(slope, factor * wanted.slope_Y, rtol=1e-12, atol=0)
        assert loss == pytest.approx(FACTORS[name][2] * wanted.loss, rel=1e-12)


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
    assert symbols(factor, facts_of(ALL_APART), tolerance=1e-9) == names


def test_a_factor_equal_to_several_sizes_is_named_by_all_of_them():
    facts = facts_of(Parallelism(dp=2, cp=2, microbatches=2))
    products = ["M DP", "M CP", "DP CP", "M^2", "DP^2", "CP^2"]
    assert symbols(4.0, facts, tolerance=1e-9) == products


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_the_ones_of_the_training_masks_never_add_up_to_n(copies):
    facts = facts_of(ALL_APART, copies=copies)
    assert faults.num_trained(facts) != facts.n


@pytest.mark.parametrize("packing", ["thd", "bshd"])
@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("chunks_swapped", "zigzag"),
        ("contiguous_chunks", "zigzag"),
        ("zigzag_on_contiguous", "contiguous"),
    ],
)
def test_a_mask_sliced_at_other_positions_trains_another_loss_in_either_packing(
    packing, name, partition
):
    facts = facts_of(Parallelism(cp=2, packing=packing, cp_partition=partition))
    wanted = expected(CASES[0], facts.reference, facts.assignment)
    slope, _ = BY_NAME[name].predict(facts, CASES[0], wanted)
    assert (slope - wanted.slope_Y).norm() > 0.1 * wanted.slope_Y.norm()
