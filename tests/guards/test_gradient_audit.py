"""Each loss of ``audit_cases`` is trained as by hand, warned of or refused, in each layout."""

import pytest
from audit_cases import LAYOUTS, cases_of
from conftest import early, launched

from megatron_lossagg.contract.scaling import LOSS_SCALINGS

ROWS = [
    f"{layout} | {scaling} | {case}"
    for layout, parallelism in LAYOUTS.items()
    for scaling in LOSS_SCALINGS
    for case in cases_of(parallelism)
]


@early
def audited():
    return launched("guards/gradient_audit_worker.py", processes=2).splitlines()


@pytest.mark.parametrize("row", ROWS)
def test_the_audit_by_gradient(audited, launches, row):
    failed = [line for line in audited if line.startswith(f"FAILED {row}:")]
    assert not failed
    assert f"PASSED {row}" in audited
