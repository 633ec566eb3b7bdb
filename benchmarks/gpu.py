"""Everything that needs a GPU, by one command: ``make gpu``.

From a bare checkout with torch, rich and a megatron-core wheel on the path; nothing of this
repository has to be installed. Its parts:

- tests: every test marked ``gpu``, Transformer Engine's partition of packed sequences against
  ``Layout`` among them where it can be imported; needs pytest
- verify: ``lossagg verify`` on NCCL, over all GPUs of this machine
- rows: time by CUDA events against the measured copy bandwidth, kernels, host syncs

Writes ``gpu.json`` and ``summary.md``, which state device, driver and versions, and the parts'
logs to ``--output``, by default ``$OUT`` or ``runs/gpu``. Exit status: 0 all passed, 1
a part failed or could not be run, 2 no CUDA. ``--cpu`` runs what needs none, one layout of
verify on gloo with two ranks, to try the command: the rest is then reported as not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

NO_CUDA = 2
CPU_RANKS = 2

Json = dict[str, Any]
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("OUT") or ROOT / "runs" / "gpu")
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER")
    parser.add_argument("--only", choices=[*PARTS], help="one part instead of all three")
    parser.add_argument("--cpu", action="store_true", help="only what needs no GPU")
    args = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        print("torch is not installed: put it on the path, built for CUDA", file=sys.stderr)
        return NO_CUDA
    if not args.cpu and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no CUDA device: run this on a machine with a GPU and "
            "a torch built for CUDA; `make bench` and `make test` need none",
            file=sys.stderr,
        )
        return NO_CUDA
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Json] = {}
    for name, run in PARTS.items():
        if args.only in (None, name):
            print(f"== {name}", flush=True)
            parts[name] = run(output, on_cpu=args.cpu)
    verdict = overall(parts, on_cpu=args.cpu)
    write(output, verdict, parts, on_cpu=args.cpu)
    for name, found in parts.items():
        print(f"{name}: {found['verdict']}{', ' * bool(found['reason'])}{found['reason']}")
    print(f"{verdict}; {output / 'summary.md'}")
    return 0 if verdict == PASSED else 1


def overall(parts: dict[str, Json], *, on_cpu: bool) -> str:
    """Judge the run: a part that did not run is not a pass, but for those that need a GPU."""
    verdicts = {part["verdict"] for part in parts.values()}
    if FAILED in verdicts:
        return FAILED
    if on_cpu:
        return PASSED if PASSED in verdicts else NOT_RUN
    return NOT_RUN if NOT_RUN in verdicts else PASSED


def write(output: Path, verdict: str, parts: dict[str, Json], *, on_cpu: bool) -> None:
    """Write the result as JSON and in Markdown."""
    from benchmarks import gpu_result

    result = {
        "verdict": verdict,
        "on_cpu": on_cpu,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": gpu_result.machine(),
        "parts": parts,
    }
    (output / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "summary.md").write_text(gpu_result.markdown(result), encoding="utf-8")


def run_tests(output: Path, *, on_cpu: bool) -> Json:
    """Run every test marked ``gpu``; only the files that have one, for what they import."""
    if on_cpu:
        return part(NOT_RUN, "needs a GPU")
    if not installed("pytest"):
        return part(NOT_RUN, "pytest is not installed: pip install pytest")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(file) for file in files if "mark.gpu" in file.read_text()]
    junit = output / "tests.xml"
    junit.unlink(missing_ok=True)
    command = ["-m", "pytest", "-m", "gpu", "-W", "default", "-ra", "-p", "no:cacheprovider"]
    passed = logged([*command, f"--junitxml={junit}", *marked], output / "tests.txt")
    return tests_of(junit, passed=passed)


def tests_of(junit: Path, *, passed: bool) -> Json:
    """Read pytest's results; nothing passed means that nothing was tested."""
    if not junit.exists():
        return part(FAILED, "pytest ended before it had results: tests.txt")
    cases = []
    for case in ElementTree.parse(junit).iter("testcase"):
        ended = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        reason = "" if ended is None else ended.get("message", "")
        outcome = "passed" if ended is None else "skipped" if ended.tag == "skipped" else "failed"
        cases.append({"test": case.get("name"), "outcome": outcome, "reason": reason})
    counts = {o: sum(c["outcome"] == o for c in cases) for o in ("passed", "failed", "skipped")}
    reason = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    verdict = FAILED if not passed else PASSED if counts["passed"] else NOT_RUN
    return {**part(verdict, reason), **counts, "cases": cases, "partition": partition_of(cases)}


def partition_of(cases: list[Json]) -> str:
    """Say whether Transformer Engine's partition was compared with ``Layout``."""
    its = [case for case in cases if case["test"].startswith("test_transformer_engine_slices")]
    if any(case["outcome"] == "failed" for case in its):
        return "differs from Layout.thd_zigzag"
    if any(case["outcome"] == "passed" for case in its):
        return "equal to Layout.thd_zigzag"
    return f"not compared: {its[0]['reason'] if its else 'the test was not found'}"


def run_verify(output: Path, *, on_cpu: bool) -> Json:
    """Run ``lossagg verify`` under torchrun on every GPU of this machine, once per layout."""
    import torch

    if not installed("rich"):
        return part(NOT_RUN, "rich is not installed: pip install rich")
    ranks = CPU_RANKS if on_cpu else torch.cuda.device_count()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    to_verify = layouts_of(ranks)[-1:] if on_cpu else layouts_of(ranks)
    layouts = [
        verify(output, f"verify_{number}", ranks, sizes, hidden)
        for number, sizes in enumerate(to_verify)
    ]
    verdict = PASSED if all(layout["passed"] for layout in layouts) else FAILED
    reason = "; ".join(layout["summary"] for layout in layouts)
    return {**part(verdict, reason), "ranks": ranks, "layouts": layouts}


def layouts_of(ranks: int) -> list[dict[str, int]]:
    """Return the sizes to verify beside DP, which takes the rest of the ranks."""
    if ranks % 4 == 0:
        return [{"cp": 2, "pp": 2}, {"cp": 2, "tp": 2}]
    return [{}, {"cp": 2}] if ranks % 2 == 0 else [{}]


def verify(
    output: Path, name: str, ranks: int, sizes: dict[str, int], environment: dict[str, str]
) -> Json:
    """Run one layout; its reports stay next to the log."""
    file = output / f"{name}.json"
    file.unlink(missing_ok=True)
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "-m", "megatron_lossagg", "verify"]
    command += [word for size, value in sizes.items() for word in (f"--{size}", str(value))]
    command += ["--sequence-parallel"] * ("tp" in sizes)
    command += ["--json", str(file), "--markdown", str(file.with_suffix(".md"))]
    passed = logged(command, output / f"{name}.txt", environment)
    files = [file.with_suffix(suffix) for suffix in (".json", ".md", ".txt")]
    found: Json = {"passed": passed, "files": [f.name for f in files if f.exists()]}
    if not file.exists():
        return {**found, "passed": False, "summary": f"{name} ended before its report: {name}.txt"}
    report = json.loads(file.read_text())
    cases = sum(verdict["passed"] for verdict in report["verdicts"])
    found["summary"] = f"{', '.join(report['layouts'])}: {cases} of {report['num_verdicts']} cases"
    return {**found, "passed": passed and report["passed"]}


def run_rows(output: Path, *, on_cpu: bool) -> Json:
    """Measure the GPU rows."""
    if on_cpu:
        return part(NOT_RUN, "needs a GPU")
    from benchmarks import gpu_rows

    found = gpu_rows.measure()
    synced = [f"{row['tokens']} {row['dtype']}" for row in found["rows"] if row["sync"]]
    if synced:
        return {**part(FAILED, f"waits for the device: {', '.join(synced)}"), **found}
    reason = "" if found["goal_reached"] else "the bandwidth goal was missed"
    return {**part(PASSED, reason), **found}


def installed(package: str) -> bool:
    """Tell whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def part(verdict: str, reason: str = "") -> Json:
    """Start a part's result."""
    return {"verdict": verdict, "reason": reason}


def logged(arguments: list[str], log: Path, environment: dict[str, str] | None = None) -> bool:
    """Run a Python command of this checkout; print and keep its output; whether it passed."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), *given])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    log.write_text(done.stdout)
    print(done.stdout[-6000:], flush=True)
    return done.returncode == 0


PARTS = {"tests": run_tests, "verify": run_verify, "rows": run_rows}


if __name__ == "__main__":
    sys.exit(main())
