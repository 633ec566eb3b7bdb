"""Add each wrong factor on purpose and see ``lossagg verify`` fail and name it.

A file of this folder names a fault, a source file, and the lines to replace (conflict
markers). For each one the package is copied, the lines replaced, and the copy verifies
itself at DP 3 x CP 2 with M = 4, where M, DP, CP, DP * CP and N differ. Exit status 1 where
a fault is not caught, where the cause that is printed is not the fault (its file's name is
the cause's), where its lines are not found exactly once, or where the unpatched copy fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VERIFY = ["verify", "--dp", "3", "--cp", "2", "--microbatches", "4"]


def main(names: list[str]) -> int:
    """Run the faults named, all by default; print a line each."""
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
        report = copy / "report.json"
        command = [sys.executable, "-m", "megatron_lossagg", *VERIFY, "--json", str(report)]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"verify ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        rows = json.loads(report.read_text())["verdicts"]
    if not rows:
        raise SystemExit(f"verify has no rows\n{done.stdout}\n{done.stderr}")
    failed = [row for row in rows if not row["passed"]]
    for row in failed:  # what is printed is what is in the report
        if row["explanation"] not in done.stdout:
            raise SystemExit(f"not printed: {row['explanation']}\n{done.stdout}")
    causes = [cause for row in failed for cause in row["causes"]]
    return len(failed), len(rows), sorted(set(causes))


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
    (copy / path).write_text(source.replace(old, new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
