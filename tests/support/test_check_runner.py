"""Of a launch with a failed check, only that check and those behind it have not passed."""

import pytest
from check_runner import assert_passed
from conftest import ended

pytestmark = pytest.mark.launches

WORKER = """
import os, sys, time
import torch.distributed as dist
from check_runner import run_checks
from ranks import begin

def check_first(layout):
    dist.barrier()

def check_second(layout):
    dist.barrier()
    if layout == "last" and dist.get_rank() == 1:
        {fault}
    dist.barrier()

def check_third(layout):
    dist.barrier()

begin()
for layout in ("early", "last"):
    run_checks(globals(), layout)
{end}
"""


@pytest.fixture
def outcomes(tmp_path):
    """Return what the tests of a worker's checks say, which has a fault on its second rank."""

    def of(fault, end="", timeout=600):
        worker = tmp_path / "worker.py"
        worker.write_text(WORKER.format(fault=fault, end=end))
        done = ended(worker, processes=2, timeout=timeout)
        said = []
        for check in ("first", "second", "third"):
            try:
                assert_passed(check, done)
            except pytest.fail.Exception as failure:
                said.append(str(failure))
            else:
                said.append("passed")
        return said

    return of


def test_a_check_that_fails_is_named_and_those_behind_it_are_not_reached(outcomes):
    first, second, third = outcomes("raise ValueError('a wrong weight')")
    assert first == "passed"
    assert "FAILED check_second: ValueError: a wrong weight" in second
    assert "line" in second
    assert third.startswith("not reached: check_second: ")


@pytest.mark.parametrize("fault", ["os._exit(3)", "time.sleep(600)"])
def test_a_check_that_ends_or_holds_the_launch_is_named(outcomes, fault):
    first, second, third = outcomes(fault, timeout=600 if "exit" in fault else 10)
    assert first == "passed"
    assert "rank 1 exitcode" in second
    assert third.startswith("not reached: check_second")


def test_a_launch_that_fails_after_its_checks_fails_them_all(outcomes):
    said = outcomes("pass", end="sys.exit('a process group')")
    assert all("a process group" in one for one in said)
    assert outcomes("pass") == ["passed"] * 3
