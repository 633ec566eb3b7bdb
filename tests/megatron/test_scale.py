"""What a step costs as ranks grow, and what a lost rank does to the others.

``python -m benchmarks.scale`` runs the same code for up to 1,024 ranks and writes the table of
benchmarks/README.md.
"""

import pytest
from conftest import early, launched, new_folder
from ranks import rows_of

from benchmarks.scale_report import NO_IDS, WITH_IDS

pytestmark = pytest.mark.launches

BYTES_PER_RANK, BYTES_PER_SEQUENCE = 96, 16
PROCESSES = 4
BUSY = 0.5
"""Seconds by which a wait may be shorter than the group's timeout."""


TIMEOUT = 5
"""Of the group, in seconds; ``scale_worker.py`` sets it."""


def found(*arguments, processes=1):
    return rows_of(launched("megatron/scale_worker.py", *arguments, processes=processes))


@early
def costs():
    (row,) = found("costs")
    return row


@early
def silent():
    return found("silent", new_folder(), processes=PROCESSES)


@early
def lost():
    return found("lost", new_folder(), processes=PROCESSES)


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
    assert [of["rank"] for of in lost] == [0, 2, 3]
    for of in lost:
        assert "peer" in of["error"]
        assert of["seconds"] < TIMEOUT


def test_a_rank_that_hangs_makes_the_others_raise_after_the_groups_timeout(silent):
    assert [of["rank"] for of in silent] == [0, 2, 3]
    for of in silent:
        assert of["seconds"] > TIMEOUT - BUSY
    # The first that gives up closes its connections to the rest.
    assert any("Timed out" in of["error"] for of in silent)
