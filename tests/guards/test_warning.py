"""Each fault of a running step trains on under ``guards="warn"``, and is warned of once."""

from conftest import early, launched


@early
def told():
    return launched("guards/warning_worker.py", processes=2).splitlines()


def test_a_fault_that_a_guard_finds_is_warned_of_and_trained(told, launches):
    assert not [line for line in told if line.startswith("FAILED")]
    assert sum(line.startswith("PASSED") for line in told) > 35
