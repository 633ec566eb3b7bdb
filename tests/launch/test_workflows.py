"""The workflows in ``.github/``: what they may do on your machines."""

import pytest
import yaml
from launching import ROOT

WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text())
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
SELF_HOSTED = [
    (name, job)
    for name, workflow in WORKFLOWS.items()
    for job in workflow["jobs"].values()
    if "self-hosted" in job["runs-on"]
]


def test_the_runners_of_gpu_and_multinode_are_yours():
    assert [name for name, _ in SELF_HOSTED] == ["gpu", "multinode"]


@pytest.mark.parametrize(("name", "job"), SELF_HOSTED, ids=[name for name, _ in SELF_HOSTED])
def test_a_checkout_leaves_no_token_on_a_machine_of_yours(name, job):
    checkouts = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False]


def test_a_label_that_starts_no_run_ends_none_that_waits():
    """Of the whole workflow, a group is taken before the job's condition is looked at."""
    assert "concurrency" not in WORKFLOWS["gpu"]
    assert WORKFLOWS["gpu"]["jobs"]["gpu"]["concurrency"]["cancel-in-progress"] is False
