"""Each row of the table of programs is weighed as its true weights are, or refused by name."""

from importlib.util import find_spec

import pytest
from conftest import RELEASE, early, launched

WORKER, FSDP = "weigh/programs_worker.py", "weigh/fsdp_worker.py"
IS_REFUSED = RELEASE < (0, 16) or find_spec("einops") is None


@early
def rows_on_one_process():
    return launched(WORKER, processes=1).splitlines()


@early
def rows_on_two_processes():
    return launched(WORKER, processes=2).splitlines()


@early
def fsdp_rows_on_two_processes():
    return launched(FSDP, processes=2).splitlines()


@early
def fsdp_rows_on_four_processes():
    return launched(FSDP, processes=4).splitlines()


def all_passed(lines, *, at_least):
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert len([line for line in lines if line.startswith("PASSED")]) >= at_least


def test_every_program_on_one_process_is_weighed_as_its_true_weights_are(rows_on_one_process):
    all_passed(rows_on_one_process, at_least=180)


def test_every_program_on_two_processes_is_weighed_as_its_true_weights_are(rows_on_two_processes):
    all_passed(rows_on_two_processes, at_least=200)


@pytest.mark.skipif(IS_REFUSED, reason="refused, or without einops")
def test_every_program_on_megatron_fsdp_is_weighed_as_its_true_weights_are(
    fsdp_rows_on_two_processes, fsdp_rows_on_four_processes
):
    all_passed(fsdp_rows_on_two_processes, at_least=80)
    all_passed(fsdp_rows_on_four_processes, at_least=15)
