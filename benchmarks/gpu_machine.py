"""What a GPU result was measured on: devices, driver, versions, the package's commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import megatron_lossagg
from megatron_lossagg.verify.environment import environment

ROOT = Path(__file__).resolve().parent.parent


def facts() -> dict[str, str]:
    """Collect what is known of this machine; a missing package has its state in words."""
    packages = {
        fact.name: fact.version if fact.state == "found" else fact.state for fact in environment()
    }
    return {
        "devices": devices(),
        "driver": driver(),
        "CUDA of torch": torch.version.cuda or "none",
        "cuDNN": cudnn(),
        "NCCL": nccl(),
        **packages,
        "megatron_lossagg": f"{megatron_lossagg.__version__}, {commit()}",
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
    }


def devices() -> str:
    """Name the CUDA devices."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [
        f"{p.name} ({p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor})"
        for p in properties
    ]
    return "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def driver() -> str:
    """Return the driver's version, from nvidia-smi or the kernel module."""
    found = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if found:
        return found.splitlines()[0]
    module = Path("/proc/driver/nvidia/version")
    return module.read_text().splitlines()[0] if module.exists() else "none found"


def cudnn() -> str:
    """Return cuDNN's version as torch gives it."""
    return str(torch.backends.cudnn.version() or "none")


def nccl() -> str:
    """Return NCCL's version."""
    if not torch.cuda.is_available():
        return "none"
    version: object = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def commit() -> str:
    """Return this checkout's commit."""
    found = output_of("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = output_of("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    return f"commit {found}{', modified' if changed else ''}" if found else "not a checkout"


def output_of(*command: str) -> str:
    """Return what a command prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
