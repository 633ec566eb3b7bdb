"""Two records, one line: the same loss, or from which step on another one."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from step_record import DIFFERENT, SAME, STEP

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.cli.main import main
from megatron_lossagg.record.step_record import COMPARED, RecordError, hash_weights, read_record

OTHER = {
    "k": 16,
    "num_microbatches": 8,
    "data_parallel_size": 1,
    "context_parallel_size": 2,
    "loss_scaling": "per_token",
    "weight_sum": 0.5,
    "weight_expected": 0.5,
    "version": "0.2.0",
    "coefficients": [0.5],
    "counted": {"sequences": 7},
    "ratios": [0.5, 2.0],
    "warned": ["Finalized"],
}
"""Values that may differ between runs that train the same loss."""


@pytest.fixture
def diff(tmp_path, capsys):
    """Write two records, compare them, and return status and line."""

    def compared(first, second):
        paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        for path, steps in zip(paths, (first, second), strict=True):
            path.write_text("".join(step.line() for step in steps))
        status = main(["diff", *map(str, paths)])
        return status, "".join(capsys.readouterr()).strip()

    return compared


def run_of(steps, **changes):
    return [replace(STEP, step=step, **changes) for step in steps]


def test_runs_that_differ_in_parallelism_only_trained_the_same_loss(diff):
    status, line = diff(run_of(range(1, 6)), run_of(range(1, 6), **OTHER))
    assert status == 0
    assert line == (f"{SAME} in 5 steps (steps 1 to 5 at DP 2 CP 1 and steps 1 to 5 at DP 1 CP 2)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "token_mean", "weights": "01"}, "mode sample_mean and token_mean"),
        ({"divisor": 40.0}, "divisor None and 40.0"),
        ({"exponent": 0.5, "weights": "01"}, "exponent None and 0.5"),
        ({"count_empty": False}, "count_empty True and False"),
        ({"count": "weights"}, "count mask and weights"),
        ({"active_tokens": 999, "weights": "01"}, "N 1000 and 999"),
        ({"samples": 15}, "B 16 and 15"),
        ({"prompts": 4}, "P None and 4"),
        ({"weights": "01"}, "the weights of sequences differ, mode and counts do not"),
    ],
)
def test_the_first_step_that_differs_is_named_with_what_differs(diff, change, words):
    first = run_of(range(1, 6))
    second = [*run_of(range(1, 4)), *run_of(range(4, 6), **change)]
    status, line = diff(first, second)
    assert status == 1
    assert line == f"{SAME} in 3 steps, then {DIFFERENT} from step 4 on: {words}"
    other = run_of(range(1, 6), **change)
    assert diff(first, other)[1].startswith(f"{DIFFERENT} from step 1 on")


def test_every_field_of_a_step_is_compared_or_may_differ():
    assert {*COMPARED} | {*OTHER} | {"step"} == {field.name for field in fields(STEP)}


def test_steps_of_a_custom_reducer_are_not_called_the_same(diff):
    custom = {"mode": "custom", "weights": "", "weight_sum": None, "weight_expected": None}
    first = run_of(range(1, 6))
    second = [*run_of(range(1, 4)), *run_of(range(4, 6), **custom)]
    status, line = diff(second, second)
    assert status == 2
    assert "a custom reducer in step 4" in line
    assert SAME not in line
    assert diff(first, second)[0] == 1
    assert diff(second, run_of(range(1, 4)))[0] == 3


def test_a_resumed_run_is_compared_by_the_number_of_the_step_and_its_last_line_counts(diff):
    resumed = [*run_of([1, 2]), *run_of([3], weights="01"), *run_of([3, 4])]
    assert diff(run_of(range(1, 5)), resumed)[0] == 0


def test_a_record_that_ends_early_is_named_and_has_a_status_of_its_own(diff, tmp_path):
    long, short = run_of(range(1, 17)), run_of(range(1, 11), **OTHER)
    for pair, name in (((long, short), "b"), ((short, long), "a")):
        status, line = diff(*pair)
        other = {"a": "b", "b": "a"}[name]
        assert status == 3
        assert line.startswith(f"{SAME} in 10 steps (")
        ends = f"; {tmp_path / name}.jsonl ends at step 10, {tmp_path / other}.jsonl at step 16"
        assert line.endswith(ends)
    assert diff(long, run_of(range(1, 11), weights="01"))[0] == 1  # a difference is said first
    assert diff(long, run_of(range(11, 17)))[0] == 0  # resumed into a new file


def test_runs_without_a_common_step_are_wrong_usage(diff):
    status, line = diff(run_of([1, 2]), run_of([3]))
    assert status == 2
    assert "(steps 1 to 2)" in line
    assert "(steps 3 to 3)" in line
    assert "have no step in common" in line
    assert diff([], [])[0] == 2


def test_a_line_that_was_cut_off_is_left_out_and_what_is_no_step_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(STEP.line() + replace(STEP, step=2).line()[:-20])
    assert read_record(path) == {1: STEP}
    for line in ("not JSON\n", "[1]\n", "{}\n", json.dumps({"step": 1}) + "\n"):
        path.write_text(STEP.line() + line)
        with pytest.raises(RecordError, match="line 2: expected one line of JSON for each step"):
            read_record(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "none.jsonl")


LENGTHS = np.array([3, 1, 0, 40, 7, 7, 0, 12])


def test_the_hash_of_a_count_is_splitmix64s_first_number_for_it():
    """Records of all releases can be compared as long as it is."""
    assert hash_weights(np.array([1234567])) == 6457827717110365317  # published for this seed


@pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
def test_the_hash_of_a_step_depends_on_neither_order_nor_rank(mode):
    plan = plan_step(Aggregation(mode), Sequences(active_tokens=LENGTHS))
    weights = np.asarray(plan.weights)
    whole = hash_weights(LENGTHS, weights)
    order = np.array([5, 0, 7, 3, 2, 6, 1, 4])
    assert hash_weights(LENGTHS[order], weights[order]) == whole
    parts = [hash_weights(LENGTHS[part::3], weights[part::3]) for part in range(3)]
    assert sum(parts) % 2**64 == whole


def test_the_hash_sees_one_weights_last_bit_a_count_and_a_sequence_that_occurs_twice():
    weights = np.full(8, 0.125)
    whole = hash_weights(LENGTHS, weights)
    changed = weights.copy()
    changed[3] = np.nextafter(changed[3], 1)
    moved = LENGTHS.copy()
    moved[[0, 1]] += [1, -1]
    twice = np.append(LENGTHS, 3)
    hashes = {
        whole,
        hash_weights(LENGTHS, changed),
        hash_weights(moved, weights),
        hash_weights(twice, np.full(9, 0.125)),
    }
    assert len(hashes) == 4
    changed = weights.copy()
    changed[2] = 7.0  # of a sequence that trains nothing
    assert hash_weights(LENGTHS, changed) == whole


def test_a_line_that_is_nested_too_deeply_is_no_step(tmp_path, capsys):
    right, deep = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    right.write_text(STEP.line())
    deep.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    assert main(["diff", str(right), str(deep)]) == 2
    assert "b.jsonl, line 1: expected one line of JSON" in capsys.readouterr().err
