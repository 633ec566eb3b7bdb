"""``launch/ci/multinode.sh``: a verification by a launcher or a Slurm cluster, and the comparison.

The cluster has two nodes on loopback, where Debian's Slurm is installed.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import TESTS
from launching import wait_until
from slurm_cluster import loopback_cluster, missing_programs

pytestmark = pytest.mark.launches

ROOT = TESTS.parent
SCRIPT = ROOT / "launch" / "ci" / "multinode.sh"
GOLDEN = ROOT / "launch" / "ci" / "golden" / "4_ranks.json"
CLUSTER = TESTS / "launch" / "slurm_cluster.py"
ONE_CASE = {"case": "sample_mean", "loss_scaling": "average"}
WORKFLOW = ROOT / ".github" / "workflows" / "multinode.yml"
CPU = "device=cpu backend=gloo hosts=1"
needs_slurm = pytest.mark.skipif(
    bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"
)


@pytest.fixture
def golden(tmp_path):
    """Write a golden file of one case of the real one: a short run."""
    found = json.loads(GOLDEN.read_text())
    found["options"] += [
        "--loss-aggregation",
        ONE_CASE["case"],
        "--loss-scaling",
        ONE_CASE["loss_scaling"],
    ]
    found["cases"] = [case for case in found["cases"] if ONE_CASE.items() <= case.items()]
    file = tmp_path / "golden.json"
    file.write_text(json.dumps(found))
    return file


def ran(golden, folder, *options, launcher=(), **environment):
    return subprocess.run(
        [*launcher, str(SCRIPT), str(golden), str(folder), *options],
        env={**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", "ALLOW": CPU, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_on_this_machine_it_writes_reports_and_log_and_passes(golden, tmp_path):
    summary = tmp_path / "summary.md"
    done = ran(golden, tmp_path / "out", LAUNCHER="torchrun", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 1 of 1 cases as in the golden file, on 4 ranks" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.json",
        "report.md",
        "log.txt",
    }
    compared, reported = summary.read_text().split("**lossagg verify: ")
    assert "PASS: 1 of 1 cases" in compared
    assert f"**lossagg verify: {reported}" == (tmp_path / "out" / "report.md").read_text()


def test_a_rank_that_fails_after_the_report_fails_the_run(golden, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\nif os.environ.get('RANK') == '3':\n    atexit.register(os._exit, 3)\n"
    )
    done = ran(golden, tmp_path / "out", LAUNCHER="torchrun", PYTHONPATH=str(tmp_path))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["passed"]
    assert done.returncode == 1
    assert "FAIL: 0 of 1 cases differ from the golden file; the run differs" in done.stdout
    assert "| the run | exit status | 0 | 1 |" in done.stdout


def test_without_a_gpu_it_fails_where_nobody_asks_for_the_cpu(golden, tmp_path):
    hidden = {"LAUNCHER": "torchrun", "CUDA_VISIBLE_DEVICES": "", "ALLOW": "", "DEVICE": ""}
    done = ran(golden, tmp_path / "out", **hidden)
    assert done.returncode == 1
    assert "DEVICE: got cuda with 0 CUDA devices that torch sees on " in done.stdout


def test_a_wrong_factor_that_is_put_in_fails_through_the_same_script(golden, tmp_path):
    done = ran(golden, tmp_path / "out", LAUNCHER="torchrun", FAULT="over_m")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: the fault over_m is noticed in 1 of 1 cases and named" in done.stdout
    assert "measured factor 0.333333333333 = 1/M" in done.stdout
    assert not json.loads((tmp_path / "out" / "report.json").read_text())["passed"]


def test_a_fault_that_does_not_exist_is_wrong_usage(golden, tmp_path):
    done = ran(golden, tmp_path / "out", LAUNCHER="torchrun", FAULT="no_such_fault")
    assert done.returncode == 2
    assert done.stderr.startswith("FAULT: got no_such_fault, expected the name of a .txt file")


def test_a_run_that_breaks_fails_with_the_end_of_its_log(golden, tmp_path):
    broken = json.loads(golden.read_text())
    broken["options"] = ["--cp", "3"]  # does not divide four ranks
    golden.write_text(json.dumps(broken))
    done = ran(golden, tmp_path / "out", LAUNCHER="torchrun")
    assert done.returncode == 1
    assert "report.json was not written" in done.stdout
    assert "expected a multiple of tp * pp * cp = 3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "launcher", "message"),
    [
        ((), "torchrun", "expected a golden file and a folder"),
        ((GOLDEN, "out"), "other", "expected slurm or torchrun"),
        (("none.json", "out"), "torchrun", "none.json: got"),
        ((GOLDEN, GOLDEN), "torchrun", "File exists"),
        ((GOLDEN, "out", "--gpus-per-node", "8"), "torchrun", "expected no options for sbatch"),
    ],
)
def test_wrong_usage_says_what_was_expected(arguments, launcher, message, tmp_path):
    arguments = [tmp_path / a if a == "out" else a for a in arguments]
    done = subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable, "LAUNCHER": launcher},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert message in done.stderr


@needs_slurm
def test_over_two_slurm_nodes_it_submits_waits_and_compares(golden, tmp_path):
    done = ran(
        golden,
        tmp_path / "out",
        launcher=(sys.executable, str(CLUSTER)),
        NUM_NODES="2",
        PROCESSES_PER_NODE="2",
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 1 of 1 cases as in the golden file, on 4 ranks" in done.stdout
    assert (tmp_path / "out" / "report.md").exists()


@needs_slurm
def test_a_job_that_slurm_refuses_is_said_to_be_in_the_summary(golden, tmp_path):
    launcher = (sys.executable, str(CLUSTER))
    done = ran(golden, tmp_path / "out", "--partition", "nope", launcher=launcher, NUM_NODES="2")
    assert done.returncode == 1
    assert "the job did not start: sbatch ended with status 1" in done.stdout
    assert "sbatch: error: invalid partition specified: nope" in done.stdout


@needs_slurm
def test_a_workflow_that_is_cancelled_leaves_no_job_behind(tmp_path):
    """The step of multinode.yml as GitHub runs it: a cancelled run's signal goes to its shell."""
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["verify"]["steps"]
    (step,) = (step for step in steps if "multinode.sh" in step.get("run", ""))
    given = {"GOLDEN": "4_ranks", "FOLDER": str(tmp_path / "out"), "NUM_NODES": "2"}
    ours = {"SBATCH_OPTIONS": "", "DEVICE": "cpu", "PYTHON": sys.executable}
    (tmp_path / "step.sh").write_text(step["run"])
    log = tmp_path / "step.log"
    with loopback_cluster() as cluster, log.open("w") as out:

        def jobs():
            command = ["squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%j"]
            return subprocess.run(command, env=cluster, capture_output=True, text=True).stdout

        shell = subprocess.Popen(
            ["bash", "-e", tmp_path / "step.sh"],
            cwd=ROOT,
            env={**cluster, **given, **ours},
            stdout=out,
            stderr=subprocess.STDOUT,
            # A shell's background job ignores it, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            wait_until(lambda: "lossagg-ci-" in jobs(), log, seconds=60)
            shell.send_signal(signal.SIGINT)
            wait_until(lambda: not jobs(), log, seconds=60)
            assert shell.wait(timeout=60) == 143
        finally:
            subprocess.run(["scancel", "--me"], env=cluster)
            shell.wait(timeout=60)
