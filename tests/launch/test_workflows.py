"""The workflows in ``.github/``: what they may do on your machines."""

import re
import shutil
import subprocess

import pytest
from launching import ROOT

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
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


JOBS = [
    pytest.param(job, id=f"{name}-{key}")
    for name, workflow in WORKFLOWS.items()
    for key, job in workflow["jobs"].items()
]


@pytest.mark.parametrize("job", JOBS)
def test_a_checkout_leaves_no_token_for_what_is_checked(job):
    checkouts = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
    assert checkouts or "needs" in job  # else it takes what another job has built
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_each_golden_file_can_be_chosen_and_those_of_the_night_are_there():
    workflow = WORKFLOWS["multinode"]
    inputs = workflow[True]["workflow_dispatch"]["inputs"]  # YAML 1.1 reads `on` so
    files = {file.stem for file in (ROOT / "launch" / "ci" / "golden").glob("*.json")}
    assert set(inputs["golden"]["options"]) == files
    matrix = workflow["jobs"]["verify"]["strategy"]["matrix"]
    assert set(re.findall(r'"(\d\w+)"', matrix["golden"])) <= files


@pytest.mark.launches
@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_passes():
    done = subprocess.run(["actionlint", "-no-color"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
