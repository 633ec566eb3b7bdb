"""What ran, in rows that the runs write: ``runs/ran/TABLE.tsv``.

``python -m tools.ran_page`` takes them into ``tests/ran/TABLE.tsv``, whose first line names the
columns, and prints these files as ``docs/reference/ran.md``. The cells up to ``Python`` say what
ran; a later row with the same ones takes the place of the earlier.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMITTED, WRITTEN = ROOT / "tests" / "ran", ROOT / "runs" / "ran"
RELEASED = (ROOT / "tests" / "frameworks" / "requirements.txt").read_text()
"""A line for each package whose release the files of checks run."""


def read(file: Path) -> list[list[str]]:
    """Return the rows of a table, its header first."""
    return [line.split("\t") for line in file.read_text().splitlines()]


def write(table: str, *cells: str) -> None:
    """Append a row: ``cells`` in the order of the columns, without Python, torch and date."""
    header = read(COMMITTED / f"{table}.tsv")[0]
    known = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": version("torch"),
        "date": str(datetime.datetime.now(datetime.timezone.utc).date()),
    }
    given = iter(cells)
    line = [known.get(column) or next(given) for column in header]
    WRITTEN.mkdir(parents=True, exist_ok=True)
    with (WRITTEN / f"{table}.tsv").open("a") as file:
        file.write("\t".join(line) + "\n")


def version(package: str) -> str:
    """Return the release of what is installed."""
    return importlib.metadata.version(package)


def release_of(file: str) -> str:
    """Return what a file of ``tests/frameworks`` ran on; empty if that is not known.

    The release of its folder's framework for a file of checks, or the checkouts that it names.
    """
    path, text = Path(file), (ROOT / file).read_text()
    package = path.parent.name.replace("_", "-")
    if path.stem.endswith("_checks") and f"\n{package}==" in RELEASED:
        return f"{package} {version(package)}"
    named = {*re.findall(r'"([\w-]+)', text)}
    folder = Path(os.environ.get("FRAMEWORKS_DIR") or os.devnull)
    commits = []
    for checkout in sorted(named):
        if "from frameworks import" in text and (folder / checkout / ".git").exists():
            command = ["git", "-C", folder / checkout, "rev-parse", "--short=8", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:  # git reads no repository of another owner
                commits.append(f"{checkout} {done.stdout.strip()}")
    return ", ".join(commits)


def pytest_terminal_summary(terminalreporter, config):
    """Write a row for each file of ``tests/frameworks`` that ran whole on a framework."""
    if config.option.keyword or config.option.markexpr or any("::" in one for one in config.args):
        return
    counts: dict[str, Counter[str]] = {}
    for state in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(state, ()):
            file = report.nodeid.partition("::")[0]
            if file.startswith("tests/frameworks/"):
                counts.setdefault(file, Counter())[state] += 1
    for file, of_file in counts.items():
        release = release_of(file)
        if release and of_file.keys() - {"skipped"}:
            tests = ", ".join(f"{number} {state}" for state, number in of_file.items())
            write("frameworks", Path(file).name, release, version("megatron-core"), tests)
