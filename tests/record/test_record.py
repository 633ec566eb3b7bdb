"""A step's record is equal at any parallelism and after a resume; a shadow changes nothing.

Each ``check_`` of ``record_worker.py`` is a test by its name; its files are compared here.
"""

import itertools
import json
from pathlib import Path

import pytest
from check_runner import assert_passed, checks_of
from conftest import early, ended, new_folder
from step_record import DIFFERENT, SAME

from megatron_lossagg.cli.main import main
from megatron_lossagg.record.step_record import read_record

WORKER = Path(__file__).parent / "record_worker.py"
LAYOUTS = ("DP1", "DP2", "CP2", "PP2")
FILES = (
    *("loop-sample_mean", "loop-prompt_mean", "loop-length_power", "loop-weights"),
    "hook-sample_mean",
)


@early
def records_of_one_rank():
    folder = new_folder()
    return folder, ended("record/record_worker.py", folder, processes=1)


@early
def records_of_two_ranks():
    folder = new_folder()
    return folder, ended("record/record_worker.py", folder, processes=2)


@pytest.fixture(scope="module")
def record(records_of_one_rank, records_of_two_ranks):
    """Return a function from a layout and a file's name to its path."""

    def path(layout, name):
        folder, _ = records_of_one_rank if layout == "DP1" else records_of_two_ranks
        return folder / f"{layout}-{name}.jsonl"

    return path


@pytest.fixture
def diff(record, capsys):
    def compared(first, second):
        status = main(["diff", str(record(*first)), str(record(*second))])
        return status, "".join(capsys.readouterr()).strip()

    return compared


@pytest.mark.parametrize("check", checks_of(WORKER))
def test_on_live_megatron(records_of_one_rank, records_of_two_ranks, check):
    for _, done in (records_of_one_rank, records_of_two_ranks):
        assert_passed(check, done)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_one_hash_at_any_parallelism(diff, record, layout, name):
    status, line = diff(("DP1", name), (layout, name))
    assert status == 0, line
    assert line.startswith(f"{SAME} in 6 steps (steps 1 to 6 at DP 1 CP 1")
    steps = read_record(record(layout, name)).values()
    hashes = [step.weights for step in steps]
    assert len(set(hashes[:3])) == len(set(hashes[3:])) == 1
    assert hashes[0] != hashes[3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_line_says_what_was_trained_and_how(record, layout):
    first = read_record(record(layout, "loop-sample_mean"))[1]
    assert (first.data_parallel_size, first.context_parallel_size) == {
        "DP2": (2, 1),
        "CP2": (1, 2),
    }.get(layout, (1, 1))
    assert first.k == (
        first.num_microbatches * first.data_parallel_size * first.context_parallel_size
    )
    alone = read_record(record("DP1", "loop-sample_mean"))[1]
    assert first.weight_sum == pytest.approx(alone.weight_sum, rel=1e-14)
    assert first.weight_sum < first.weight_expected  # the batch rejects tokens
    assert (first.samples, first.prompts) == (12, 4)
    assert first.counted == alone.counted
    assert first.counted == {
        "active_tokens": first.active_tokens,
        "sequences": 14,
        "empty_sequences": 4,
        "samples": 12,
        "empty_samples": 4,
        "prompts": 4,
        "empty_prompts": 1,
        "groups": 8,
        "empty_groups": 2,  # those of the masked prompt
    }


def test_what_the_denominators_count_is_part_of_the_loss(diff, record):
    status, line = diff(("CP2", "loop-sample_mean"), ("CP2", "loop-weights"))
    assert status == 1
    assert "count mask and weights" in line
    masked, weighed = (
        read_record(record("DP1", f"loop-{name}"))[1] for name in ("sample_mean", "weights")
    )
    assert masked.weights != weighed.weights
    assert weighed.weight_expected == 1  # without empty samples


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_killed_and_resumed_trained_the_same_loss(diff, record, layout):
    lines = record(layout, "resumed").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [1, 2, 3, 4, 3, 4, 5, 6]
    status, line = diff((layout, "resumed"), ("DP1", "resumed"))
    assert (status, line.partition(" (")[0]) == (0, f"{SAME} in 6 steps")


@pytest.mark.parametrize(("one", "other"), list(itertools.pairwise(LAYOUTS)))
def test_a_wrong_mode_and_one_other_sequence_are_named_with_their_step(diff, one, other):
    status, line = diff((one, "resumed"), (other, "wrong"))
    assert status == 1
    assert line.startswith(f"{SAME} in 2 steps, then {DIFFERENT} from step 3 on: mode sample")
    status, line = diff((one, "resumed"), (other, "loop-sample_mean"))
    assert status == 1
    assert line == (
        f"{SAME} in 3 steps, then {DIFFERENT} from step 4 on: the weights of sequences differ, "
        "mode and counts do not"
    )
