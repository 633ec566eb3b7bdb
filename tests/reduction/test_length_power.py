"""``length_power``: its two ends are modes that are known, and its bits depend on nothing."""

import numpy as np
import pytest

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.table import StepTotals

LENGTHS = [2000, 500, 8000, 1500, 3000, 1000, 0, 4000, 1, 500]
SAMPLE = [0, 0, 1, 2, 3, 4, 5, 6, 7, 6]


def weights(mode, lengths=LENGTHS, sample=SAMPLE, **options):
    plan = plan_step(Aggregation(mode, **options), Sequences(active_tokens=lengths, sample=sample))
    return plan.weights.numpy()


@pytest.mark.parametrize("sample", [None, SAMPLE])
def test_exponent_0_is_token_mean_and_1_is_sample_mean_without_empty_samples(sample):
    ends = (weights("length_power", sample=sample, exponent=a).tolist() for a in (0, 1))
    assert next(ends) == weights("token_mean", sample=sample).tolist()
    assert next(ends) == weights("sample_mean", sample=sample, count_empty=False).tolist()


@pytest.mark.parametrize("exponent", [-0.5, 0.3, 0.75, 2])
def test_a_tokens_weight_falls_with_its_samples_length_by_that_power(exponent):
    found = weights("length_power", exponent=exponent)
    n_b = np.array([2500, 2500, 8000, 1500, 3000, 1000, 0, 4500, 1, 4500], dtype=float)
    active = n_b > 0
    expected = (
        n_b[active] ** -exponent
        / (np.array([2500, 8000, 1500, 3000, 1000, 4500, 1]) ** (1.0 - exponent)).sum()
    )
    np.testing.assert_allclose(found[active], expected, rtol=1e-14)
    assert not found[~active].any()
    assert (found * LENGTHS).sum() == pytest.approx(1, rel=1e-14)


def test_the_order_of_sequences_changes_no_bit():
    generator = np.random.default_rng(3)
    lengths = generator.integers(0, 20_000, 5_000)
    found = weights("length_power", lengths, None, exponent=0.37)
    order = generator.permutation(len(lengths))
    shuffled = weights("length_power", lengths[order], None, exponent=0.37)
    assert shuffled.tolist() == found[order].tolist()


def test_it_needs_all_lengths_which_totals_do_not_have():
    with pytest.raises(PlanError, match="lengths of all ranks' samples"):
        plan_step(
            Aggregation("length_power", exponent=0.5),
            Sequences(active_tokens=[3, 4]),
            totals=StepTotals(active_tokens=7, samples=2),
        )


@pytest.mark.parametrize("exponent", [-76.04, -77.5])
def test_a_power_or_a_sum_of_powers_beyond_float64_is_refused_by_name(exponent):
    """10,000 to the power 77.04 is below float64's end, and the sum of four is not."""
    aggregation = Aggregation("length_power", exponent=exponent)
    with pytest.raises(PlanError, match=r"samples of up to 10000 tokens to the power .* float64"):
        plan_step(aggregation, Sequences(active_tokens=[9999, 10000, 9998, 10000]))
