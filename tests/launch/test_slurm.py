"""``launch/slurm.sbatch`` on a Slurm cluster of two nodes that this file starts on loopback."""

import re
import subprocess

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
    wait_until,
)
from slurm_cluster import MEMORY, loopback_cluster, missing_programs

pytestmark = pytest.mark.skipif(
    bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"
)


@pytest.fixture(scope="module")
def cluster(launches):
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


def submit(cluster, arguments, *, folder, script=LAUNCH / "slurm.sbatch", options=(), **more):
    """Submit slurm.sbatch for two nodes; return the job's number and its log."""
    command = ["sbatch", "--parsable", "--nodes", 2, *options, script, *arguments]
    job = slurm(cluster, *command, folder=folder, **more).strip()
    return job, folder / f"lossagg-{job}.out"


def ended(cluster, arguments, *, folder, **more):
    """Submit slurm.sbatch and wait for its end; return the job's description and its log."""
    job, log = submit(cluster, arguments, folder=folder, **more)
    wait_until(lambda: has_ended(cluster, job), log)
    return slurm(cluster, "scontrol", "show", "job", job), log.read_text()


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
    lines = (LAUNCH / "README.md").read_text().replace("\\\n", " ").splitlines()
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
    assert (checkout / "report.md").exists()


AGENTS = re.compile(r"^\d: .*/launch/agent.py .*--node-rank (\d) .* (.*)$", re.MULTILINE)
"""What a node prints where PYTHON=echo: the command that it would run."""


def assert_ran_on_both_nodes(output, argument):
    assert sorted(AGENTS.findall(output)) == [("0", argument), ("1", argument)], output


@pytest.mark.parametrize("where", ["my code/launch/slurm.sbatch", "link/job.sh"])
def test_torchrun_sh_is_found_beside_the_script_that_was_submitted(cluster, tmp_path, where):
    script = tmp_path / where
    script.parent.mkdir(parents=True)
    if script.name == "slurm.sbatch":
        for file in LAUNCH.iterdir():
            (script.parent / file.name).symlink_to(file)
        script.unlink()
        script.write_text((LAUNCH / "slurm.sbatch").read_text())
    else:
        script.symlink_to(LAUNCH / "slurm.sbatch")
    arguments = ["a slurm.sbatch", "/launch/slurm.sbatch"]
    _, output = ended(cluster, arguments, folder=tmp_path, script=script, PYTHON="echo")
    assert_ran_on_both_nodes(output, "/launch/slurm.sbatch")


def test_a_wrapped_command_runs_the_torchrun_sh_of_its_script(cluster, tmp_path):
    wrap = f"bash {LAUNCH}/slurm.sbatch x.py"
    options = ["--nodes", 2, "--parsable", "--output", "lossagg-%j.out", "--wrap", wrap]
    job = slurm(cluster, "sbatch", *options, folder=tmp_path, PYTHON="echo").strip()
    log = tmp_path / f"lossagg-{job}.out"
    wait_until(lambda: has_ended(cluster, job), log)
    assert_ran_on_both_nodes(log.read_text(), "x.py")


def test_a_folder_without_torchrun_sh_is_named_with_the_variable_to_set(cluster, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text((LAUNCH / "slurm.sbatch").read_text())
    job, output = ended(cluster, ["x.py"], folder=tmp_path, script=script)
    assert f"LAUNCH_DIR: got {tmp_path}, expected the folder of torchrun.sh" in output
    assert "ExitCode=2:0" in job


def test_every_task_of_an_array_runs(cluster, tmp_path):
    options = ["--array=0-1", "--output=task-%a.out"]
    job, _ = submit(cluster, ["x.py"], folder=tmp_path, options=options, PYTHON="echo")
    logs = [tmp_path / f"task-{task}.out" for task in range(2)]
    show = ["scontrol", "show", "job", job]
    wait_until(lambda: "JobState=COMPLETED" in slurm(cluster, *show), *logs)
    for log in logs:
        wait_until(lambda log=log: log.exists() and len(AGENTS.findall(log.read_text())) == 2, log)
        assert_ran_on_both_nodes(log.read_text(), "x.py")


def test_a_job_that_gets_no_variables_runs_on_every_node(cluster, tmp_path):
    """The Python of a login is not ours: what it lacks is said, by both nodes or by the first."""
    _, output = ended(cluster, ["x.py"], folder=tmp_path, options=["--export=NONE"])
    assert "start 0: node0 node1" in output
    assert re.search(r"^\d: (PYTHON|DEVICE): got ", output, re.MULTILINE), output
    given = f"--export=PYTHON=echo,DEVICE=cpu,PROCESSES_PER_NODE=1,PATH={cluster['PATH']}"
    _, output = ended(cluster, ["x.py"], folder=tmp_path, options=[given])
    assert_ran_on_both_nodes(output, "x.py")


def test_an_address_that_was_exported_for_another_job_is_not_taken(cluster, tmp_path):
    stale = {"MASTER_ADDR": "10.9.9.9", "NODE_RANK": "7", "PET_NODE_RANK": "7", "PYTHON": "echo"}
    _, output = ended(cluster, ["x.py"], folder=tmp_path, **stale)
    assert "MASTER_ADDR: got 10.9.9.9, which is not the job's first node: 127.0.0.1" in output
    assert output.count("--master-addr 127.0.0.1") == 2


def test_the_job_gets_the_whole_memory_of_its_nodes(cluster, tmp_path):
    job, _ = ended(cluster, ["x.py"], folder=tmp_path, PYTHON="echo")
    (memory,) = re.findall(r"TRES=.*mem=(\w+)", job)
    assert memory in (f"{2 * MEMORY}M", f"{2 * MEMORY // 1024}G"), job


STATUSES = """#!/bin/bash
if [[ $SLURM_NODEID == 1 ]]; then exit $STATUS; fi
sleep 600
"""


@pytest.mark.parametrize("status", [7, 0])
def test_a_node_that_ends_ends_the_other_and_the_job_has_its_status(cluster, tmp_path, status):
    """With status 0 the other node is left ``SLURM_WAIT`` seconds, and the job fails."""
    (python := tmp_path / "python").write_text(STATUSES)
    python.chmod(0o755)
    given = {"PYTHON": str(python), "STATUS": str(status), "SLURM_WAIT": "3"}
    job, output = ended(cluster, ["x.py"], folder=tmp_path, **given)
    assert "JobState=FAILED" in job, output
    if status:
        assert f"ExitCode={status}:0" in job, output


def test_a_failure_before_the_first_step_is_not_requeued(cluster, tmp_path):
    (script := tmp_path / "x.py").write_text("import no_such_module\n")
    job, output = ended(cluster, [script], folder=tmp_path, MAX_REQUEUES="2")
    assert "No module named 'no_such_module'" in output
    assert "failed with status 1 before its first step and is not requeued" in output
    assert "Restarts=0" in job
    assert {path.suffix for path in tmp_path.iterdir()} == {".py", ".out"}


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
