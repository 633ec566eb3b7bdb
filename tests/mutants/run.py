"""Mutate the core's modules with mutmut and list the mutants that no test notices.

    python tests/mutants/run.py [MODULE ...] [--sample N]

MODULE: a key of ``TESTS``, such as reduction/plan; by default all. ``--sample``: a random N of each
module's mutants, always the same ones. Everything happens in copies, in ``.mutants/``. The copies
differ from the package in one way: mutmut skips decorated functions, so ``@property`` and
``@cached_property`` are applied in a line after the function. Lines that begin with a literal are
text of a message and are left alone. A module's mutants run against the tests in ``TESTS``, those
that are launched in forks instead (``over_ranks.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import libcst as cst
from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).resolve().parents[2]
TESTS_FOLDER = ROOT / "tests"
WORK = ROOT / ".mutants"
PACKAGE = "megatron_lossagg"
PRELOADED = "LOSSAGG_MUTANTS_PRELOADED"  # of over_ranks
DECORATORS = {"property", "cached_property"}
# mutmut's frames come between.
LEFT_OUT = "test_plan.py::test_the_warning_of_an_empty_step_points_at_its_caller"
ARGUMENTS = ["-p", "no:cacheprovider", "--hypothesis-seed=0"]
ARGUMENTS += [f"--deselect=tests/reduction/{LEFT_OUT}"]
# over_ranks forks what they launch
ARGUMENTS += [f"--deselect=tests/weigh/test_weigh.py::test_{of}" for of in ("dp2", "calls")]
WEIGH = ("causes", "compare", "factors", "listen", "report", "weighing")
PLANS = ("plan", "plan_totals", "plan_arguments")


def of(folder: str, *names: str) -> list[str]:
    """Name test files of a folder of tests/."""
    return [f"{folder}/test_{name}" for name in names]


def checks_of(*workers: str) -> list[str]:
    """Name the tests that run workers' checks, by the path of each in tests/."""
    return [f"mutants/over_ranks::test_checks_of[{worker}]" for worker in workers]


def faults_of(*guards: str) -> list[str]:
    """Name the tests that run the programs that guards refuse; ``before``: the refusals."""
    return [f"mutants/over_ranks::test_faults_of[{guard}]" for guard in guards]


PLAN = checks_of("reduction/plan_worker", "reduction/plan_refusals_worker")
AGGREGATOR = checks_of("loop/aggregator_worker")
STEP = checks_of("loop/step_worker")
LEGAL_INPUTS = checks_of("guards/legal_inputs_worker")
LEGAL = [*checks_of("guards/legal_worker"), *LEGAL_INPUTS]
LEGAL_STEPS = checks_of("guards/legal_steps_worker")
AUDIT = [*faults_of("GradientAudit"), *checks_of("guards/gradient_audit_worker")]
FINALIZED = [*faults_of("Finalized"), *checks_of("guards/finalized_worker")]
OWNERSHIP = [
    *faults_of("Ownership"),
    *checks_of("guards/ownership_worker", "guards/ownership_whole_masks_worker"),
]
COUNTS = checks_of("loop/step_counts_worker")
TOGETHER = checks_of("guards/agreement_worker")
HOOK = checks_of("loop/schedule_worker", "loop/schedule_refusals_worker")
ENGINE = checks_of("loop/engine_worker", "loop/hybrid_engine_worker")
DEFERRED = [
    *(*of("reduction", "deferred_terms"), *checks_of("guards/deferred_steps_worker")),
    *faults_of("before"),  # calls under another aggregation
]
COMPARISON = checks_of("loop/schedule_comparison_worker")
GRADIENTS = ["mutants/over_ranks::test_gradients"]
HOOKED_GRADIENTS = ["mutants/over_ranks::test_gradients_under_the_hook"]
RECORD = [*of("record", "recorder"), "mutants/over_ranks::test_records"]
WEIGHED = ["weigh/test_measured", "weigh/test_weigh"]
WEIGHED += checks_of("weigh/weigh_worker", "weigh/weigh_calls_worker", "weigh/programs_worker")
WEIGHTS = of("reduction", "token_weights", "length_power")
TABLE = [
    *of("reduction", *PLANS, "counts", "partial_losses", "own_weights", "sequence_weights"),
    *of("reduction", "left_out", "given_totals", "counted", "sequence_columns"),
    *(*of("reduction", "golden_steps"), *WEIGHTS, *PLAN),
]
TESTS = {
    "reduction/integers": of("reduction", "integers", "layout", "plan"),
    "reduction/modes": of("reduction", "aggregation", "plan"),
    "reduction/aggregation": [
        *of("reduction", "aggregation", "plan", "own_weights", "custom_reducer"),
        *of("reduction", "options", "length_power", "deferred_terms"),
        *("loop/test_flags", *STEP),
    ],
    "reduction/layout": of(
        "reduction", "layout", "reducer", "device_path", "mask_checks", "not_finite"
    ),
    "reduction/sequences": [
        *of("reduction", *PLANS, "counts", "integers", "sequence_columns", "left_out"),
        *("loop/test_buffer", *PLAN),
    ],
    "reduction/faults": of("reduction", "step_faults", "not_finite"),
    "reduction/microbatch": [
        *of("reduction", "mask_checks", "reducer", "not_finite", "partial_losses", "device_path"),
        *of("reduction", "token_weights", "custom_reducer"),
        *(*STEP, *AUDIT, *checks_of("guards/legal_runs_worker")),
    ],
    "reduction/plan": [
        *of("reduction", *PLANS, "partial_losses", "reducer", "custom_reducer"),
        *(*WEIGHTS, *PLAN),
    ],
    "reduction/table": TABLE,
    "reduction/weighted": TABLE,
    "reduction/step_state": [
        *of("reduction", "step_faults", "reducer", "not_finite"),
        *(*STEP, *AUDIT, *faults_of("Terms"), *LEGAL_STEPS),
    ],
    "reduction/checks": [
        *of("reduction", "reducer", "layout", "token_weights", "not_finite", "custom_reducer"),
        *of("reduction", "mask_checks", "device_path", "positions", *PLANS),
    ],
    "contract/scaling": [*of("contract", "scaling"), "cli/test_explain"],
    "guards/guard": [
        *(*of("contract", "sequence_tracker"), *STEP, *LEGAL_STEPS, *TOGETHER),
        *checks_of("guards/warning_worker"),
    ],
    "contract/megatron_options": [
        *(*of("contract", "megatron_options"), *AGGREGATOR),
        *checks_of("weigh/weigh_calls_worker"),  # only options that move tokens
    ],
    "guards/refilled": of("loop", "refilled", "buffer_memory"),
    "loop/flags": of("loop", "flags"),
    "contract/outputs": [*of("contract", "outputs"), *STEP, *GRADIENTS],
    "contract/engine": [*ENGINE, *AGGREGATOR, *checks_of("weigh/weigh_worker")],
    "contract/model": [*AGGREGATOR, *GRADIENTS],
    "contract/finalize": [*FINALIZED, *faults_of("before"), *LEGAL_STEPS],
    "contract/side_losses": [*of("contract", "side_loss_scale"), *AGGREGATOR],
    "guards/frozen": [*AGGREGATOR, *TOGETHER, *faults_of("before")],
    "guards/before": [*faults_of("before"), *STEP],
    "guards/each_step": [
        *(*LEGAL_STEPS, *LEGAL_INPUTS, *FINALIZED, *faults_of("Split", "Terms", "GradientBuffers")),
        # chunks that are wrapped anew
        *checks_of("guards/legal_runs_worker", "guards/ownership_worker"),
    ],
    "guards/framework_loss": [*of("guards", "framework_loss"), *COMPARISON],
    "guards/gradient_audit": [*of("guards", "coefficients"), *AUDIT, *STEP, *LEGAL],
    "guards/outcome": [*of("guards", "loss_graph"), *checks_of("guards/outcome_worker")],
    "guards/replicas": [
        *faults_of("Replicas"),
        *checks_of("guards/outcome_worker", "guards/warning_worker"),
    ],
    "guards/ownership": OWNERSHIP,  # the other tests start threads, which no rank is forked from
    "loop/step": [
        *(*STEP, *faults_of("before", "GradientAudit"), *LEGAL_STEPS, *GRADIENTS),
        *(*COMPARISON, "mutants/over_ranks::test_records"),  # a shadow, a record
    ],
    "loop/aggregator": [*AGGREGATOR, *STEP, *LEGAL_STEPS, *COUNTS],
    "loop/deferred": DEFERRED,
    "loop/probe": checks_of("loop/probe_worker"),
    "loop/buffer": [
        *of("loop", "buffer", "buffer_memory", "refilled"),
        *checks_of("loop/buffer_worker"),
    ],
    "loop/schedule_hook": [*HOOK, *COMPARISON, *HOOKED_GRADIENTS],
    "reduction/exchange": [*of("reduction", "exchange"), *PLAN, *TOGETHER],
    "record/step_record": [*of("record", "recorder"), "cli/test_diff"],
    "record/writer": RECORD,
    **{f"weigh/{name}": WEIGHED for name in WEIGH},
}
"""By a module's path in the package: files of tests/ without their suffix, or a test of one.

A file that is gone is an error.
"""
CONFIG = """
[tool.mutmut]
debug = true  # mutmut.log says which tests fail
source_paths = ["{package}"]
only_mutate = ["{package}/{module}.py"]
do_not_mutate_patterns = ['^\\s+"']
also_copy = ["examples", "docs", "benchmarks"]
process_isolation = "forkserver"  # a process in which no test ran yet
use_setproctitle = false
use_git_change_detection = false
track_dependencies = false
timeout_multiplier = 4.0
timeout_constant = 20.0  # ranks wait for other processes of the machine
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


def workers_of(module: str) -> list[str]:
    """Name the workers of a module's tests, and one with Megatron."""
    tests = " ".join(TESTS[module])
    found = re.findall(r"test_checks_of\[(.*?)\]", tests)
    return sorted({*found, "guards/guard_worker"}) if "over_ranks" in tests else []


def copied(module: str) -> Path:
    """Copy package, tests and settings to a folder of their own."""
    folder = WORK / module
    shutil.rmtree(folder, ignore_errors=True)
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE, "tests", "examples", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    source = folder / PACKAGE / f"{module}.py"
    source.write_text(cst.parse_module(source.read_text()).visit(Undecorated()).code)
    config = CONFIG.format(
        package=PACKAGE,
        module=module,
        tests=json.dumps(tests_of(module)),
        arguments=json.dumps(ARGUMENTS),
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
    dotted = module.replace("/", ".")
    names = [f"{PACKAGE}.{dotted}.{name}" for name in done.stdout.split()]
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
    lines = []
    for module in options.modules or TESTS:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            PRELOADED: ",".join(workers_of(module)),
        }
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
