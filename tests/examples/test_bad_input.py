"""Bad input ends the example quickly on every rank, with a clear message, before any step."""

import json
import re
import time

import pytest
from conftest import TESTS, fork_server, launched

TRAIN = TESTS.parent / "examples" / "drgrpo" / "train.py"
DRIVE = TESTS / "examples" / "drive_example.py"
SMALL = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2",
    "--prompts-per-step", "2", "--samples-per-prompt", "2", "--warmup-batch-size", "4",
]  # fmt: skip


def run_example(flags, script=TRAIN, timeout=120, env=None):
    """Run the example on two forked ranks."""
    command = [str(script), *map(str, flags)]
    return fork_server().launch(command, processes=2, timeout=timeout, env=env)


@pytest.fixture(scope="module")
def recorded(launches, tmp_path_factory):
    """Run a small online training at DP 2, with its rollouts and a checkpoint."""
    folder = tmp_path_factory.mktemp("recorded")
    flags = ["--output", folder / "run", "--record", folder / "rollouts.jsonl", *SMALL]
    flags += ["--warmup-steps", 2, "--steps", 2, "--save-interval", 2, "--eval-interval", 2]
    done = run_example(flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


AGGREGATION = "--loss-aggregation"
DIVISOR = "--loss-aggregation-divisor"
PATH = "--loss-aggregation-reducer-path"

# name: flags, then words that the message must have: what was got, expected, what to change.
FLAGS = {
    "an unknown mode": ([AGGREGATION, "token_meen"], ["'token_meen'", "mean 'token_mean'"]),
    "no divisor": ([AGGREGATION, "constant"], ["got none", DIVISOR]),
    "a zero divisor": (
        [AGGREGATION, "constant", DIVISOR, "0"],
        ["got divisor 0.0", "above 0", DIVISOR],
    ),
    "a negative divisor": (
        [AGGREGATION, "constant", DIVISOR, "-4"],
        ["got divisor -4.0", "above 0"],
    ),
    "a NaN divisor": ([AGGREGATION, "constant", DIVISOR, "nan"], ["got divisor nan", "finite"]),
    "an infinite divisor": (
        [AGGREGATION, "constant", DIVISOR, "inf"],
        ["got divisor inf", "finite"],
    ),
    "a divisor too many": ([AGGREGATION, "token_mean", DIVISOR, "4"], ["takes no divisor", "drop"]),
    "a divisor alone": ([DIVISOR, "4"], ["without --loss-aggregation", "name the mode"]),
    "a path and a mode": ([PATH, "a.b:c", AGGREGATION, "token_mean"], ["replaces the mode"]),
    "a prompt mean's alias contradicted": (
        [AGGREGATION, "openrlhf:token_level_loss=False", "--loss-aggregation-count-empty"],
        ["count_empty=False", "drop it"],
    ),
}
PATHS = {
    "a path to no module": ([PATH, "no_such_module:f"], ["no_such_module", "pkg.mod:name"]),
    "a path to a value that is not callable": (
        [PATH, "drive_example:NOTHING"],
        ["None", "not callable"],
    ),
    "a factory that returns no callable": (
        [PATH, "drive_example:no_callable"],
        ["returned None", "callable"],
    ),
    "a partial loss that is not a scalar": (
        [PATH, "drive_example:not_a_scalar"],
        ["returned a", "0-dim"],
    ),
}
FAULTS = {
    "another_divisor_on_rank_1": ["rank 0 has", "rank 1 has", "same flags"],
    "loss_scaling_flipped_after_wrapping": ["frozen", "--calculate-per-token-loss"],
    "sequences_left_out": [
        "was planned with 2 sequences, got 1 without 0",
        "pass all of its sequences",
    ],
}


def check_refused(done, seconds, output, words):
    """Assert that every rank failed in time, that nothing was trained, and the message's words."""
    assert done.returncode != 0
    assert seconds < 60
    exit_codes = re.findall(r"exitcode\s*: (-?\d+)", done.stderr)
    assert len(exit_codes) >= 2, done.stderr
    assert "0" not in exit_codes
    assert not steps_written(output)
    printed = done.stdout + done.stderr
    for word in words:
        assert word in printed, printed[-3000:]


def steps_written(output):
    metrics = output / "metrics.jsonl"
    return metrics.read_text().splitlines() if metrics.exists() else []


@pytest.fixture(scope="module")
def refused(launches, tmp_path_factory):
    """Return the message that the example's flag parsing refuses each of ``FLAGS`` with."""
    file = tmp_path_factory.mktemp("flags") / "flags.json"
    file.write_text(json.dumps({name: flags for name, (flags, _) in FLAGS.items()}))
    return json.loads(
        launched("examples/drive_example.py", "flags_are_read", "--", file, processes=1)
    )


@pytest.mark.parametrize("name", FLAGS)
def test_flags(refused, name):
    _, words = FLAGS[name]
    for word in words:
        assert word in refused[name]


def test_refused_flags_end_the_launch_on_every_rank(recorded, tmp_path):
    flags, words = FLAGS["no divisor"]
    start = time.monotonic()
    done = run_example([*replay(recorded / "rollouts.jsonl", tmp_path), *flags])
    check_refused(done, time.monotonic() - start, tmp_path / "run", words)


@pytest.fixture(scope="module")
def refused_runs(recorded, tmp_path_factory):
    """Run ``PATHS`` and ``SPOILED`` one after the other; what each rank raised, and the folders."""
    folder = tmp_path_factory.mktemp("refused")
    runs = {
        name: [*replay(recorded / "rollouts.jsonl", folder / name), *flags]
        for name, (flags, _) in PATHS.items()
    }
    lines = (recorded / "rollouts.jsonl").read_text().splitlines()
    for spoil in SPOILED:
        bad = folder / f"{spoil.__name__}.jsonl"
        bad.write_text("\n".join(spoil(lines)[0]) + "\n")
        runs[spoil.__name__] = replay(bad, folder / spoil.__name__)
    file = folder / "runs.json"
    file.write_text(json.dumps({name: list(map(str, flags)) for name, flags in runs.items()}))
    done = run_example(["runs_are_refused", "--", file], script=DRIVE)
    assert done.returncode == 0, done.stdout + done.stderr
    raised = [json.loads(line) for line in re.findall(r"^REFUSED (.*)$", done.stdout, re.M)]
    return folder, {name: [words for n, words in raised if n == name] for name in runs}


def check_every_rank_refused(refused_runs, name, words):
    """Assert that both ranks raised with the words, and that nothing was trained."""
    folder, raised = refused_runs
    assert len(raised[name]) == 2
    for message in raised[name]:
        for word in words:
            assert word in message
    assert not steps_written(folder / name / "run")


@pytest.mark.parametrize("name", PATHS)
def test_a_path_to_no_reducer_ends_the_run(refused_runs, name):
    check_every_rank_refused(refused_runs, name, PATHS[name][1])


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_beyond_the_flags_end_the_run(recorded, tmp_path, fault):
    flags = [*replay(recorded / "rollouts.jsonl", tmp_path), AGGREGATION, "constant", DIVISOR, "8"]
    start = time.monotonic()
    done = run_example([fault, "--", *flags], script=DRIVE)
    check_refused(done, time.monotonic() - start, tmp_path / "run", FAULTS[fault])


def test_a_rank_that_dies_in_a_step_ends_the_others(recorded, tmp_path):
    """Within seconds of the death, as under the launcher (``test_faults.py``)."""
    flags = replay(recorded / "rollouts.jsonl", tmp_path)
    done = run_example(["rank_1_dies", "--", *flags], script=DRIVE)
    (died,) = re.findall(r"rank 1 dies at (\S+)", done.stdout)
    check_refused(done, time.time() - float(died), tmp_path / "run", ["Signal 9"])


def truncated(lines):
    return [*lines[:1], lines[1][: len(lines[1]) // 2], *lines[2:]], 2, "expected one JSON object"


def field_missing(lines):
    record = json.loads(lines[2])
    del record["advantage"]
    return [*lines[:2], json.dumps(record), *lines[3:]], 3, "without ['advantage']"


def mask_of_a_half(lines):
    record = json.loads(lines[0])
    record["mask"][0] = 0.5
    return [json.dumps(record), *lines[1:]], 1, "mask"


def mask_of_minus_one(lines):
    record = json.loads(lines[0])
    record["mask"][0] = -1
    return [json.dumps(record), *lines[1:]], 1, "mask holds -1, expected 0 or 1"


def mask_too_short(lines):
    record = json.loads(lines[1])
    record["mask"].pop()
    return [lines[0], json.dumps(record), *lines[2:]], 2, "give one per token"


SPOILED = [truncated, field_missing, mask_of_a_half, mask_of_minus_one, mask_too_short]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_malformed_line_of_the_rollouts_is_named(refused_runs, recorded, spoil):
    _, number, words = spoil((recorded / "rollouts.jsonl").read_text().splitlines())
    where = f"{spoil.__name__}.jsonl, line {number}:"
    check_every_rank_refused(refused_runs, spoil.__name__, [where, words, "--record"])


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


def replay(rollouts, folder):
    return ["--mode", "replay", "--rollouts", rollouts, "--output", folder / "run", *SMALL]
