"""Draw the part of an exhaustive target that a commit runs.

``launch/ci/draw.py TARGET SEED`` prints the drawn parts on stdout, in a line, and on stderr what
was drawn and what was left out. A target that has no parts prints nothing. Each part has its place
by a hash of seed, target and part, so that a part added to a target moves no other.

``check.sh`` gives the commit as the seed. The standard library only, for any Python 3.10 or newer:
it decides which releases of Megatron-Core there are.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from versions import RELEASES  # noqa: E402

ONE_OF = {
    "wrong-factors": 4,
    "test-versions": 4,
    "test-frameworks": 4,
    "test-launch": 3,
    "test-machine": 5,
}
"""A draw has one of so many parts of each exhaustive target."""
ALWAYS = {"test-machine": ["system"]}
"""Parts of every draw: a version of Python may have no torch here, and is skipped then."""


def parts(target: str) -> list[str]:
    """Return all parts of an exhaustive target, as ``make TARGET ONLY=...`` takes them."""
    if target == "wrong-factors":
        return [file.stem for file in sorted((ROOT / "tests" / "wrong_factors").glob("*.txt"))]
    if target == "test-versions":
        return [*RELEASES]
    if target == "test-frameworks":
        return files("tests/frameworks/*/*_checks.py")
    if target == "test-launch":
        return files("tests/launch/test_*.py")
    machine = [str(ROOT / "launch" / "ci" / "machine.sh"), "--list"]
    return subprocess.check_output(machine, text=True).split()


def files(pattern: str) -> list[str]:
    """Return the files of a pattern, from the root of the checkout."""
    return [str(file.relative_to(ROOT)) for file in sorted(ROOT.glob(pattern))]


def drawn(target: str, seed: str, every: list[str]) -> list[str]:
    """Return the parts that a seed draws of all of a target, in their order."""

    def place(part: str) -> str:
        return hashlib.sha256(f"{seed} {target} {part}".encode()).hexdigest()

    always = [part for part in every if part in ALWAYS.get(target, [])]
    others = sorted((part for part in every if part not in always), key=place)
    number = math.ceil(len(others) / ONE_OF[target])
    return sorted(always + others[:number], key=every.index)


def main(target: str, seed: str) -> None:
    """Print what a seed draws of a target."""
    if target not in ONE_OF:
        return
    every = parts(target)
    chosen = drawn(target, seed, every)
    rest = [part for part in every if part not in chosen]
    print(f"{target}, {len(chosen)} of {len(every)} drawn by {seed}: {' '.join(chosen)}\n"
          f"left out: {' '.join(rest) or 'none'}\n"
          f'again: make {target} ONLY="{" ".join(chosen)}"', file=sys.stderr)  # fmt: skip
    print(*chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
