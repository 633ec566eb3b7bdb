"""What the tests share: launches, early ones, their mark, gradient cases, seeds."""

import json
import os
import random
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from check_runner import assert_passed, checks_of
from fork_server import WITH_MEGATRON, WITHOUT_MEGATRON, ForkServer
from framework_folders import PATH
from ran import pytest_terminal_summary  # noqa: F401  a hook

from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.job import Job, write_job

TESTS = Path(__file__).parent
NEEDS_NO_MEGATRON = {
    "../examples/open_instruct.py",
    "examples/open_instruct_worker.py",
    "reduction/plan_worker.py",
    "reduction/plan_refusals_worker.py",
    "loop/buffer_worker.py",
}
"""Workers that must run where Megatron-Core is not imported."""
ENVIRONMENT = dict(os.environ)
"""Of every launch: a test may patch ``os.environ`` while an early launch starts."""
FOLDER = tempfile.TemporaryDirectory()
LAUNCHES_AT_ONCE = 2
"""How many early launches run next to the tests; ranks wait for one another half of the time."""
RELEASE = tuple(int(part) for part in version("megatron-core").split(".")[:2])
"""Of Megatron-Core: major and minor."""


def launched(script, *arguments, processes, timeout=600):
    """Run a worker, by its path in this folder, on several processes against this checkout's
    package.
    """
    return _printed(ended(script, *arguments, processes=processes, timeout=timeout))


def ended(script, *arguments, processes, timeout=600):
    """Run it as ``launched`` does; return how it ended, also if it failed or ran out of time."""
    imports = WITHOUT_MEGATRON if script in NEEDS_NO_MEGATRON else WITH_MEGATRON
    command = [str(TESTS / script), *map(str, arguments)]
    try:
        return fork_server(imports).launch(command, processes=processes, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        error = f"{late.stderr}\n{late}"
        return subprocess.CompletedProcess(command, 1, late.output, error)


def worker_path():
    """Return the path on which a worker finds the package, tests' modules and a Megatron."""
    given = filter(None, [ENVIRONMENT.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, PATH), *given])


SERVERS = {
    imports: ForkServer(imports, path=worker_path(), environment=ENVIRONMENT)
    for imports in (WITH_MEGATRON, WITHOUT_MEGATRON)
}


def fork_server(imports=WITH_MEGATRON):
    """Return the session's process that has imported ``imports`` and forks ranks."""
    return SERVERS[imports]


def _printed(done):
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def early(function):
    """Make a session fixture of a function without arguments that launches something.

    A thread calls it once the tests are collected, if one of them names the fixture: it runs
    while the tests before that one do. A row of a table needs no fixture: ``mark.early(function)``
    on the row, and ``result_of(function)`` in the test.
    """

    def fixture(launches):
        return result_of(function)

    fixture.begins = function
    return pytest.fixture(scope="session", name=function.__name__)(fixture)


def result_of(function):
    """Wait for what an early launch returns, in a test whose row is marked with it."""
    return EARLY.result_of(function)


def each_check(script, *, processes):
    """Make an early fixture of how a worker ended, and the test of each of its checks.

    The fixture is called ``output_of_``, the worker's name, and the number of processes.
    """
    name = f"output_of_{Path(script).stem}_{processes}"

    def run():
        return ended(script, processes=processes)

    @pytest.mark.usefixtures(name)
    @pytest.mark.parametrize("check", checks_of(TESTS / script))
    def passes(request, check):
        assert_passed(check, request.getfixturevalue(name))

    run.__name__ = name
    return early(run), passes


class Early:
    """The calls of the early fixtures' functions that have begun."""

    def __init__(self):
        self._threads = ThreadPoolExecutor(LAUNCHES_AT_ONCE)
        self._begun = {}

    def begin(self, function):
        """Call it in a thread, once."""
        if function not in self._begun:
            self._begun[function] = self._threads.submit(function)

    def result_of(self, function):
        """Wait for what it returns."""
        if function not in self._begun:
            raise RuntimeError(
                f"{function} was asked for while a test runs, which then waits for all of "
                "it: name it in the arguments of the test, in pytest.mark.usefixtures or .early"
            )
        return self._begun[function].result()

    def end(self):
        """Call no further functions. Those that run fail when their fork server is closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)


EARLY = Early()


def new_folder():
    """Return a folder for an early launch, which can ask for no fixture."""
    return Path(tempfile.mkdtemp(dir=FOLDER.name))


def pytest_collection(session):
    """Let the servers import while a run of all tests collects them."""
    config = session.config
    chosen = config.option.markexpr or config.option.keyword or config.option.collectonly
    if config.args_source is config.ArgsSource.TESTPATHS and not chosen:
        for server in SERVERS.values():
            server.start()


def pytest_collection_finish(session):
    """Begin what the collected tests need, in their order."""
    if session.config.option.collectonly:
        return
    for item in session.items:
        if any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif")):
            continue
        for function in early_functions(item):
            EARLY.begin(function)


def pytest_unconfigure():
    EARLY.end()
    for server in SERVERS.values():
        server.close()
    FOLDER.cleanup()


@pytest.fixture(autouse=True)
def _seeds():
    """Draw the same numbers in every test, alone or after others."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def job_of(layouts, cases=()):
    """Write layouts of one world size and cases for a worker; return the file's path."""
    write_job(Job(layouts=layouts, cases=cases), file := new_folder() / "job")
    return str(file)


def proven(layouts, cases=CASES):
    """Run every case of layouts of one world size in both loss scalings; return the verdicts.

    The verdicts' keys are (layout, case, loss scaling).
    """
    job = Job(layouts=layouts, cases=cases)
    events = new_folder() / "events.jsonl"
    command = ["-m", "megatron_lossagg.verify", job_of(layouts, cases), str(events)]
    _printed(fork_server().launch(command, processes=job.world_size, timeout=600))
    reported = [json.loads(line) for line in events.read_text().splitlines()]
    verdicts = [v for event in reported for v in event.get("verdicts", ())]
    assert len(verdicts) == job.num_verdicts
    return {(v["layout"], v["case"], v["loss_scaling"]): v for v in verdicts}


@pytest.fixture(scope="session")
def launches():
    """Ask for it in a fixture that starts a process, for its tests to be marked ``launches``."""


def pytest_collection_modifyitems(config, items):
    """Mark the tests whose fixtures launch something: ``-m "not launches"`` leaves them out.

    A test that starts a process itself has the mark in its file. Tests that need an early launch
    come last, and before them those that start a process: the others run next to both. Those of a
    framework's newest main run only where they are asked for.
    """
    if "newest" not in config.option.markexpr:
        newest = [item for item in items if item.get_closest_marker("newest")]
        config.hook.pytest_deselected(items=newest)
        items[:] = [item for item in items if item not in newest]
    for item in items:
        if "launches" in item.fixturenames or early_functions(item):
            item.add_marker("launches")
    items.sort(
        key=lambda one: (bool(early_functions(one)), bool(one.get_closest_marker("launches")))
    )


def early_functions(item):
    """List the functions of the early fixtures and marks that a test needs."""
    definitions = item._fixtureinfo.name2fixturedefs.values()
    functions = [definition.func for same_name in definitions for definition in same_name]
    marked = [function for mark in item.iter_markers("early") for function in mark.args]
    return marked + [function.begins for function in functions if hasattr(function, "begins")]
