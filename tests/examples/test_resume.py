"""A run whose ranks were all killed resumes as if it had not been interrupted."""

import json

import pytest
from test_bad_input import DRIVE, SMALL, run_example

WARMUP, STEPS, INTERVAL = 6, 6, 2


def flags_of(folder):
    sizes = ["--warmup-steps", WARMUP, "--steps", STEPS, "--save-interval", INTERVAL]
    return ["--output", folder, *SMALL, *sizes, "--eval-interval", 2, "--num-microbatches", 2]


def without_time(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["phase"] == "start"
    return [json.dumps({k: v for k, v in line.items() if k != "seconds"}) for line in lines]


@pytest.fixture(scope="module")
def never_killed(launches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("never_killed") / "run"
    done = run_example(flags_of(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = without_time(folder)
    assert len(lines) == 1 + WARMUP + STEPS
    return lines


# A step of each phase that has no checkpoint, after one that has.
KILLED_AFTER = [WARMUP - 1, WARMUP + INTERVAL + 1]


@pytest.mark.parametrize("kill_after", KILLED_AFTER)
def test_metrics_after_a_kill_are_byte_equal_to_those_of_an_uninterrupted_run(
    never_killed, tmp_path, kill_after
):
    done = run_example(
        ["all_ranks_killed", "--", *flags_of(tmp_path / "run")],
        script=DRIVE,
        env={"KILL_AFTER": str(kill_after)},
    )
    assert done.returncode != 0
    assert "Signal 9" in done.stderr
    written = without_time(tmp_path / "run")
    assert len(written) == 1 + kill_after, (kill_after, written)
    done = run_example([*flags_of(tmp_path / "run"), "--resume"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert without_time(tmp_path / "run") == never_killed
