"""What this machine has of the packages that Megatron-Core loads, and why one cannot be loaded.

A package that is not installed is found by its import spec and never imported. Each other one
is imported in a process of its own, with a time limit: an import that takes longer is slow and
was not judged, which is not the same as broken.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_lossagg.cpu.launch import tied

__all__ = ["PATIENCE", "Fact", "State", "environment", "unlaunched"]

State = Literal["found", "missing", "broken", "slow"]

PATIENCE = {"megatron-core": 1200.0, "transformer-engine": 300.0, "apex": 300.0}
"""Seconds that an import may take. Megatron-Core imports the other two."""


@dataclass(frozen=True, kw_only=True)
class _Package:
    """How a package is found, imported and described."""

    modules: tuple[str, ...]
    """All are imported; the version is that of the first."""
    distributions: tuple[str, ...]
    if_missing: str
    if_broken: str
    if_slow: str


_PACKAGES = {
    "megatron-core": _Package(
        modules=("megatron.core", "megatron.core.models.gpt"),
        distributions=("megatron-core",),
        if_missing="pip install 'megatron-core>=0.13', or put a Megatron-LM checkout on PYTHONPATH",
        if_broken="it cannot be imported",
        if_slow="run again: a second import is faster once the files are cached",
    ),
    "transformer-engine": _Package(
        modules=("transformer_engine", "transformer_engine.pytorch"),
        distributions=("transformer-engine", "transformer_engine"),
        if_missing="optional; needs CUDA",
        if_broken="installed but cannot be loaded, and import megatron.core then fails too: "
        "uninstall it on a machine without CUDA",
        if_slow="optional",
    ),
    "apex": _Package(
        modules=("apex", "apex.normalization"),
        distributions=("apex",),
        if_missing="optional; NVIDIA's, from its repository",
        if_broken="cannot be loaded, or is not NVIDIA's apex",
        if_slow="optional",
    ),
}

# Both run in processes of their own: importing Megatron-Core in this one would come before the
# CPU stand-ins, and a rank's import path is that of python -c, not of a console script.
_FIND = """
import importlib.util, json, sys
found = []
for name in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:  # not any folder of that name
            found.append(name)
    except ModuleNotFoundError:
        pass
    except Exception:
        found.append(name)
print("FACT", json.dumps(found))
"""
_IMPORT = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
try:
    import torch
    if sys.argv[1].startswith("megatron") and not torch.cuda.is_available():
        import megatron_lossagg.cpu as cpu
        cpu.install()
    first, *_ = [importlib.import_module(name) for name in sys.argv[1:]]
    fact = {"version": str(getattr(first, "__version__", "")), "file": first.__file__ or ""}
except BaseException as error:
    fact = {"error": f"{type(error).__name__}: {error}"}
print("FACT", json.dumps(fact))
"""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One package: found with its version, missing, installed but broken, or slow to import."""

    name: str
    state: State
    version: str = ""
    detail: str = ""
    path: str = ""
    """The folder on the import path that Megatron-Core was found in."""
    commit: str = ""
    """Its git commit where that folder is a checkout, with ``modified`` where files differ."""

    def __str__(self) -> str:
        """One line."""
        text = f"{self.name:<18} {self.version if self.state == 'found' else self.state_in_words}"
        return f"{text:<34} {self.detail_in_words}".rstrip()

    @property
    def state_in_words(self) -> str:
        """The state for a reader."""
        return "slow, not judged" if self.state == "slow" else self.state

    @property
    def detail_in_words(self) -> str:
        """Where it was found, or what to do."""
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.path}{commit}" if self.path else self.detail


def environment(patience: Mapping[str, float] = PATIENCE) -> list[Fact]:
    """Find what is installed, and import what Megatron-Core imports in other processes.

    ``patience``: the seconds that each import may take.
    """
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        devices = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, NCCL"
    else:
        devices = "no CUDA: CPU and gloo"
    return [
        Fact(name="python", state="found", version=platform.python_version()),
        Fact(name="torch", state="found", version=str(torch.__version__), detail=devices),
        *_packages(patience),
    ]


def _packages(patience: Mapping[str, float]) -> Iterator[Fact]:
    first_modules = [package.modules[0] for package in _PACKAGES.values()]
    installed: list[str] = _fact_of(_output(_python(_FIND, first_modules)), [])
    with _imports(installed) as processes:
        begun = time.monotonic()
        for name, package in _PACKAGES.items():
            version = _distribution_version(package)
            if name not in processes:
                yield Fact(name=name, state="missing", detail=package.if_missing)
                continue
            seconds = patience[name]
            try:
                output = _output(processes[name], begun + seconds - time.monotonic())
            except subprocess.TimeoutExpired:
                detail = f"its import did not end within {seconds:g} s; {package.if_slow}"
                yield Fact(name=name, state="slow", version=version, detail=detail)
                continue
            died = {"error": (output[1].strip().splitlines() or ["no message"])[-1]}
            fact: dict[str, str] = _fact_of(output, died)
            if "error" in fact:
                detail = f"{package.if_broken} ({fact['error']})"
                yield Fact(name=name, state="broken", version=version, detail=detail)
                continue
            found = Fact(name=name, state="found", version=fact["version"] or version or "unknown")
            yield _located(found, Path(fact["file"])) if name == "megatron-core" else found


@contextmanager
def _imports(installed: list[str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start one import per installed package, at the same time; kill what is left at the end."""
    processes = {
        name: _python(_IMPORT, package.modules)
        for name, package in _PACKAGES.items()
        if package.modules[0] in installed
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _python(code: str, arguments: list[str] | tuple[str, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tied([sys.executable, "-c", code, *arguments]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=unlaunched(),
    )


def unlaunched() -> dict[str, str]:
    """Return this process's environment variables, without those of a launcher's rank."""
    launcher = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(launcher)}


def _output(process: subprocess.Popen[str], timeout: float | None = None) -> tuple[str, str]:
    return process.communicate(timeout=None if timeout is None else max(timeout, 0.0))


def _fact_of(output: tuple[str, str], default: Any) -> Any:
    """Read the line that a process wrote, among what an import may print."""
    lines = [line[5:] for line in output[0].splitlines() if line.startswith("FACT ")]
    return json.loads(lines[-1]) if lines else default


def _distribution_version(package: _Package) -> str:
    for distribution in package.distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return ""


def _located(fact: Fact, file: Path) -> Fact:
    """Add the folder that has ``megatron/core/__init__.py``, and its commit where git tracks it."""
    folder, tracked = file.parent.parent.parent, file.parent
    try:
        if _git(folder, "ls-files", "--", str(file)):
            commit = _git(folder, "rev-parse", "HEAD")[:12]
            changed = _git(folder, "status", "--porcelain", "-uno", "--", str(tracked))
            commit = f"{commit}, modified" if changed else commit
            return replace(fact, path=str(folder), commit=commit)
    except (OSError, subprocess.SubprocessError):
        pass  # no git here, or not a checkout
    return replace(fact, path=str(folder))


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60.0,
    )
    return done.stdout.strip()
