"""Each loss of ``audit_cases`` is trained as by hand, warned of or refused, in each layout."""

import pytest
from audit_cases import LAYOUTS, cases_of
from conftest import early, launched
from ranks import assert_told

from megatron_lossagg.contract.scaling import LOSS_SCALINGS

ROWS = [
    f"{layout} | {scaling} | {case}"
    for layout, parallelism in LAYOUTS.items()
    for scaling in LOSS_SCALINGS
    for case in cases_of(parallelism)
]


@early
def audited():
    return launched("guards/gradient_audit_worker.py", processes=2)


@pytest.mark.parametrize("row", ROWS)
def test_the_audit_by_gradient(audited, launches, row):
    assert_told(row, audited)
