"""Mutate the core's modules with mutmut and list the mutants that no test notices.

    python tests/mutants/run.py [MODULE ...] [--sample N]

MODULE: a key of ``TESTS``; by default all. ``--sample``: a random N of each module's mutants,
always the same ones. Everything happens in copies, in ``.mutants/``. The copies differ from the
package in one way: mutmut skips decorated functions, so ``@property`` and ``@cached_property`` are
applied in a line after the function. Lines that begin with a literal are text of a message and are
left alone. A module's mutants run against the tests in ``TESTS``, those that are launched in forks
instead (``over_ranks.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import libcst as cst
from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".mutants"
PACKAGE = "megatron_lossagg"
DECORATORS = {"property", "cached_property"}
LEFT_OUT = (
    "over_ranks",  # launches; over_ranks.py has its checks
    "the_warning_of_an_empty_step_points_at_its_caller",  # mutmut's frames come between
)
PURE = [
    "--hypothesis-seed=0",
    *(f"--deselect=tests/reduction/test_plan.py::test_{name}" for name in LEFT_OUT),
]
CHECKS, GRADIENTS = "mutants/over_ranks::test_checks_of", "mutants/over_ranks::test_gradients"
PLAN, OWNERSHIP = f"{CHECKS}[plan]", f"{CHECKS}[ownership]"
AGGREGATOR = [f"{CHECKS}[aggregator]", f"{CHECKS}[own_loop]", GRADIENTS]
NUMBERS = ("reduction/test_token_weights", "reduction/test_length_power")
TESTS = {
    "integers": ["reduction/test_integers", "reduction/test_layout"],
    "aggregation": ["reduction/test_aggregation", "loop/test_flags", "reduction/test_plan"],
    "scaling": ["contract/test_scaling", "cli/test_explain"],
    "layout": ["reduction/test_layout", "reduction/test_reducer", "reduction/test_device_path"],
    "exchange": ["reduction/test_exchange", PLAN],
    "counts": ["reduction/test_counts", "reduction/test_plan", *NUMBERS, PLAN],
    "faults": ["reduction/test_step_faults", "reduction/test_not_finite"],
    "microbatch": [
        *("reduction/test_mask_checks", "reduction/test_reducer", "reduction/test_not_finite"),
        *(
            "reduction/test_partial_losses",
            "reduction/test_device_path",
            "reduction/test_token_weights",
        ),
    ],
    "reducer": [
        *("reduction/test_reducer", "reduction/test_not_finite", "reduction/test_custom_reducer"),
        "reduction/test_device_path",
    ],
    "mode_counts": ["reduction/test_plan", "reduction/test_partial_losses", *NUMBERS, PLAN],
    "plan": [
        *("reduction/test_plan", "reduction/test_partial_losses", "reduction/test_reducer"),
        *("reduction/test_custom_reducer", *NUMBERS, PLAN),
    ],
    "record": ["record/test_recorder", "cli/test_diff"],
    "recorder": ["record/test_recorder"],
    "outputs": ["contract/test_outputs", *AGGREGATOR],
    "step": AGGREGATOR,
    "tracker": ["contract/test_sequence_tracker"],
    "ownership": [OWNERSHIP],
    "live": AGGREGATOR,
    "aggregator": AGGREGATOR,
}
"""Files of tests/ without their suffix, or a test of one; a file that is gone is an error."""
# What torch warns of at import.
ARGUMENTS = {
    module: ["-W", "ignore"] for module in ("live", "outputs", "ownership", "step", "aggregator")
}
CONFIG = """
[tool.mutmut]
source_paths = ["{package}"]
only_mutate = ["{package}/{module}.py"]
do_not_mutate_patterns = ['^\\s+"']
also_copy = ["examples", "docs", "benchmarks"]
process_isolation = "forkserver"  # a process in which no test ran yet
use_setproctitle = false
use_git_change_detection = false
track_dependencies = false
timeout_multiplier = 4.0
timeout_constant = 5.0
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = {arguments}
"""


class Undecorated(cst.CSTTransformer):
    """``@property def f`` becomes ``def f`` and ``f = property(f)``."""

    def leave_FunctionDef(self, original_node, updated_node):
        if len(updated_node.decorators) != 1:
            return updated_node
        decorator = updated_node.decorators[0].decorator
        if not isinstance(decorator, cst.Name) or decorator.value not in DECORATORS:
            return updated_node
        name = updated_node.name
        applied = cst.Call(func=decorator, args=[cst.Arg(name)])
        line = cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(name)], applied)])
        return cst.FlattenSentinel([updated_node.with_changes(decorators=[]), line])


def tests_of(module: str) -> list[str]:
    """Name a module's tests as pytest does."""
    parts = [test.partition("::") for test in TESTS[module]]
    return [f"tests/{file}.py{colons}{name}" for file, colons, name in parts]


def copied(module: str) -> Path:
    """Copy package, tests and settings to a folder of their own."""
    folder = WORK / module
    shutil.rmtree(folder, ignore_errors=True)
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE, "tests", "examples", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    source = folder / PACKAGE / f"{module}.py"
    source.write_text(cst.parse_module(source.read_text()).visit(Undecorated()).code)
    arguments = ["-p", "no:cacheprovider", *ARGUMENTS.get(module, PURE)]
    config = CONFIG.format(
        package=PACKAGE,
        module=module,
        tests=json.dumps(tests_of(module)),
        arguments=json.dumps(arguments),
    )
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + config)
    return folder


def sampled(folder: Path, module: str, number: int) -> list[str]:
    """Name a random ``number`` of a module's mutants."""
    code = (
        "import sys; from mutmut.mutation.file_mutation import mutate_file_contents as m;"
        "print(*m(sys.argv[1], open(sys.argv[1]).read()).mutant_names)"
    )
    command = [sys.executable, "-c", code, f"{PACKAGE}/{module}.py"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    names = [f"{PACKAGE}.{module}.{name}" for name in done.stdout.split()]
    return random.Random(0).sample(names, min(number, len(names)))


def main() -> int:
    """Run mutmut for each module and print what survived, then one line per module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(TESTS))
    parser.add_argument("--sample", type=int, metavar="N")
    options = parser.parse_args()
    unknown = set(options.modules) - set(TESTS)
    if unknown:
        parser.error(f"no mutants for {', '.join(sorted(unknown))}: choose from {', '.join(TESTS)}")
    for module in options.modules or TESTS:
        for file in (test.partition("::")[0] for test in tests_of(module)):
            if not (ROOT / file).exists():
                parser.error(f"{file}, in TESTS of {module}, is not there: correct TESTS")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines = []
    for module in options.modules or TESTS:
        folder = copied(module)
        names = sampled(folder, module, options.sample) if options.sample else []
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *names]
        with (folder / "mutmut.log").open("w") as log:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=log, check=False)
        if done.returncode:
            raise SystemExit(f"mutmut ended with {done.returncode}, see {log.name}")
        meta = json.loads((folder / f"mutants/{PACKAGE}/{module}.py.meta").read_text())
        statuses = {n: status_by_exit_code[code] for n, code in meta["exit_code_by_key"].items()}
        for name, status in statuses.items():
            if status not in ("killed", "not checked"):
                print(f"\n{status}: {name}", flush=True)
                show = [sys.executable, "-m", "mutmut", "show", name]
                subprocess.run(show, cwd=folder, env=environment, check=True)
        count = Counter(statuses.values())
        of = f" of {len(statuses)}, sampled" if options.sample else ""
        tried = len(statuses) - count.pop("not checked", 0)
        statuses_text = ", ".join(f"{number} {status}" for status, number in sorted(count.items()))
        lines.append(f"{module}: {tried} mutants{of}: {statuses_text}")
    print("", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
