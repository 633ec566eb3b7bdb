"""What a step costs as ranks grow, and what a lost rank does to the others.

``python -m benchmarks.scale`` runs the same code for up to 1,024 ranks and writes the table of
benchmarks/README.md.
"""

import json

import pytest
from conftest import early, launched, new_folder
from lost_rank_worker import TIMEOUT

from benchmarks.scale_report import NO_IDS, WITH_IDS

pytestmark = pytest.mark.launches

BYTES_PER_RANK, BYTES_PER_SEQUENCE = 96, 16
PROCESSES = 4
BUSY = 0.5
"""Seconds by which a wait may be shorter than the group's timeout."""


def found(check, processes=1):
    out = launched("megatron/scale_worker.py", check, processes=processes)
    return [json.loads(line[5:]) for line in out.splitlines() if line.startswith("FOUND")]


@early
def costs():
    return found("costs")[0]


def of_case(case):
    folder = new_folder()
    launched("loop/lost_rank_worker.py", folder, case, processes=PROCESSES)
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


@early
def silent():
    return of_case("silent")


@early
def lost():
    return of_case("lost")


@pytest.mark.parametrize(
    ("workload", "per_sequence"), [(NO_IDS, 0), (WITH_IDS, BYTES_PER_SEQUENCE)]
)
def test_plan_step_brings_96_bytes_per_rank_and_16_per_sequence_with_prompt_ids(
    costs, workload, per_sequence
):
    for point in costs[workload]:
        expected = BYTES_PER_RANK * point["ranks"] + per_sequence * point["sequences"]
        assert point["plan_step"]["bytes"] == expected
        assert point["plan_step"]["collectives"] == (2 if per_sequence else 1)


def test_beginning_and_finishing_a_step_communicate_nothing(costs):
    for points in costs.values():
        for point in points:
            for call in ("begin", "finish"):
                assert (point[call]["collectives"], point[call]["bytes"]) == (0, 0)


def test_every_rank_is_padded_to_the_sequences_of_the_one_that_has_most():
    received = found("ragged", processes=2)
    assert received == 2 * [2 * (BYTES_PER_RANK + 100 * BYTES_PER_SEQUENCE)]


def test_ranks_in_threads_that_plan_another_step_than_one_process_are_found():
    found("other_sequences")


def test_a_rank_that_ends_makes_the_others_raise_in_plan_step_at_once(lost):
    assert list(lost) == ["0", "2", "3"]
    for rank in lost.values():
        assert "peer" in rank["error"]
        assert rank["seconds"] < TIMEOUT.total_seconds()


def test_a_rank_that_hangs_makes_the_others_raise_after_the_groups_timeout(silent):
    assert list(silent) == ["0", "2", "3"]
    for rank in silent.values():
        assert rank["seconds"] > TIMEOUT.total_seconds() - BUSY
    # The first that gives up closes its connections to the rest.
    assert any("Timed out" in rank["error"] for rank in silent.values())
