"""Each row of the table of programs is weighed as its true weights are, or refused by name."""

import pytest
from conftest import early, launched

WORKER = "weigh/programs_worker.py"


@early
def rows_on_one_process():
    return launched(WORKER, processes=1).splitlines()


@early
def rows_on_two_processes():
    return launched(WORKER, processes=2).splitlines()


@pytest.mark.parametrize("processes", ["one", "two"])
@pytest.mark.usefixtures("rows_on_one_process", "rows_on_two_processes")
def test_every_program_is_weighed_as_its_true_weights_are(request, processes):
    number = {"one": "process", "two": "processes"}[processes]
    lines = request.getfixturevalue(f"rows_on_{processes}_{number}")
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert len([line for line in lines if line.startswith("PASSED")]) >= 150
