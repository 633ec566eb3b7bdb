"""What this machine has of the packages that a verification runs on; only torch is imported.

A package that is installed and cannot be imported ends the ranks, whose error names it.
"""

from __future__ import annotations

import platform
import runpy
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

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
