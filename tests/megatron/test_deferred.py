"""Deferred steps train the mode over all their calls: by gradient, next to loops over tokens.

An evaluation of the calls as steps reports the mode's loss over all of them.
"""

import pytest
from conftest import early, job_of, launched
from layouts import DEFERRED, FIRST, OF_A_TOTAL
from ranks import rows_of

from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.verify.job import LOSS_SCALINGS
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE


def run(layouts, cases):
    job, processes = job_of(layouts, cases), layouts[0].world_size
    out = launched("megatron/deferred_worker.py", job, processes=processes)
    return {tuple(key): (errors, tolerance) for key, errors, tolerance in rows_of(out)}


@early
def of_two_ranks():
    return run(DEFERRED[2], OF_A_TOTAL)


@early
def of_four_ranks():
    return run(DEFERRED[4], FIRST)


def has_side(layout, loss_scaling):
    """Whether the worker trains side losses; of experts in the per-token loss scaling only."""
    return layout.mtp or (layout.moe and loss_scaling == "per_token")


def is_exact(layout, loss_scaling, case):
    """Whether side losses, where there are some, allow it."""
    return not has_side(layout, loss_scaling) or (loss_scaling == "per_token" and case is FIRST[0])


def check(found, key):
    errors, tolerance = found[key]
    assert errors["gradient"] < tolerance
    assert errors["loss"] < tolerance
    assert errors.get("side", 0) < tolerance
    assert errors["weights"] < WEIGHT_SUM_TOLERANCE


def check_evaluated(found, key):
    errors, tolerance = found[key]
    assert errors["evaluated"] < tolerance
    assert errors["evaluated weights"] < WEIGHT_SUM_TOLERANCE


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("case", OF_A_TOTAL, ids=str)
def test_the_gradient_of_all_calls_is_that_of_the_mode(of_two_ranks, case, loss_scaling):
    check(of_two_ranks, (str(DEFERRED[2][0]), loss_scaling, str(case)))


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_total_that_is_passed_divides_in_place_of_the_counted_one(
    of_two_ranks, case, loss_scaling
):
    check(of_two_ranks, (str(DEFERRED[2][0]), loss_scaling, f"{case} / 50"))


def on_each(layouts):
    return pytest.mark.parametrize(
        ("layout", "loss_scaling", "case"),
        [
            (layout, scaling, case)
            for layout in layouts
            for scaling in LOSS_SCALINGS
            for case in FIRST
            if is_exact(layout, scaling, case)
        ],
        ids=str,
    )


def check_of_layout(found, layout, loss_scaling, case):
    key = (str(layout), loss_scaling, str(case))
    check(found, key)
    assert ("side" in found[key][0]) == has_side(layout, loss_scaling)


@on_each(DEFERRED[2][1:])
def test_the_gradient_does_not_depend_on_the_layout_of_two_ranks(
    of_two_ranks, layout, loss_scaling, case
):
    check_of_layout(of_two_ranks, layout, loss_scaling, case)


@on_each(DEFERRED[4])
def test_the_gradient_does_not_depend_on_the_layout_of_four_ranks(
    of_four_ranks, layout, loss_scaling, case
):
    check_of_layout(of_four_ranks, layout, loss_scaling, case)


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("case", OF_A_TOTAL, ids=str)
def test_an_evaluation_in_steps_reports_the_modes_loss_over_all_of_them(
    of_two_ranks, case, loss_scaling
):
    check_evaluated(of_two_ranks, (str(DEFERRED[2][0]), loss_scaling, str(case)))


@on_each([*DEFERRED[2][1:], *DEFERRED[4]])
def test_an_evaluations_loss_does_not_depend_on_the_layout(
    of_two_ranks, of_four_ranks, layout, loss_scaling, case
):
    found = of_two_ranks if layout in DEFERRED[2] else of_four_ranks
    check_evaluated(found, (str(layout), loss_scaling, str(case)))


def test_every_mode_with_a_total_is_trained():
    trained = {case.aggregation.mode for case in OF_A_TOTAL}
    assert trained == {name for name, mode in MODES.items() if mode.total}
