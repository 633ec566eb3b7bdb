"""A run whose ranks were all killed goes on as if nothing had happened."""

import json
import random

import pytest
from test_bad_input import SMALL, TESTS, TRAIN, run_example

WARMUP, STEPS, INTERVAL = 6, 6, 2


def flags_of(folder):
    sizes = ["--warmup-steps", WARMUP, "--steps", STEPS, "--save-interval", INTERVAL]
    return ["--output", folder, *SMALL, *sizes, "--eval-interval", 2, "--num-microbatches", 2]


def without_time(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["phase"] == "start"
    return [json.dumps({k: v for k, v in line.items() if k != "seconds"}) for line in lines]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("never_killed") / "run"
    done = run_example(flags_of(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = without_time(folder)
    assert len(lines) == 1 + WARMUP + STEPS
    return lines


@pytest.mark.parametrize("phase", ["warmup", "rl"])
def test_metrics_after_a_kill_are_byte_equal_to_those_of_a_run_never_killed(
    never_killed, tmp_path, phase
):
    first = 0 if phase == "warmup" else WARMUP
    # Any step that is no checkpoint, behind the phase's first checkpoint.
    kill_after = random.choice([step for step in range(first + 3, first + 6) if step % INTERVAL])
    done = run_example(
        ["all_ranks_killed", "--", *flags_of(tmp_path / "run")],
        script=[str(TESTS / "drive_example.py")],
        env={"KILL_AFTER": str(kill_after)},
    )
    assert done.returncode != 0
    assert "Signal 9" in done.stderr
    written = without_time(tmp_path / "run")
    assert len(written) == 1 + kill_after, (kill_after, written)
    done = run_example([*flags_of(tmp_path / "run"), "--resume"], script=[str(TRAIN)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert without_time(tmp_path / "run") == never_killed
