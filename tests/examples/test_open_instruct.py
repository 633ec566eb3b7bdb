"""open-instruct's two cases without Megatron, under DDP on two processes."""

import json
import os
import re
import subprocess
import sys

import pytest
from check_runner import checks_of
from conftest import TESTS, early, launched, new_folder
from frameworks import checkout_of, needs

ROOT = TESTS.parent
PAGE = ROOT / "docs" / "own-loop.md"
WORKER = "examples/open_instruct_worker.py"
AVERAGED = "SFT, as finetune.py averages"
CONFIGURED = ['GRPO, loss_denominator "token"', "GRPO, loss_denominator 64", "SFT, the token mean"]


@early
def rows():
    output = new_folder() / "rows.json"
    launched("../examples/open_instruct.py", "--worker", output, processes=2)
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_step_is_loops_over_tokens_however_it_is_cut_and_whatever_the_loop_divides_by(rows, name):
    row = dict(rows[name])
    assert row == pytest.approx(dict.fromkeys(row, row["by hand"]), 1e-12)
    assert list(row) == ["by hand", "1 microbatch", "3 microbatches", "3, loop divides"]


def test_averaged_microbatches_train_a_loss_that_depends_on_their_number(rows):
    row = rows[AVERAGED]
    assert row["1 microbatch"] != pytest.approx(row["by hand"], 0.05)
    assert row["3 microbatches"] != pytest.approx(row["1 microbatch"], 0.05)


def test_the_page_shows_what_the_script_prints(rows):
    assert [*rows] == [*CONFIGURED, AVERAGED]
    for name, row in rows.items():
        (line,) = re.findall(rf"^{re.escape(name)} +(.+)$", PAGE.read_text(), re.M)
        assert [float(value) for value in line.split()] == pytest.approx([*row.values()], abs=2e-9)


@pytest.mark.launches
def test_it_imports_no_megatron():
    code = "import open_instruct, sys; print([m for m in sys.modules if m.startswith('megatron.')])"
    command = [sys.executable, "-c", code]
    folder, env = ROOT / "examples", {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


CHECKS = [f"check_{check}" for check in checks_of(TESTS / WORKER)]


def run_own_code(*, of_finetune):
    checks = [check for check in CHECKS if ("finetune" in check) == of_finetune]
    printed = launched(WORKER, checkout_of("open-instruct"), *checks, processes=2).splitlines()
    assert len(checks) == 2
    assert {f"PASSED {check}" for check in checks} <= {*printed}


@pytest.mark.launches
@needs("open-instruct")
def test_grpo_fasts_own_functions_train_the_same():
    run_own_code(of_finetune=False)


@pytest.mark.launches
@needs("open-instruct", "accelerate")
def test_finetunes_own_loop_averages_microbatches_and_trains_the_token_mean_by_the_factor():
    run_own_code(of_finetune=True)
