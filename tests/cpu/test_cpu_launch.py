"""The launcher: failure, time limit, nothing left running, nothing listens to other machines.

Output and environment are in ``tests/support/test_fork_server.py``, next to those of forked ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import early, new_folder, worker_path
from processes import SLEEP, is_running, outliving, pids_of

from megatron_lossagg.cpu.launch import launch

pytestmark = pytest.mark.launches


def test_a_module_runs_too_and_a_failing_rank_is_seen() -> None:
    result = launch(["-m", "json.tool", "--no-such-flag"], processes=1, timeout=200)
    assert result.returncode != 0
    assert "--no-such-flag" in result.stderr


@early
def outlasted() -> tuple[str, list[int], list[int]]:
    """Launch ranks that sleep; return what they printed, their processes, and which outlive it."""
    folder = new_folder()
    script = folder / "sleep.py"
    script.write_text(SLEEP)
    for timeout in (10, 60, 120):  # A busy machine needs longer to start its ranks.
        started = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            launch([str(script), str(folder)], processes=2, timeout=timeout)
        assert time.monotonic() - started < timeout + 60
        if str(caught.value.output).count("asleep") == 2:
            break
    pids = pids_of(folder)
    # Now: in a run of all tests another process may get the same number later.
    return str(caught.value.output), pids, [pid for pid in pids if is_running(pid)]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_a_launch_that_outlasts_its_time_leaves_nothing_running(
    outlasted: tuple[str, list[int], list[int]],
) -> None:
    output, pids, running = outlasted
    assert len(pids) == 4
    assert not running
    assert output.count("asleep") == 2
    assert os.getpid() not in pids


@contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Launch two ranks that sleep, from a process of its own; yield it, the agent and the ranks."""
    script = folder / "sleep.py"
    script.write_text(SLEEP)
    code = f"from megatron_lossagg.cpu import launch; launch([{str(script)!r}, {str(folder)!r}], "
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"{code} processes=2)"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
    )
    running = [launcher.pid]
    try:
        pids = pids_of(folder)
        ranks = pids[::2]
        (agent,) = {int(stat_of(rank)[1]) for rank in ranks}
        running += [agent, *pids]
        yield launcher, [agent, *ranks]
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def listening(pid: int) -> list[str]:
    """Return the addresses, in hexadecimal, on which a process listens."""
    inodes = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].partition(":")[0])
    return found


@early
def killed() -> tuple[list[str], list[int]]:
    """Kill a launcher; return on which addresses it had listened, and who outlived it."""
    with started(new_folder()) as (launcher, pids):
        addresses = [address for pid in pids for address in listening(pid)]
        launcher.kill()
        launcher.wait()
        return addresses, outliving(pids)


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads /proc")
def test_nothing_that_was_launched_listens_on_another_address_than_loopback(
    killed: tuple[list[str], list[int]],
) -> None:
    addresses, _ = killed
    assert set(addresses) == {"0100007F"}  # 127.0.0.1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends them")
def test_launched_ranks_end_with_a_launcher_that_is_killed(
    killed: tuple[list[str], list[int]],
) -> None:
    _, running = killed
    assert not running


def test_a_launch_leaves_no_files_behind(tmp_path: Path) -> None:
    """In a process of its own: early launches of this one have files at any time."""
    program = "from megatron_lossagg.cpu import launch\n"
    program += "launch(['-m', 'json.tool', '--help'], processes=1).check_returncode()"
    environment = {**os.environ, "PYTHONPATH": worker_path(), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=200)
    assert not list(tmp_path.iterdir())
