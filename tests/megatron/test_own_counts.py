"""On Megatron-Core at DP 2 and CP 2: counts of the caller's own, against loops over tokens."""

from dataclasses import replace

import pytest
from conftest import early, proven
from own_columns import mean_of_teachers, per_turn

from megatron_lossagg import Aggregation
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.verify.cases import CASES as CASES_OF_VERIFY
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.parallelism import Parallelism

LEFT_OUT = dict.fromkeys(replace(case, leaves_out=True) for case in CASES_OF_VERIFY)
"""Every case of a verification, without some rows, an empty sequence and a whole prompt."""
KL = Aggregation("sample_mean", count_left_out=True)
CASES = (
    *LEFT_OUT,
    Case(aggregation=Aggregation("prompt_mean"), second=KL, leaves_out=True),
    Case(aggregation=Aggregation(weights=per_turn)),
    Case(aggregation=Aggregation(weights=mean_of_teachers, count_empty=False)),
)
LAYOUTS = [
    Parallelism(dp=2, cp=2, microbatches=3),
    Parallelism(dp=2, cp=2, microbatches=3, hooked=True),
    Parallelism(tp=2, pp=2, microbatches=3),
]


@early
def verdicts_of_own_counts():
    return proven(LAYOUTS, CASES)


RUNS = [
    (layout, case)
    for layout in LAYOUTS
    for case in CASES
    if not (layout.hooked and case.second)  # the hook trains one term
]


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize(("layout", "case"), RUNS, ids=str)
def test_loss_and_gradient_are_those_of_loops(verdicts_of_own_counts, layout, case, loss_scaling):
    verdict = verdicts_of_own_counts[str(layout), str(case), loss_scaling]
    assert verdict["gradient_error"] < 1e-12, verdict["explanation"]
    assert verdict["loss_error"] < 1e-12, verdict["explanation"]
    assert verdict["weight_sum_error"] < 1e-6  # computed in float32
