"""Prove each release of megatron-core that this package supports: ``make test-versions``.

Each release is installed without its dependencies into a folder of its own and put before
everything else on the path; torch and the rest are this environment's. For each one:
``lossagg verify`` in both loss scalings with one aggregation, on the standard set of layouts and on
a model with experts, then the tests of the contract, of the coefficients and the finalize function
in each step, and of the probe on two ranks. With ``--whole``: every aggregation, the probe on four
ranks too, all guards with what they let pass, and the side losses. Prints one line per release;
exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import ran  # noqa: E402

# From 0.17 on megatron-core asks for Python 3.12 and imports triton.
RELEASES = (
    ("0.13.1", "0.14.0", "0.15.3", "0.16.1")
    if sys.version_info < (3, 12)
    else ("0.17.1", "0.18.2", "0.19.2")
)
BESIDE = () if sys.version_info < (3, 12) else ("triton",)
# What an aggregation is does not depend on the release; how layouts and loss scalings scale it
# does.
ONE = ["--loss-aggregation", "prompt_mean"]
LAYOUTS = {
    "standard set": [],
    "MoE": ["--dp", "2", "--cp", "2", "--ep", "2", "--moe"],
}
PROBE = "tests/loop/test_probe.py"
ON_TWO_RANKS = f"{PROBE}::test_stock_megatron_passes_on_two_ranks_and_is_left_unchanged"
AGGREGATOR, AUDIT = "tests/loop/test_aggregator.py", "tests/guards/test_gradient_audit.py"
CHECKS, STOCK = "tests/guards/test_checks.py", "tests/megatron/test_stock.py"
FOLLOWED = [
    f"{STOCK}::test_a_side_loss_is_stocks_times_the_sum_of_weights",
    f"{STOCK}::test_a_scaled_mode_scales_the_whole_gradient_with_side_losses",
]
"""From 0.19 on."""
SIDE = [
    f"{STOCK}::test_side_losses_come_out_bit_for_bit_as_without_this_package",
    f"{STOCK}::test_rejected_tokens_do_not_scale_side_losses",
    f"{STOCK}::test_main_and_side_losses_add_up_as_in_stock_where_stock_has_the_mode",
]
FINALIZED = [f"{CHECKS}::test_the_finalize_function_ran", f"{CHECKS}::test_it_ran_on_one_rank"]
LEFT_OUT = ["-k", "not (costs_little or the_agreement or a_deferred_step)"]
"""What reads nothing that a release changes."""
TESTS = [AGGREGATOR, ON_TWO_RANKS, AUDIT, *FINALIZED, *FOLLOWED, *LEFT_OUT]
GUARDS = [CHECKS, AUDIT, "tests/guards/test_guards.py"]
WHOLE = [AGGREGATOR, PROBE, *GUARDS, *SIDE, *FOLLOWED, *LEFT_OUT]


def main() -> int:
    """Prove the releases named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true", help="all tests of what reads Megatron")
    parser.add_argument("releases", nargs="*", help=f"of {', '.join(RELEASES)}; default all")
    args = parser.parse_args()
    releases = args.releases or RELEASES
    failed = []
    for release in releases:
        begun = time.monotonic()
        path = installed(release)
        lines, good = [], True
        for options in LAYOUTS.values():
            line, passed = verify(path, release, options if args.whole else [*options, *ONE])
            lines.append(line)
            good = good and passed
        line, passed = run_tests(path, WHOLE if args.whole else TESTS)
        lines.append(line)
        ran.write("megatron_core", release, *(line.partition("\n")[0] for line in lines))
        if not (good and passed):
            failed.append(release)
        seconds = time.monotonic() - begun
        told = "; ".join(map(": ".join, zip([*LAYOUTS, "tests"], lines, strict=True)))
        print(f"megatron-core {release}: {told}; {seconds:.0f} s", flush=True)
    print(f"{len(releases)} releases, {len(failed)} failed: {failed or 'none'}")
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
    """Run ``lossagg verify``; return how many cases pass, and check that it ran on the release."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["-m", "megatron_lossagg", "verify", *options, "--json", str(report)]
        done = run(path, command)
        if not report.exists():
            return f"no report\n{done.stdout}\n{done.stderr}", False
        data = json.loads(report.read_text())
    verdicts = data["verdicts"]
    versions = {fact["name"]: fact["version"] for fact in data["environment"]}
    # From 0.18 on the version ends with a plus and the commit of the folder it runs in.
    if versions["megatron-core"].partition("+")[0] != release:
        return f"ran on {versions['megatron-core']}", False
    errors = [
        verdict["gradient_error"] for verdict in verdicts if verdict["gradient_error"] is not None
    ]
    passed = sum(verdict["passed"] for verdict in verdicts)
    line = f"{passed} of {len(verdicts)}, {max(errors, default=0.0):.1e}"
    return line if data["passed"] else f"{line}\n{done.stdout}", bool(data["passed"])


def run_tests(path: str, tests: list[str]) -> tuple[str, bool]:
    """Run the tests of what reads Megatron."""
    done = run(path, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests])
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", done.stdout)
    line = ", ".join(counts) or "no test ran"
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
    sys.exit(main())
