"""Prove each release of megatron-core that this package supports: ``make test-versions``.

Each release is installed without its dependencies into a folder of its own and put before
everything else on the path; torch and the rest are this environment's. For each one:
``lossagg verify`` on the layouts below in both regimes with every aggregation, then the
tests of contract, probe and side losses. Prints a line a release; exit status 1 if one fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From 0.17 on megatron-core asks for Python 3.12 and imports triton.
RELEASES = (
    ("0.13.1", "0.14.0", "0.15.3", "0.16.1")
    if sys.version_info < (3, 12)
    else ("0.17.1", "0.18.2", "0.19.2")
)
BESIDE = () if sys.version_info < (3, 12) else ("triton",)
VERIFY = {
    "standard set": [],
    "MoE": ["--dp", "2", "--cp", "2", "--ep", "2", "--moe"],
}
TESTS = ["tests/test_contract.py", "tests/test_probe.py"]


def main(releases: list[str]) -> int:
    """Prove the releases named, all by default."""
    failed = []
    for release in releases or RELEASES:
        begun = time.monotonic()
        path = installed(release)
        told, good = [], True
        for name, options in VERIFY.items():
            line, passed = verify(path, release, options)
            told.append(f"{name}: {line}")
            good = good and passed
        line, passed = run_tests(path)
        told.append(line)
        if not (good and passed):
            failed.append(release)
        seconds = time.monotonic() - begun
        print(f"megatron-core {release}: {'; '.join(told)}; {seconds:.0f} s", flush=True)
    print(f"{len(releases or RELEASES)} releases, {len(failed)} failed: {failed or 'none'}")
    return int(bool(failed))


def installed(release: str) -> str:
    """Install a release where it is not yet; return what to put on the path."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    folder = ROOT / ".versions" / python / release
    if not (folder / "megatron").exists():
        wanted = [f"megatron-core=={release}", *BESIDE]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *wanted], check=True)
    return str(folder)


def verify(path: str, release: str, options: list[str]) -> tuple[str, bool]:
    """Run ``lossagg verify``; say how many rows pass, and check that it ran on the release."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["-m", "megatron_lossagg", "verify", *options, "--json", str(report)]
        done = run(path, command)
        if not report.exists():
            return f"no report\n{done.stdout}\n{done.stderr}", False
        told = json.loads(report.read_text())
    rows = told["verdicts"]
    versions = {fact["name"]: fact["version"] for fact in told["environment"]}
    # From 0.18 on the version has the commit of the folder it runs in behind a plus.
    if versions["megatron-core"].partition("+")[0] != release:
        return f"ran on {versions['megatron-core']}", False
    errors = [row["gradient_error"] for row in rows if row["gradient_error"] is not None]
    passed = sum(row["passed"] for row in rows)
    line = f"{passed} of {len(rows)} rows, gradient error {max(errors, default=0.0):.1e}"
    return line if told["passed"] else f"{line}\n{done.stdout}", bool(told["passed"])


def run_tests(path: str) -> tuple[str, bool]:
    """Run the tests of what reads Megatron."""
    done = run(path, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS])
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", done.stdout)
    line = f"contract and probe: {', '.join(counts) or 'no test ran'}"
    good = done.returncode == 0
    return line if good else f"{line}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}", good


def run(path: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout with a release of Megatron-Core first on the path."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
