"""Ranks that sleep until something ends them, and whether a process runs."""

import time
from pathlib import Path

SLEEP = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
print("asleep", flush=True)
time.sleep(600)
"""
"""Each rank writes its process and a child's to a file of its number in the folder it is given."""


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def pids_of(folder: Path) -> list[int]:
    """Wait for two ranks of ``SLEEP``; return each rank's process, followed by its child's."""
    deadline = time.monotonic() + 300  # a busy machine
    files = [folder / rank for rank in "01"]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(pid) for file in files for pid in file.read_text().split()]


def outliving(pids: list[int]) -> list[int]:
    """Wait for the end of processes; return those that run after a minute, on a busy machine."""
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]
