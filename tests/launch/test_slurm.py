"""``launch/slurm.sbatch`` on a Slurm cluster of two nodes that this file starts on loopback."""

import re
import subprocess
import time

import pytest
from launching import (
    EXAMPLE,
    LAUNCH,
    PASSED,
    ROOT,
    SMALL_EXAMPLE,
    STEPS,
    TIMEOUT,
    VERIFY_ONE_CASE,
    environment,
    metrics_without_time,
    on_two_nodes,
)
from slurm_cluster import loopback_cluster, missing_programs

pytestmark = pytest.mark.skipif(
    bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"
)


@pytest.fixture(scope="module")
def cluster():
    """Return the environment in which Slurm's commands reach two idle nodes."""
    with loopback_cluster() as reached:
        yield environment(
            PROCESSES_PER_NODE="1", PATH=reached["PATH"], SLURM_CONF=reached["SLURM_CONF"]
        )


def slurm(cluster, *command, folder=None, **more):
    """Run a command of Slurm; return what it printed."""
    done = subprocess.run(
        list(map(str, command)),
        env={**cluster, **more},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(cluster, arguments, *, folder, **more):
    """Submit slurm.sbatch for two nodes; return the job's number and its log."""
    script = LAUNCH / "slurm.sbatch"
    printed = slurm(
        cluster, "sbatch", "--parsable", "--nodes", 2, script, *arguments, folder=folder, **more
    )
    job = printed.strip()
    return job, folder / f"lossagg-{job}.out"


def wait_until(condition, log, seconds=TIMEOUT):
    """Wait for something that a job does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.2)


def state(cluster, job):
    """Return a job's state."""
    (word,) = re.findall(r"JobState=(\w+)", slurm(cluster, "scontrol", "show", "job", job))
    return word


def has_ended(cluster, job):
    """Whether a job has ended for good."""
    return state(cluster, job) in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


def test_the_command_of_the_readme_verifies_over_two_nodes(cluster, tmp_path):
    """As it stands there, in a checkout beside this one; one case instead of all."""
    (checkout := tmp_path / "Megatron-LM").mkdir()
    (tmp_path / "megatron_lossagg").symlink_to(ROOT)
    lines = (LAUNCH / "README.md").read_text().splitlines()
    third = next(line.split() for line in lines if line.strip().startswith("sbatch "))
    less = VERIFY_ONE_CASE[VERIFY_ONE_CASE.index("--loss-aggregation") :]
    job = slurm(cluster, *third, *less, folder=checkout).split()[-1]
    log = checkout / f"lossagg-{job}.out"
    wait_until(lambda: has_ended(cluster, job), log)
    output = log.read_text()
    assert state(cluster, job) == "COMPLETED", output
    assert "start 0: node0 node1, rank 0 at 127.0.0.1:" in output
    assert re.findall(r"^(\d): PASS", output, re.MULTILINE) == ["0"], output
    assert PASSED in output
    assert (checkout / "report.html").exists()


def test_a_killed_job_is_requeued_and_resumes_to_byte_equal_metrics(cluster, tmp_path):
    """Killed twice: the whole step by scancel, then the ranks of one node alone."""
    never_killed, killed = tmp_path / "never_killed", tmp_path / "killed"
    flags = [EXAMPLE, *SMALL_EXAMPLE, "--resume"]
    for status, output in on_two_nodes([*flags, "--output", never_killed], folder=tmp_path):
        assert status == 0, output
    expected = metrics_without_time(never_killed)
    assert len(expected) == STEPS

    job, log = submit(cluster, [*flags, "--output", killed], folder=tmp_path, MAX_REQUEUES="2")
    metrics, before = killed / "metrics.jsonl", []
    kills = {
        15: lambda: slurm(cluster, "scancel", "--signal=KILL", f"{job}.0"),
        35: lambda: kill_ranks(cluster, job, "node1"),
    }
    for num_lines, kill in kills.items():
        wait_until(lambda n=num_lines: metrics.exists() and len(lines_of(metrics)) > n, log)
        kill()
        wait_until(lambda: log.read_text().count("and is requeued") > len(before), log)
        before.append(lines_of(metrics))
        assert len(before[-1]) < len(expected), "the kill came too late"
    wait_until(lambda: has_ended(cluster, job), log)
    output = log.read_text()
    assert state(cluster, job) == "COMPLETED", output
    assert [f"start {n}:" in output for n in range(4)] == [True, True, True, False]
    assert metrics_without_time(killed) == expected
    # Resumed, not begun anew: the steps before the last checkpoint were not taken again.
    assert lines_of(metrics)[:30] == before[1][:30]
    assert before[1][:10] == before[0][:10]


def lines_of(file):
    """Read a file's lines."""
    return file.read_text().splitlines()


def kill_ranks(cluster, job, node):
    """Kill every process of the job's step on one node."""
    printed = slurm(cluster, "scontrol", "listpids", f"{job}.0", node)
    pids = [line.split()[0] for line in printed.splitlines()[1:]]
    assert len(pids) > 1, printed
    slurm(cluster, "kill", "-KILL", *pids)
