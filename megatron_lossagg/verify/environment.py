"""What this machine has of the packages that a verification runs on; only torch is imported.

A package that is installed and cannot be imported ends the ranks, whose error names it.
"""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from megatron_lossagg.verify.text import number_of

GB_OF_A_RANK = 0.3
"""Memory of a rank on a CPU: the largest proportional set size of 12 (``/proc/*/smaps_rollup``)."""
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_OPTIONAL = {
    "transformer-engine": "transformer_engine",
    "apex": "apex",  # NVIDIA's; an unrelated project on PyPI has its name
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One package: found with its version, or missing."""

    name: str
    state: str
    version: str = ""
    detail: str = ""
    path: str = ""
    """The folder on the import path that Megatron-Core was found in."""
    commit: str = ""
    """Its git commit if that folder is a checkout, with ``modified`` if files differ."""

    def __str__(self) -> str:
        """One line."""
        text = f"{self.name:<18} {self.version if self.state == 'found' else self.state}"
        return f"{text:<34} {self.where}".rstrip()

    @property
    def where(self) -> str:
        """Where it was found, or what to do."""
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.path}{commit}" if self.path else self.detail


def environment() -> list[Fact]:
    """Find what is installed."""
    import torch

    has_cuda = torch.cuda.is_available()
    if has_cuda:
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        devices = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, NCCL"
    else:
        devices = "no CUDA: CPU and gloo"
    facts = [
        Fact(name="python", state="found", version=platform.python_version()),
        Fact(name="torch", state="found", version=str(torch.__version__), detail=devices),
        _megatron_core(_origin("megatron.core")),
    ]
    for name, module in _OPTIONAL.items():
        if _origin(module) is None:
            facts.append(Fact(name=name, state="missing", detail="optional"))
            continue
        # Megatron-Core imports it, and fails with it.
        detail = "" if has_cuda else f"needs CUDA: if import {module} fails here, uninstall it"
        facts.append(Fact(name=name, state="found", version=_version(name), detail=detail))
    return facts


def num_gpus() -> int:
    """Count the GPUs that torch sees; 0 without CUDA."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def crowding(ranks: int) -> list[str]:
    """Say that ranks are more than the cores, or need more memory, than this process may use."""
    said, cores, free = [], _num_cores(), _free_gb()
    if ranks > cores:
        said.append(f"{ranks} ranks share {number_of(cores, 'core')}: they wait for each other")
    if ranks * GB_OF_A_RANK > free:
        said.append(
            f"{ranks} ranks need about {ranks * GB_OF_A_RANK:.1f} GB of memory, and {free:.1f} GB "
            "are free: the kernel may kill some; give smaller sizes"
        )
    return said


def _num_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, period = (*_read(_CGROUP / "cpu.max"), "max", "")[:2]  # of a container
    return min(cores or 1, max(1, int(quota) // int(period))) if quota.isdecimal() else cores or 1


def _free_gb() -> float:
    """Return what is available, or a container's limit if that is less; infinity if unknown."""
    words = _read(_MEMINFO)
    limits = _read(_CGROUP / "memory.max")
    if "MemAvailable:" in words:
        limits.append(f"{words[words.index('MemAvailable:') + 1]}000")
    return min([float(limit) / 1e9 for limit in limits if limit.isdecimal()], default=float("inf"))


def _read(file: Path) -> list[str]:
    """Return the words of a file; none if it is not there."""
    with suppress(OSError):
        return file.read_text().split()
    return []


def gpu_variables(rank: int, num_ranks: int, gpus: int) -> dict[str, str]:
    """Return what a rank needs in its environment when all ranks run on this machine's GPUs.

    NCCL refuses two ranks of one host on one GPU: if ranks share a GPU, each names a host of its
    own. ``launch/shared_gpu.sh`` sets the same.
    """
    variables = {"LOCAL_RANK": str(rank % gpus), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if num_ranks > gpus:
        variables |= {
            "NCCL_HOSTID": f"host{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
    return variables


def megatron_core(facts: Sequence[Fact]) -> Fact:
    """Return what was found of Megatron-Core."""
    return next(fact for fact in facts if fact.name == "megatron-core")


def _origin(module: str) -> Path | None:
    """Return a package's ``__init__.py``; None for a folder that only has its name."""
    with suppress(ModuleNotFoundError):
        if (spec := find_spec(module)) is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


def _version(distribution: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return "unknown"


def _megatron_core(core: Path | None) -> Fact:
    """Describe the Megatron-Core that the ranks import: its version, folder and commit."""
    if core is None or not (info := core.with_name("package_info.py")).is_file():
        remedy = "pip install 'megatron-core>=0.13', or put a Megatron-LM checkout on PYTHONPATH"
        return Fact(name="megatron-core", state="missing", detail=remedy)
    # Another one may be installed than the checkout that is found first. This file is constants.
    version = str(runpy.run_path(str(info))["__version__"])
    folder = core.parent.parent.parent
    commit = ""
    with suppress(OSError, subprocess.SubprocessError):  # no git here, or not a checkout
        if _git(folder, "ls-files", "--", str(core)):
            commit = _git(folder, "rev-parse", "HEAD")[:12]
            if _git(folder, "status", "--porcelain", "-uno", "--", str(core.parent)):
                commit += ", modified"
    return Fact(
        name="megatron-core", state="found", version=version, path=str(folder), commit=commit
    )


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0)
    return done.stdout.strip()
