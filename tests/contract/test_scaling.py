"""K and the factors it compensates, against Megatron's rules written out as loops."""

import itertools
from fractions import Fraction
from math import prod

import pytest

from megatron_lossagg.contract.scaling import (
    K_FORMULA,
    LOSS_SCALINGS,
    Scaling,
    ddp_factor,
    deferred_factor,
)

SIZES = list(itertools.product((1, 3), (1, 2), (1, 2, 4)))  # M, DP, CP


def scaling(loss_scaling, m, dp, cp, n=78):
    return Scaling(
        loss_scaling=loss_scaling, num_microbatches=m, dp_cp_size=dp * cp, active_tokens=n
    )


@pytest.mark.parametrize(("m", "dp", "cp"), SIZES)
@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
def test_k_makes_the_steps_gradient_the_sum_of_the_partial_losses(loss_scaling, m, dp, cp):
    """Every rank and microbatch has a partial loss; Megatron's rules as the table has them."""
    n = 78
    step = scaling(loss_scaling, m, dp, cp, n)
    partial_losses = {
        key: Fraction(1 + i, 7) for i, key in enumerate(itertools.product(*map(range, (m, dp, cp))))
    }
    counted = {(i, rank): n // (m * dp) for i in range(m) for rank in range(dp)}
    counted[0, 0] += n - sum(counted.values())
    total, num_tokens = Fraction(0), 0
    for (i, rank, cp_rank), partial_loss in partial_losses.items():
        tokens = step.num_tokens(counted[i, rank], cp_rank)
        loss = partial_loss * step.k
        total += loss / tokens / m if loss_scaling == "average" else loss
        num_tokens += tokens
    total = total / (dp * cp) if loss_scaling == "average" else total / num_tokens
    assert total == sum(partial_losses.values())


@pytest.mark.parametrize(("m", "dp", "cp"), SIZES)
@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
def test_the_factors_from_partial_loss_to_gradient_multiply_to_1(loss_scaling, m, dp, cp):
    factors = list(scaling(loss_scaling, m, dp, cp).factors())
    assert prod(f.factor for f in factors) == 1
    places = ["loss_func", "schedule", "DDP", "finalize_model_grads"]
    assert [f.where for f in factors] == places
    assert factors[0].factor == scaling(loss_scaling, m, dp, cp).k
    assert f"K = {K_FORMULA[loss_scaling]}" in factors[0].does


@pytest.mark.parametrize("n", [78, 0])
@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
def test_calls_of_different_sizes_are_divided_by_one_total(loss_scaling, n):
    """Of two calls, M 2 and 5 at DP CP 4, what Megatron makes of a partial loss of 1 in each."""
    total, sums = 13.0, 0.0
    for m in (2, 5):
        call = Scaling(
            loss_scaling=loss_scaling,
            num_microbatches=m,
            dp_cp_size=4,
            active_tokens=n // 2,
            is_deferred=True,
        )
        sums += call.k * call.schedule_factor * (1 / 4 if loss_scaling == "average" else 1)
    finalized = sums / max(n, 1) if loss_scaling == "per_token" else sums
    assert finalized * deferred_factor(loss_scaling, total, n) == pytest.approx(2 / total)


def test_k_by_hand():
    assert scaling("average", 3, 4, 2).k == 24
    assert scaling("per_token", 3, 4, 2).k == 78
    assert scaling("per_token", 3, 4, 2).report_count == 1 / 24


@pytest.mark.parametrize(("m", "dp", "cp"), SIZES)
def test_a_reported_partial_loss_comes_out_as_the_steps_loss(m, dp, cp):
    step = scaling("per_token", m, dp, cp)
    partial_losses = [Fraction(1 + i, 3) for i in range(m * dp * cp)]
    counts = [step.report_count for _ in partial_losses]
    assert sum(partial_losses) / sum(counts) == pytest.approx(sum(partial_losses))


def test_a_reported_partial_loss_of_ranks_with_3_and_1_microbatches_is_the_steps_loss_too():
    counts = [scaling("average", m, 2, 2).report_count for m in (3, 1) for _ in range(2 * m)]
    assert sum(counts) == pytest.approx(1)


def test_ddp_averages_once_and_only_in_the_average_loss_scaling():
    assert ddp_factor("average", 8, average_in_collective=False) == 1 / 8
    assert ddp_factor("average", 8, average_in_collective=True) == 1
    assert ddp_factor("per_token", 8, average_in_collective=False) == 1
