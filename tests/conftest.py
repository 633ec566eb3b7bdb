"""What the tests share: launched gradient cases, their reference, and the line that counts them."""

import json
import os
from pathlib import Path

import pytest

from megatron_lossagg.cpu import launch

TESTS = Path(__file__).parent
COUNTED = {"cases": 0, "skipped": 0}


def launched(script, *arguments, processes, timeout=600):
    """Run a worker of this folder on several processes against the package beside it."""
    done = launch(
        [str(TESTS / script), *map(str, arguments)],
        processes=processes,
        timeout=timeout,
        env={"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """File of every case's loss and gradients, computed on one process by the oracle."""
    path = tmp_path_factory.mktemp("reference") / "reference.pt"
    launched("gradient_worker.py", "reference", path, processes=1)
    return path


@pytest.fixture(scope="session")
def gradient_cases(reference):
    """Function of a layout's arguments: its cases, each with its errors; launched once."""
    cache = {}

    def run(processes, *arguments):
        if (processes, arguments) not in cache:
            cache[processes, arguments] = "the launch of this layout failed in an earlier test"
            out = launched(
                "gradient_worker.py", "compare", reference, *arguments, processes=processes
            )
            marked = [line for line in out.splitlines() if line.startswith("CASE ")]
            cache[processes, arguments] = [json.loads(line[5:]) for line in marked]
        cases = cache[processes, arguments]
        assert isinstance(cases, list), cases
        return cases

    return run


def pytest_terminal_summary(terminalreporter):
    """Count the gradient cases as the issue of the day did: printed, so that none is lost."""
    if COUNTED["cases"]:
        from test_gradients import CASES, LAYOUTS, MICROBATCHES

        terminalreporter.write_line(
            f"gradient cases: {len(CASES)} x {len(LAYOUTS)} x {len(MICROBATCHES)} x 2 regimes = "
            f"{COUNTED['cases']}, skipped {COUNTED['skipped']}"
        )
