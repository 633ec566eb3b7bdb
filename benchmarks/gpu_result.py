"""A GPU result: what it was measured on, and all of it as Markdown, for a job's summary too."""

from __future__ import annotations

import html
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import megatron_lossagg
from benchmarks.tables import table

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "megatron-core", "transformer-engine", "triton")
TIMES = {
    "build_seconds": "build",
    "call_seconds": "call",
    "floor_seconds": "floor",
    "call_seconds_with_launches": "call with launches",
    "floor_seconds_with_launches": "floor with launches",
}
COLUMNS = ["tokens", "losses", *TIMES.values(), "of the copy bandwidth", "host syncs"]


def machine() -> dict[str, str]:
    """Collect what is known of this machine: devices, driver, versions, the package's commit."""
    has_cuda = torch.cuda.is_available()
    properties = [
        torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() * has_cuda)
    ]
    names = [
        f"{p.name} ({p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor})"
        for p in properties
    ]
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    nccl = torch.cuda.nccl.version() if has_cuda else ("none",)
    commit = output_of("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = output_of("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    return {
        "devices": "; ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
        or "no CUDA device",
        "driver": driver.partition("\n")[0] or "none found",
        "CUDA of torch": torch.version.cuda or "none",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),
        "NCCL": ".".join(map(str, nccl)),
        "torch": str(torch.__version__),
        **{name: version_of(name) for name in PACKAGES},
        "megatron_lossagg": f"{megatron_lossagg.__version__}, "
        + (f"commit {commit}{', modified' * bool(changed)}" if commit else "not a checkout"),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
    }


def version_of(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def output_of(*command: str) -> str:
    """Return what a command prints; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def title(result: Json) -> str:
    """Write the result in one line."""
    if result["on_cpu"]:
        return f"{result['verdict']}, on the CPU: no GPU took part, nothing was measured"
    return f"{result['verdict']}: {result['machine']['devices']}"


def markdown(result: Json) -> str:
    """Write the result as Markdown."""
    parts = [[name, part["verdict"], part["reason"]] for name, part in result["parts"].items()]
    written = [f"## make gpu: {title(result)}", "", result["written"], ""]
    written += [table(["part", "result", ""], parts), ""]
    tests, rows = (result["parts"].get(name, {}) for name in ("tests", "rows"))
    if "cases" in tests:
        written += [f"Transformer Engine's partition of packed sequences: {tests['partition']}", ""]
        others = [case_cells(case) for case in tests["cases"] if case["outcome"] != "passed"]
        written += [table(["test", "outcome", "reason"], others), ""] if others else []
    if "rows" in rows:
        bandwidth = f"{rows['copy_bytes_per_second'] / 1e9:.0f} GB/s"
        written += [f"Copy bandwidth: {bandwidth}. Times in microseconds.", ""]
        written += [table(COLUMNS, [row_cells(row) for row in rows["rows"]]), ""]
    return "\n".join([*written, table(["machine", ""], result["machine"].items()), ""])


def case_cells(case: Json) -> list[str]:
    """Write a test, its outcome and the reason, in one line."""
    return [case["test"], case["outcome"], html.escape(" ".join(case["reason"].split()))]


def row_cells(row: Json) -> list[str]:
    """Write the numbers of one row."""
    times = [f"{row[name] * 1e6:.0f}" for name in TIMES]
    bandwidth = f"{row['of_copy_bandwidth']:.0%}"
    return [row["tokens"], row["dtype"], *times, bandwidth, row["sync"] or "none"]
