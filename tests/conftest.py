"""What the tests share: launched gradient cases, their reference, and the line that counts them."""

import json
import os
from pathlib import Path

import pytest

from megatron_lossagg.cpu import launch
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.job import Job

TESTS = Path(__file__).parent
COUNTED = {"cases": 0, "skipped": 0}


def launched(script, *arguments, processes, timeout=600):
    """Run a worker of this folder on several processes against the package beside it."""
    return _launched([str(TESTS / script), *map(str, arguments)], processes, timeout)


def launched_module(module, *arguments, processes, timeout=600):
    """Run a module of the package on several processes."""
    return _launched(["-m", module, *map(str, arguments)], processes, timeout)


def worker_path():
    """Where a launched worker finds the package, this folder, and a release of Megatron-Core."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(TESTS.parent), str(TESTS), *given])


def _launched(command, processes, timeout):
    done = launch(
        command,
        processes=processes,
        timeout=timeout,
        # Unbuffered, a line and its end are two writes, and the ranks share the output.
        env={"PYTHONPATH": worker_path(), "PYTHONUNBUFFERED": ""},
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def proven(tmp_path_factory):
    """Function of layouts: their verdicts by (layout, case, regime), one launch a world size."""
    cache = {}

    def verdicts_of(layouts):
        for size in sorted({layout.world_size for layout in layouts}):
            job = Job(layouts=[x for x in layouts if x.world_size == size], cases=CASES)
            key = job.to_json()
            if key not in cache:
                cache[key] = "the launch of these layouts failed in an earlier test"
                cache[key] = prove_job(job, tmp_path_factory.mktemp("job"))
            assert isinstance(cache[key], list), cache[key]
            yield from cache[key]

    return lambda layouts: {(v["layout"], v["case"], v["regime"]): v for v in verdicts_of(layouts)}


def prove_job(job, folder):
    """Launch a job of ``megatron_lossagg.verify``; the verdicts, as its events told them."""
    job_file, events = folder / "job.json", folder / "events.jsonl"
    job_file.write_text(job.to_json())
    launched_module("megatron_lossagg.verify", job_file, events, processes=job.world_size)
    told = [json.loads(line) for line in events.read_text().splitlines()]
    verdicts = [v for event in told if event["event"] == "layout" for v in event["verdicts"]]
    assert len(verdicts) == job.num_verdicts
    return verdicts


def pytest_terminal_summary(terminalreporter):
    """Count the gradient cases as the issue of the day did: printed, so that none is lost."""
    if COUNTED["cases"]:
        from test_gradients import CASES, MICROBATCHES, SPLITS

        terminalreporter.write_line(
            f"gradient cases: {len(CASES)} x {len(SPLITS)} x {len(MICROBATCHES)} x 2 regimes = "
            f"{COUNTED['cases']}, skipped {COUNTED['skipped']}"
        )
