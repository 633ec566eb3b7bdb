"""What this machine has of what Megatron-Core loads: a fact a package, and why one cannot load."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch

_PATIENCE = 300.0  # seconds for the imports, from a slow file system too

State = Literal["found", "missing", "broken"]

# In a process of its own: importing Megatron-Core here would come before the CPU stand-ins.
_IMPORTS = """
import importlib, json, warnings
warnings.simplefilter("ignore")
import torch
def tell(name, module, version):
    try:
        importlib.import_module(module)
        found = getattr(importlib.import_module(version), "__version__", "")
        print("FACT", json.dumps([name, ["", str(found)]]))
    except BaseException as error:
        print("FACT", json.dumps([name, [f"{type(error).__name__}: {error}", ""]]))
tell("transformer-engine", "transformer_engine.pytorch", "transformer_engine")
tell("apex", "apex.normalization", "apex")
if not torch.cuda.is_available():
    import megatron_lossagg.cpu as cpu
    cpu.install()
tell("megatron-core", "megatron.core.models.gpt", "megatron.core")
"""

_DISTRIBUTIONS = {
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "apex": ("apex",),
}
_MISSING = {
    "megatron-core": "pip install 'megatron-core>=0.13', or put a Megatron-LM checkout on "
    "PYTHONPATH",
    "transformer-engine": "optional; needs CUDA",
    "apex": "optional; NVIDIA's, from its repository",
}
_BROKEN = {
    "megatron-core": "it cannot be imported",
    "transformer-engine": "installed and cannot be loaded; import megatron.core then fails too: "
    "uninstall it on a machine without CUDA",
    "apex": "not NVIDIA's apex, or it cannot be loaded",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One package: found with its version, missing, or there and not to be loaded."""

    name: str
    state: State
    version: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """One line."""
        text = f"{self.name:<18} {self.version or self.state}"
        return f"{text:<34}{self.detail}".rstrip()


def environment() -> list[Fact]:
    """Look at what is installed, and import what Megatron-Core imports, in another process."""
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        devices = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, NCCL"
    else:
        devices = "no CUDA: CPU and gloo"
    facts = [
        Fact(name="python", state="found", version=platform.python_version()),
        Fact(name="torch", state="found", version=str(torch.__version__), detail=devices),
    ]
    return facts + [_fact(name, *told) for name, told in _imported().items()]


def _imported() -> dict[str, tuple[str, str]]:
    """Error and version of each package, as another process saw them."""
    rank = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(rank)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTS],
            capture_output=True,
            text=True,
            check=False,
            env=kept,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        late = f"its import did not end within {_PATIENCE:.0f} s"
        return dict.fromkeys(_DISTRIBUTIONS, (late, ""))
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("FACT ")]
    told = dict(json.loads(line) for line in lines)
    died = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {name: tuple(told.get(name, (died, ""))) for name in _DISTRIBUTIONS}


def _fact(name: str, error: str, version: str) -> Fact:
    for distribution in _DISTRIBUTIONS[name]:
        with suppress(metadata.PackageNotFoundError):
            version = version or metadata.version(distribution)
    if not error:
        return Fact(name=name, state="found", version=version or "no version")
    absent = not version and error.startswith("ModuleNotFoundError")
    if absent:
        return Fact(name=name, state="missing", detail=_MISSING[name])
    return Fact(name=name, state="broken", version=version, detail=f"{_BROKEN[name]} ({error})")
