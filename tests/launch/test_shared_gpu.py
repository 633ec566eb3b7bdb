"""``launch/shared_gpu.sh`` and ``lossagg verify --gpu``, as far as a machine without a GPU goes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import LAUNCH, environment

from megatron_lossagg.verify.job import RanksTimedOut, launched

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
SCRIPT = LAUNCH / "shared_gpu.sh"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_HOSTID", "NCCL_IB_DISABLE")
PRINTS = f"""
import json, os
print(json.dumps([os.environ.get(name) for name in {NAMES}]))
"""
FAILS = """
import os, subprocess, sys, time
if os.environ["RANK"] == "1":
    print("no disk", file=sys.stderr)
    sys.exit(7)
subprocess.run(["sleep", "600"])
"""
JOB = f"""
import os, time
class PrintsEnvironment:
    def run(self):
        with open(os.environ["RANK"], "w") as file:
            print([os.environ.get(name) for name in {NAMES}], file=file)
        yield {{"event": "start"}}

def wait_for_ever():
    time.sleep(600)

class RankOneNeverReturns:
    def run(self):
        yield {{"event": "start"}}
        if os.environ["RANK"] == "1":
            wait_for_ever()
        yield {{"event": "layout", "layout": "DP 2"}}
        wait_for_ever()
"""


def variables(**more):
    """Return an environment without what would win over the script's own values."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
    given = environment(**more).items()
    return {k: v for k, v in given if k in more or (not k.startswith("NCCL_") and k not in ours)}


def shared(ranks, code, **more):
    """Run Python code on ranks of the script."""
    command = [SCRIPT, str(ranks), sys.executable, "-c", code]
    return subprocess.run(
        command, env=variables(**more), capture_output=True, text=True, timeout=120
    )


def marked(mark):
    """List the processes that have a variable of this value in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes():
                found.append(environ.parent.name)
    return found


@pytest.mark.parametrize(
    ("gpus", "ranks", "devices"),
    [(1, 2, "00"), (2, 3, "010"), (2, 2, "01"), (8, 2, "01")],
)
def test_ranks_go_round_the_gpus_and_name_a_host_each_if_they_share_one(gpus, ranks, devices):
    done = shared(ranks, PRINTS, NUM_GPUS=str(gpus))
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    is_shared = ranks > gpus
    for rank, (line, device) in enumerate(zip(lines, devices, strict=True)):
        prefix, found = line.split(" ", 1)
        assert prefix == f"[{rank}]"
        own = [f"host{rank}", "1"] if is_shared else [None, None]
        assert json.loads(found) == [str(rank), str(ranks), device, *own]


def test_the_users_own_values_win_and_the_visible_gpus_are_counted():
    own = {"NCCL_HOSTID": "mine", "NCCL_IB_DISABLE": "0", "CUDA_VISIBLE_DEVICES": "3,5"}
    lines = sorted(shared(3, PRINTS, **own).stdout.splitlines())
    assert lines[2] == '[2] ["2", "3", "0", "mine", "0"]'


def test_a_rank_that_fails_ends_all_with_its_status_and_name():
    mark = f"shared-gpu-{time.monotonic_ns()}"
    begun = time.monotonic()
    done = shared(4, FAILS, NUM_GPUS="1", MARK=mark)
    assert time.monotonic() - begun < 60
    assert done.returncode == 7
    assert done.stdout == "[1] no disk\n"
    assert done.stderr == "shared_gpu.sh: rank 1 ended with status 7, so all are ended\n"
    assert not marked(mark)


def test_a_signal_ends_the_ranks_too():
    mark = f"shared-gpu-{time.monotonic_ns()}"
    command = [SCRIPT, "2", "sh", "-c", "echo runs; exec sleep 600"]
    env = variables(NUM_GPUS="1", MARK=mark)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as script:
        assert {script.stdout.readline() for _ in range(2)} == {"[0] runs\n", "[1] runs\n"}
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=60) == 143
    assert not marked(mark)


@pytest.mark.parametrize(
    ("arguments", "gpus", "named"),
    [((), "1", "got nothing"), (("x", "true"), "1", "got x true"), (("2", "true"), "0", "got 0")],
)
def test_wrong_usage_is_refused_in_one_line(arguments, gpus, named):
    done = subprocess.run(
        [SCRIPT, *arguments], env=variables(NUM_GPUS=gpus), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert named in line


def test_verify_starts_ranks_with_the_same_variables(tmp_path, monkeypatch):
    job = job_of("PrintsEnvironment", tmp_path, monkeypatch)
    done = launched(job, print, processes=3, timeout=300, gpus=2)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        wanted = [str(rank), "3", str(rank % 2), f"host{rank}", "1"]
        assert (tmp_path / str(rank)).read_text().strip() == str(wanted)


def test_ranks_that_do_not_finish_are_ended_and_what_each_did_last_is_said(tmp_path, monkeypatch):
    mark = f"verify-{time.monotonic_ns()}"
    monkeypatch.setenv("MARK", mark)
    events = []
    job = job_of("RankOneNeverReturns", tmp_path, monkeypatch)
    with pytest.raises(RanksTimedOut) as caught:
        launched(job, events.append, processes=2, timeout=20)
    first, second = caught.value.last
    assert first.startswith("rank 0: finished DP 2, ")
    assert second.startswith("rank 1: joined the others, ")
    for line in (first, second):
        assert "; in wait_for_ever (jobs_of_test.py:" in line
    assert [event["event"] for event in events] == ["start", "layout"]
    monkeypatch.delenv("MARK")
    assert marked(mark) in ([], [str(os.getpid())])


def job_of(name, folder, monkeypatch):
    """Make a job of a class that the ranks can import too."""
    (folder / "jobs_of_test.py").write_text(JOB)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.chdir(folder)
    sys.modules.pop("jobs_of_test", None)
    return getattr(__import__("jobs_of_test"), name)()


def verify(*options, folder, **more):
    """Run ``lossagg verify`` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_lossagg", "verify", "--dp", "2", *options],
        env=variables(CUDA_VISIBLE_DEVICES="", **more),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("launcher", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_verify_on_gpus_is_refused_by_name_without_cuda(tmp_path, launcher):
    done = verify("--gpu", folder=tmp_path, **launcher)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "got --gpu, and torch sees no CUDA device here" in line


def test_a_run_out_of_time_reports_each_rank_and_leaves_no_process(tmp_path):
    mark = f"verify-{time.monotonic_ns()}"
    report = tmp_path / "report.json"
    done = verify("--timeout", "0.1", "--json", report, folder=tmp_path, MARK=mark)
    assert done.returncode == 2, done.stderr
    first, *last = json.loads(report.read_text())["failure"].splitlines()
    assert first == "The run did not finish in 0.1 s (--timeout)"
    assert [line.partition(":")[0] for line in last[:2]] == ["rank 0", "rank 1"]
    assert last[0] in done.stdout
    assert not marked(mark)
