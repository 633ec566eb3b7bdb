"""The workflows in ``.github/``: what they may do on your machines."""

import re
import shutil
import subprocess

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


def test_slurm_and_ray_are_installed_where_the_launch_scripts_are_tested():
    jobs = WORKFLOWS["check"]["jobs"]
    assert jobs["launch"]["steps"][-1]["run"] == ".ci/launch"
    matrix = jobs["check"]["strategy"]["matrix"]
    targets = [*matrix["target"], *(one["target"] for one in matrix["include"])]
    assert "test-launch" not in targets  # it would skip most of them, green
    for job in jobs.values():
        (python,) = (step for step in job["steps"] if "setup-python" in step.get("uses", ""))
        assert python["with"]["cache"] == "pip"


def test_at_night_a_golden_file_and_a_control_run_on_gpus_where_there_is_a_cluster():
    workflow = WORKFLOWS["multinode"]
    triggers = workflow[True]  # YAML 1.1 reads `on` so
    assert triggers["schedule"]
    job = workflow["jobs"]["verify"]
    assert "vars.SLURM_RUNNER" in job["if"]
    assert job["concurrency"]["cancel-in-progress"] is False
    assert [bool(fault) for fault in job["strategy"]["matrix"]["fault"]] == [False, True]
    (step,) = (step for step in job["steps"] if "multinode.sh" in step.get("run", ""))
    assert step["env"]["DEVICE"] == "cuda"
    assert step["env"]["ALLOW"] == ""
    files = {file.stem for file in (ROOT / "launch" / "ci" / "golden").glob("*.json")}
    assert set(triggers["workflow_dispatch"]["inputs"]["golden"]["options"]) == files
    assert set(re.findall(r'"(\d\w+)"', job["strategy"]["matrix"]["golden"])) <= files


@pytest.mark.launches
@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_passes():
    done = subprocess.run(["actionlint", "-no-color"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_label_that_starts_no_run_ends_none_that_waits():
    """Of the whole workflow, a group is taken before the job's condition is looked at."""
    assert "concurrency" not in WORKFLOWS["gpu"]
    assert WORKFLOWS["gpu"]["jobs"]["gpu"]["concurrency"]["cancel-in-progress"] is False
