"""On real Megatron-Core every layout trains the gradient that the oracle names.

Cases: see ``gradient_worker.py``; data with every degenerate row: ``step_data.py``.
"""

import pytest
from conftest import COUNTED, launched
from gradient_cases import CASES

LAYOUTS = {
    "DP2": (2,),
    "DP3": (3,),
    "CP2": (2, "--cp", "2"),
    "DP2xCP2": (4, "--cp", "2"),
    "PP2xCP2": (4, "--cp", "2", "--pp", "2"),
}
MICROBATCHES = ("1", "3", "4")
REGIMES = ("average", "per-token")
SINGLE = {
    "TP2": (2, "--tp", "2"),
    "TP2-SP": (2, "--tp", "2", "--sp"),
    "TP2xCP2-SP": (4, "--tp", "2", "--cp", "2", "--sp"),
    "DP2xCP2": (4, "--cp", "2"),
    "PP2": (2, "--pp", "2"),
}

OPTIONS = {
    "distributed-optimizer": (2, "--cp", "2", "--distributed-optimizer"),
    "average-in-collective": (2, "--average-in-collective"),
    "bshd": (2, "--cp", "2", "--layout", "bshd"),
    "local": (2, "--cp", "2", "--layout", "local"),
}


def the_case(cases, case, microbatches, regime):
    """Pick one case's errors; a case that did not run is an error here."""
    (found,) = [
        line
        for line in cases
        if (line["case"], line["M"], line["regime"]) == (case, microbatches, regime)
    ]
    return found


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_the_named_loss(gradient_cases, layout, case, microbatches, regime):
    cases = gradient_cases(*LAYOUTS[layout], "--microbatches", *MICROBATCHES)
    errors = the_case(cases, case, microbatches, regime)
    COUNTED["cases"] += 1
    assert errors["gradient"] < 1e-12
    assert errors["loss"] < 1e-12
    assert errors["evaluation"] < 1e-12
    assert errors["gauge"] < 1e-6  # kept in float32


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_with_3_and_5_microbatches_train_the_named_loss(gradient_cases, case, regime):
    cases = gradient_cases(2, "--microbatches", "3+5")
    assert the_case(cases, case, "3+5", regime)["gradient"] < 1e-12


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", SINGLE)
def test_in_float32_with_megatrons_cross_entropy(gradient_cases, layout, case, regime):
    cases = gradient_cases(*SINGLE[layout], "--float32", "--microbatches", "1", "3")
    for microbatches in ("1", "3"):
        errors = the_case(cases, case, microbatches, regime)
        assert errors["gradient"] < 1e-5
        assert errors["loss"] < 1e-5
        assert errors["evaluation"] < 1e-5


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("option", OPTIONS)
def test_other_ways_to_reduce_and_to_lay_out_give_the_same_gradient(
    gradient_cases, option, case, regime
):
    cases = gradient_cases(*OPTIONS[option], "--microbatches", "3")
    assert the_case(cases, case, "3", regime)["gradient"] < 1e-12


def test_stock_megatron_is_untouched_and_equals_token_mean_per_token():
    out = launched("parity_worker.py", processes=4)
    assert out.count("PARITY bit for bit, token_mean within 1e-12") == 2, out
