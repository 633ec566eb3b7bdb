"""What a step costs as ranks grow, and what a late or a lost rank does to the others.

Ranks are threads of one process (``benchmarks/in_process.py``) or processes on gloo
(``benchmarks/late_rank.py``); ``python -m benchmarks.scale`` runs the same code up to 1,024 and
16,384 ranks and writes the tables of docs/performance.md.
"""

import json

import pytest
from conftest import early, launched, launched_module, new_folder

from benchmarks.late_rank import FAULTY_RANK, FAULTY_STEP, LATE, STEPS, TIMEOUT
from benchmarks.scale_report import NO_IDS, WITH_IDS

BYTES_PER_RANK, BYTES_PER_SEQUENCE = 80, 40
PROCESSES = 4
BUSY = 0.5
"""Seconds that a call may take on a busy machine, where it waits for nobody; below LATE."""


def found(check):
    out = launched("megatron/scale_worker.py", check, processes=1)
    return json.loads(next(line for line in out.splitlines() if line.startswith("FOUND"))[5:])


@early
def costs():
    return found("costs")


def of_case(case):
    file = new_folder() / "found.json"
    launched_module("benchmarks.late_rank", file, case, processes=PROCESSES)
    return json.loads(file.read_text())


@early
def late():
    return of_case("late")


@early
def silent():
    return of_case("silent")


@early
def lost():
    return of_case("lost")


@early
def lost_after():
    return of_case("lost-after")


@pytest.mark.parametrize("side", ["threads", "alone"])
@pytest.mark.parametrize(
    ("workload", "per_sequence"), [(NO_IDS, 0), (WITH_IDS, BYTES_PER_SEQUENCE)]
)
def test_plan_step_brings_80_bytes_per_rank_and_40_per_sequence_with_ids(
    costs, side, workload, per_sequence
):
    for point in costs[workload][side]:
        expected = BYTES_PER_RANK * point["ranks"] + per_sequence * point["sequences"]
        assert point["plan_step"]["bytes"] == expected
        assert point["plan_step"]["collectives"] == (2 if per_sequence else 1)


def test_beginning_and_finishing_a_step_communicate_nothing(costs):
    for workload in costs.values():
        for point in workload["threads"]:
            for call in ("step", "finish"):
                assert (point[call]["collectives"], point[call]["bytes"]) == (0, 0)


def test_every_rank_is_padded_to_the_sequences_of_the_one_that_has_most():
    assert set(found("ragged")) == {8 * (BYTES_PER_RANK + 100 * BYTES_PER_SEQUENCE)}


def test_threads_raise_a_plans_error_on_all_ranks_and_any_other_error_once():
    messages = found("faults")
    assert len(set(messages)) == 1
    assert "disagree" in messages[0]


def test_a_late_rank_delays_that_plan_step_by_its_lateness_and_nothing_else(late):
    assert [rank["rank"] for rank in late] == list(range(PROCESSES))
    for rank in late:
        assert len(rank["steps"]) == STEPS
        for number, step in enumerate(rank["steps"]):
            waits = number == FAULTY_STEP and rank["rank"] != FAULTY_RANK
            # The late rank may leave the barrier before them.
            assert step["plan_step"] > LATE - BUSY / 2 if waits else step["plan_step"] < BUSY
            assert step["plan_step"] < LATE + BUSY
            assert step["step"] + step["finish"] < BUSY


def test_a_rank_that_ends_makes_the_others_raise_in_plan_step_at_once(lost):
    assert [rank["rank"] for rank in lost] == [0, 2, 3]
    for rank in lost:
        assert len(rank["steps"]) == FAULTY_STEP
        assert "peer" in rank["error"]
        assert rank["seconds_to_error"] < TIMEOUT.total_seconds()


def test_a_rank_that_hangs_makes_the_others_raise_after_the_groups_timeout(silent):
    assert [rank["rank"] for rank in silent] == [0, 2, 3]
    for rank in silent:
        assert len(rank["steps"]) == FAULTY_STEP
        assert rank["seconds_to_error"] > TIMEOUT.total_seconds() - BUSY
    # The first that gives up closes its connections to the rest.
    assert any("Timed out" in rank["error"] for rank in silent)


def test_a_rank_that_is_lost_after_planning_is_missed_by_the_next_plan_step(lost_after):
    for rank in lost_after:
        assert len(rank["steps"]) == FAULTY_STEP + 1  # its own step was finished
        assert rank["error"]
