"""Forked ranks behave as launched ones: environment, output, failure, time limit, nothing left."""

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import fork_server, new_folder, worker_path
from fork_server import WITHOUT_MEGATRON, ForkServer
from processes import SLEEP, is_running, outliving, pids_of

from megatron_lossagg.cpu import launch

RANKS = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
sums = dist.new_group()
import torch
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
threads, address = os.environ["OMP_NUM_THREADS"], os.environ["MASTER_ADDR"]
line = f"rank {dist.get_rank()} total {int(total)} {threads} {address} "
os.write(1, f"{line}{os.environ['MARKED']} {sys.argv[1:]}\\n".encode())  # whole: the ranks share it
dist.destroy_process_group()
"""
ENVIRONMENT = """
import contextlib, json, os, pathlib, runpy, sys
names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
         "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "OMP_NUM_THREADS",
         "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
         "GLOO_SOCKET_IFNAME", "PYTHONPATH", "GIVEN")
facts = {name: os.environ.get(name) for name in names}
facts |= {"argv": sys.argv[2:], "path": sys.path[0], "name": __name__, "folder": os.getcwd()}
facts |= {"group": os.getpgid(0) == os.getpid(), "stdin": sys.stdin.read()}
policy = lambda: getattr(os, "sched_getscheduler", int)(0)
before = policy()
with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
facts["is_batch"] = policy() == before
facts["main"] = sys.modules["__main__"].__dict__.get("facts") is facts
pathlib.Path(sys.argv[1], facts["RANK"]).write_text(json.dumps(facts))
del sys.argv[:2]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Writes what a rank finds to a file of its number, and runs a worker."""
FAILS = """
import os, pathlib, sys, time
if os.environ["RANK"] == "1":
    while not pathlib.Path(sys.argv[1], "0").exists():
        time.sleep(0.01)
    {}
pathlib.Path(sys.argv[1], "0").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def forked(launches):
    return lambda *arguments, **options: fork_server().launch(
        [str(argument) for argument in arguments], **{"processes": 2, "timeout": 60, **options}
    )


def written(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    return script


@pytest.fixture(scope="module")
def in_both(launches):
    """Run ranks under the launcher and forked; return what the ranks found and printed.

    Not an early fixture: both have the current folder, which a test may change meanwhile.
    """
    script, ranks = written(new_folder(), ENVIRONMENT), written(new_folder(), RANKS)
    env = {"GIVEN": "yes", "MARKED": "yes", "PYTHONPATH": worker_path(), "PYTHONUNBUFFERED": ""}
    found = []
    for start in (launch, fork_server().launch):
        folder = new_folder()
        command = [str(script), str(folder), str(ranks), "argument"]
        done = start(command, processes=2, timeout=200, env=env)
        assert done.returncode == 0, done.stderr
        facts = [json.loads((folder / rank).read_text()) for rank in "01"]
        found.append((facts, done.stdout.splitlines()))
    return found


def test_ranks_run_over_loopback_and_print_the_same_as_under_the_launcher(in_both):
    (_, launched), (_, forked) = in_both
    assert forked == [f"rank {rank} total 1 1 127.0.0.1 yes ['argument']" for rank in range(2)]
    assert sorted(launched) == forked


def test_a_rank_has_the_launchers_environment_arguments_and_name(in_both):
    """But for a group of processes, which the launcher gives its ranks as well."""
    (wanted, _), (ranks, _) = in_both
    assert ranks == wanted
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert all(rank["main"] and rank["GIVEN"] == "yes" for rank in ranks)
    assert all(rank["is_batch"] for rank in ranks)


@pytest.mark.parametrize(
    ("failure", "ended"),
    [
        ("raise ValueError('on rank 1')", "rank 1 exitcode : 1"),
        ("sys.exit('on rank 1')", "rank 1 exitcode : 1"),
        ("print('on rank 1', file=sys.stderr); os._exit(3)", "rank 1 exitcode : 3"),
        (
            "print('on rank 1', file=sys.stderr); os.kill(os.getpid(), 9)",
            "rank 1 exitcode : -9 Signal 9",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_others(forked, tmp_path, failure, ended):
    start = time.monotonic()
    done = forked(written(tmp_path, FAILS.format(failure)), tmp_path)
    assert time.monotonic() - start < 100  # the other would sleep for 600
    assert done.returncode == 1
    assert "on rank 1" in done.stderr
    assert ended in done.stderr
    assert "rank 0 exitcode : -9 Signal 9 (SIGKILL) received" in done.stderr
    assert not is_running(int((tmp_path / "0").read_text()))


def test_a_launch_that_outlasts_its_time_leaves_nothing_running(forked, tmp_path):
    script = written(tmp_path, SLEEP)
    for timeout in (1, 5, 60):  # a busy machine
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            forked(script, tmp_path, timeout=timeout)
        if caught.value.output.count("asleep") == 2:
            break
    pids = pids_of(tmp_path)
    assert len(pids) == 4
    assert not any(is_running(pid) for pid in pids)
    assert caught.value.output.count("asleep") == 2


@pytest.mark.launches
def test_a_worker_that_needs_no_megatron_finds_none_imported(tmp_path):
    script = written(tmp_path, "import sys; print('megatron' in sys.modules)")
    printed = [
        fork_server(*imports).launch([str(script)], processes=1, timeout=60).stdout
        for imports in ((), (WITHOUT_MEGATRON,))
    ]
    assert printed == ["True\n", "False\n"]


@pytest.mark.launches
def test_closing_the_server_ends_the_ranks_of_a_launch(tmp_path):
    """As when the tests are interrupted."""
    server = ForkServer(WITHOUT_MEGATRON, path=worker_path())
    command = [str(written(tmp_path, SLEEP)), str(tmp_path)]
    with ThreadPoolExecutor() as threads:
        launch = threads.submit(server.launch, command, processes=2, timeout=600)
        try:
            pids = pids_of(tmp_path)
        finally:
            server.close()
        assert launch.exception() is not None
    assert len(pids) == 4
    assert not outliving(pids)
