"""Bad input ends the example quickly on every rank, with a clear message, before any step.

Which flags, paths and plans the package refuses: ``tests/core``. Here it is that the example's
ranks end by it.
"""

import json
import re
import sys
import time

import pytest
from conftest import TESTS, fork_server
from ranks import rows_of

for package in ("tensorboard", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")
EXAMPLE = TESTS.parent / "examples" / "drgrpo"
TRAIN = EXAMPLE / "train.py"
DRIVE = TESTS / "examples" / "drive_example.py"
SMALL = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2",
    "--prompts-per-step", "2", "--samples-per-prompt", "2", "--warmup-batch-size", "4",
]  # fmt: skip


def run_example(flags, script=TRAIN, timeout=120, env=None):
    """Run the example on two forked ranks."""
    command = [str(script), *map(str, flags)]
    return fork_server().launch(command, processes=2, timeout=timeout, env=env)


def replay(rollouts, folder):
    return ["--mode", "replay", "--rollouts", rollouts, "--output", folder / "run", *SMALL]


@pytest.fixture(scope="module")
def recorded(launches, tmp_path_factory):
    """Run a small online training at DP 2, with its rollouts and a checkpoint."""
    folder = tmp_path_factory.mktemp("recorded")
    flags = ["--output", folder / "run", "--record", folder / "rollouts.jsonl", *SMALL]
    flags += ["--warmup-steps", 2, "--steps", 2, "--save-interval", 2, "--eval-interval", 2]
    done = run_example(flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# name: flags, then words that the message of every rank must have.
CONSTANT = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8"]
REFUSED = {
    "a reducer path": (
        ["--loss-aggregation-reducer-path", "drive_example:not_a_scalar"],
        ["returned a", "0-dim"],
    ),
    "another_divisor_on_rank_1": (CONSTANT, ["rank 0 has", "rank 1 has", "same flags"]),
    "loss_scaling_flipped_after_wrapping": (CONSTANT, ["frozen", "--calculate-per-token-loss"]),
    "sequences_left_out": (CONSTANT, ["was planned with 2 sequences, got 1 without 0"]),
    "truncated": ([], ["truncated.jsonl, line 2: got", "expected a rollout", "--record"]),
}


@pytest.fixture(scope="module")
def refused(recorded, tmp_path_factory):
    """Take ``REFUSED`` one after the other; return what each rank raised, and the folders."""
    folder = tmp_path_factory.mktemp("refused")
    lines = (recorded / "rollouts.jsonl").read_text().splitlines()
    (folder / "whole.jsonl").write_text("\n".join(lines))
    (folder / "truncated.jsonl").write_text(f"{lines[0]}\n{lines[1][:20]}")
    runs = {}
    for name, (flags, _) in REFUSED.items():
        rollouts = folder / ("truncated.jsonl" if name == "truncated" else "whole.jsonl")
        runs[name] = [*map(str, replay(rollouts, folder / name)), *flags]
    file = folder / "runs.json"
    file.write_text(json.dumps(runs))
    done = run_example(["runs_are_refused", "--", file], script=DRIVE)
    assert done.returncode == 0, done.stdout + done.stderr
    raised = rows_of(done.stdout)
    return folder, {name: [words for n, words in raised if n == name] for name in runs}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_raises_the_message_before_it_trains(refused, name):
    folder, raised = refused
    assert len(raised[name]) == 2
    for message in raised[name]:
        for word in REFUSED[name][1]:
            assert word in message
    assert not steps_written(folder / name / "run")


def check_ended(done, seconds, output, words):
    """Assert that every rank failed in time, that nothing was trained, and the message's words."""
    assert done.returncode != 0
    assert seconds < 60
    exit_codes = re.findall(r"exitcode\s*: (-?\d+)", done.stderr)
    assert len(exit_codes) >= 2, done.stderr
    assert "0" not in exit_codes
    assert not steps_written(output)
    assert words in done.stdout + done.stderr


def steps_written(output):
    metrics = output / "metrics.jsonl"
    return metrics.read_text().splitlines() if metrics.exists() else []


def test_refused_flags_end_the_launch_on_every_rank(recorded, tmp_path):
    start = time.monotonic()
    flags = [*replay(recorded / "rollouts.jsonl", tmp_path), "--loss-aggregation", "constant"]
    done = run_example(flags)
    check_ended(done, time.monotonic() - start, tmp_path / "run", "--loss-aggregation-divisor")


def test_a_rank_that_dies_in_a_step_ends_the_others(recorded, tmp_path):
    """Within seconds of the death, as under the launcher (``test_faults.py``)."""
    flags = replay(recorded / "rollouts.jsonl", tmp_path)
    done = run_example(["rank_1_dies", "--", *flags], script=DRIVE)
    (died,) = re.findall(r"rank 1 dies at (\S+)", done.stdout)
    check_ended(done, time.time() - float(died), tmp_path / "run", "Signal 9")


PER_TOKEN = ("response_tokens", "mask", "behaviour_logprobs", "reference_logprobs")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: r.pop("advantage"), "missing 1 .*'advantage'"),
        (lambda r: r.update(extra=1), "unexpected .*'extra'"),
        (lambda r: r.update(step=0), "no step from 1"),
        (lambda r: r.update(prompt_id=None), "no integer prompt_id"),
        (lambda r: r.update(prompt="a:"), "no prompt of characters of"),
        (lambda r: r.update(prompt="1" * 99), "no prompt and response of at most 36 tokens"),
        (lambda r: r.update(reward="1"), "must be real number, not str"),
        (lambda r: r.update(advantage=float("nan")), "no finite numbers"),
        (lambda r: r.update({name: [] for name in PER_TOKEN}), "no response of at least one"),
        (lambda r: r["response_tokens"].__setitem__(0, 16), "no response tokens from 0 to 15"),
        (lambda r: r.update(response="="), "its tokens decode to '.*'"),
        (lambda r: r["mask"].__setitem__(0, 0.5), "no mask of 0 and 1"),
        (lambda r: r["mask"].__setitem__(0, -1), "no mask of 0 and 1"),
        (lambda r: r["mask"].pop(), "no mask and log-probabilities of one entry per token"),
    ],
)
def test_a_malformed_line_of_the_rollouts_is_named(monkeypatch, tmp_path, spoil, words):
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    import rollouts

    first, second = (EXAMPLE / "data" / "rollouts.jsonl").read_text().splitlines()[:2]
    record = json.loads(second)
    spoil(record)
    file = tmp_path / "bad.jsonl"
    file.write_text(f"{first}\n{json.dumps(record)}\n")
    with pytest.raises(rollouts.RolloutFileError, match=f"bad.jsonl, line 2: .*{words}.*--record"):
        rollouts.read_rollouts(file)


def test_a_checkpoint_of_another_layout_is_refused(recorded):
    before = steps_written(recorded / "run")
    flags = ["--output", recorded / "run", "--resume", *SMALL, "--context-parallel-size", 2]
    flags += ["--warmup-steps", 2, "--steps", 4, "--save-interval", 2, "--eval-interval", 2]
    done = run_example(flags)
    assert done.returncode != 0
    printed = done.stdout + done.stderr
    assert "was written at" in printed
    assert "--context-parallel-size 1" in printed
    assert steps_written(recorded / "run") == before
