"""Add each wrong factor on purpose and see the ordinary gradient tests fail.

A file of this folder names a fault, a source file, and the lines to replace (conflict
markers). For each one the package and its tests are copied, the lines replaced, and
``tests/test_gradients.py`` run unchanged at DP 2 x CP 2, where DP * CP, M and N differ.
Exit status 1 where a fault is not caught, where its lines are not found exactly once, or
where the unpatched copy fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SELECTED = ["tests/test_gradients.py", "-k", "named_loss and DP2xCP2"]


def main(names: list[str]) -> int:
    """Run the faults named, all by default; print a line each."""
    files = [HERE / f"{name}.txt" for name in names] or sorted(HERE.glob("*.txt"))
    with tempfile.TemporaryDirectory() as folder:
        passed, failed = run_tests(None, Path(folder) / "unpatched")
    print(f"unpatched: {passed} passed, {failed} failed", flush=True)
    uncaught = [] if passed and not failed else ["unpatched"]
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            passed, failed = run_tests(file, Path(folder) / "patched")
        what = file.read_text().splitlines()[0]
        verdict = "caught" if failed else "NOT CAUGHT"
        print(f"{verdict}: {file.stem}: {failed} of {passed + failed} failed. {what}", flush=True)
        if not failed:
            uncaught.append(file.stem)
    print(f"{len(files)} wrong factors, {len(files) - len(set(uncaught) - {'unpatched'})} caught")
    return int(bool(uncaught))


def run_tests(file: Path | None, copy: Path) -> tuple[int, int]:
    """Copy, patch and test; returns how many tests passed and failed."""
    for part in ("megatron_lossagg", "tests", "pyproject.toml"):
        source = ROOT / part
        copier = shutil.copytree if source.is_dir() else shutil.copy
        (copy / part).parent.mkdir(parents=True, exist_ok=True)
        copier(source, copy / part)
    if file is not None:
        apply(file, copy)
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SELECTED]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if done.returncode not in (0, 1) or not counts:
        raise SystemExit(f"pytest ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)


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
