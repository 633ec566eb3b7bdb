"""Add each wrong factor on purpose and see ``lossagg verify`` fail and name it.

A file of this folder names a fault, a source file, and the lines to replace (conflict
markers). For each one the package is copied, the lines replaced, and the copy verifies
itself at DP 3 x CP 2 with M = 4, where M, DP, CP, DP * CP and N differ. Exit status 1 where
a fault is not caught, where the cause that is printed is not the fault (its file's name is
the cause's), where its lines are not found exactly once, or where the unpatched copy fails.

The ranks are forked from this process, which has imported Megatron-Core behind the CPU
stand-ins: a rank has what a launcher would tell it, forgets the package but for the
stand-ins, and runs the copy's command line.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RANKS = 6
VERIFY = ["verify", "--dp", "3", "--cp", "2", "--microbatches", "4"]
STAND_INS = "megatron_lossagg.cpu"
SECONDS = 300.0


def main(names: list[str]) -> int:
    """Run the faults named, all by default; print a line each."""
    import_megatron()
    files = [HERE / f"{name}.txt" for name in names] or sorted(HERE.glob("*.txt"))
    failed, total, _ = verify(None)
    print(f"unpatched: {failed} of {total} rows fail", flush=True)
    good = failed == 0
    caught = named = 0
    for file in files:
        failed, total, causes = verify(file)
        caught += failed > 0
        named += causes == [file.stem]
        verdict = "caught" if failed else "NOT CAUGHT"
        cause = ", ".join(causes) or "no cause"
        print(f"{verdict}: {file.stem}: {failed} of {total} rows fail; {cause}", flush=True)
    print(f"{len(files)} wrong factors, {caught} caught, {named} named")
    return int(not (good and caught == named == len(files)))


def verify(file: Path | None) -> tuple[int, int, list[str]]:
    """Copy, patch and verify: how many rows fail, of how many, and the causes named."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "megatron_lossagg", copy / "megatron_lossagg")
        if file is not None:
            apply(file, copy)
        report, printed = copy / "report.json", copy / "printed.txt"
        statuses = run_ranks(copy, [*VERIFY, "--json", str(report)], printed)
        told = printed.read_text()
        if not set(statuses) <= {0, 1} or not report.exists():
            raise SystemExit(f"the ranks ended with {statuses}\n{told}")
        rows = json.loads(report.read_text())["verdicts"]
    if not rows:
        raise SystemExit(f"verify has no rows\n{told}")
    failed = [row for row in rows if not row["passed"]]
    for row in failed:  # what is printed is what is in the report
        if row["explanation"] not in told:
            raise SystemExit(f"not printed: {row['explanation']}\n{told}")
    causes = [cause for row in failed for cause in row["causes"]]
    return len(failed), len(rows), sorted(set(causes))


def import_megatron() -> None:
    """Import, once for all ranks, the stand-ins and every module of Megatron that they use."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module(STAND_INS).install()
    importlib.import_module("megatron_lossagg.verify.prove")


def run_ranks(copy: Path, arguments: list[str], printed: Path) -> list[int]:
    """Fork the ranks of a command of the copy; their exit statuses, -9 where one was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [fork_rank(rank, port, copy, arguments, printed) for rank in range(RANKS)]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while len(statuses) < RANKS:
        for pid in [pid for pid in pids if pid not in statuses]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline or not set(statuses.values()) <= {0, 1}:
            for pid in [pid for pid in pids if pid not in statuses]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                statuses[pid] = -signal.SIGKILL
        time.sleep(0.05)
    return [statuses[pid] for pid in pids]


def fork_rank(rank: int, port: int, copy: Path, arguments: list[str], printed: Path) -> int:
    """Start a rank; its process's number."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": RANKS,
            "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PYTHONPATH": copy,  # of the process that computes the reference
        }
        os.environ.update({name: str(value) for name, value in environment.items()})
        be_rank(copy, arguments, printed)
    return pid


def be_rank(copy: Path, arguments: list[str], printed: Path) -> NoReturn:
    """Run the copy's command line in this process, and end it."""
    status = 70
    try:
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for name in list(sys.modules):
            ours = name.partition(".")[0] == "megatron_lossagg"
            if ours and not name.startswith(STAND_INS):
                del sys.modules[name]
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        command = importlib.import_module("megatron_lossagg.cli.main")
        assert command.__file__.startswith(str(copy)), command.__file__
        status = command.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def apply(file: Path, copy: Path) -> None:
    """Replace the lines between the first two markers by those between the last two."""
    match = re.fullmatch(
        r".+\n\n(.+)\n<<<<<<<\n(.*)=======\n(.*)>>>>>>>\n", file.read_text(), re.DOTALL
    )
    if match is None:
        raise SystemExit(f"{file.name}: not of the form fault, file, <<<<<<<, =======, >>>>>>>")
    path, old, new = match.groups()
    source = (copy / path).read_text()
    if source.count(old) != 1:
        raise SystemExit(f"{file.name}: its lines stand {source.count(old)} times in {path}, not 1")
    if path.startswith(STAND_INS.replace(".", "/")):
        raise SystemExit(f"{file.name}: {path} is not loaded from the copy: fault another file")
    (copy / path).write_text(source.replace(old, new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
