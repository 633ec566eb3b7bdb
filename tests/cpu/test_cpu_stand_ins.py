"""The stand-ins: what they replace, what they leave unchanged, when they refuse."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import fork_server
from fork_server import WITHOUT_MEGATRON

from megatron_lossagg.cpu.stand_ins import STAND_INS


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on one rank, forked from a process that has imported torch and no Megatron."""
    return fork_server(WITHOUT_MEGATRON).launch(arguments, processes=1, timeout=400)


def printed(program: str, folder: Path, *arguments: str) -> Any:
    script = folder / "program.py"
    script.write_text(program)
    result = python(str(script), *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.launches
def test_importing_the_cpu_package_imports_no_megatron(tmp_path: Path) -> None:
    program = """
import json, sys
import megatron_lossagg.cpu
print(json.dumps([name for name in sys.modules if name.split(".")[0] == "megatron"]))
"""
    assert printed(program, tmp_path) == []


def test_installed_megatron_core_is_the_wheel_as_published() -> None:
    try:
        files = importlib.metadata.distribution("megatron-core").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    hashed = [file for file in files if file.hash is not None]
    assert len(hashed) > 100
    for file in hashed:
        digest = hashlib.sha256(Path(str(file.locate())).read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, str(file)


# Prints which of torch's names change, and what Megatron's modules hold, with and without
# install(). What is bound from torch by Megatron counts only under torch's name.
REPLACED = """
import importlib, json, pkgutil, sys, torch, torch.distributed
from megatron_lossagg.cpu.stand_ins import STAND_INS, install
def known(name):
    owner, _, attribute = name.rpartition(".")
    return getattr(pkgutil.resolve_name(owner), attribute)
def of(package):
    found = {name: m for name, m in sys.modules.items() if name.split(".")[0] == package}
    return {f"{n}.{key}": v for n, m in found.items() for key, v in list(vars(m).items())}
def described(value):
    names = (getattr(value, key, "") for key in ("__qualname__", "__module__"))
    return [type(value).__name__, *names]
before = of("torch")
tensor = {f"torch.Tensor.{key}": getattr(torch.Tensor, key) for key in dir(torch.Tensor)}
table = [name for name in STAND_INS if name.startswith("torch.")]
if sys.argv[1] == "with":
    install()
for name in ("models.gpt", "optimizer", "pipeline_parallel", "transformer.moe.moe_layer"):
    importlib.import_module("megatron.core." + name)
after = of("torch")
changed = [n for n in before if after.get(n) is not before[n] and callable(after.get(n))]
changed += [n for n in table if n in before and after[n] is not before[n]]
changed += [n for n, value in tensor.items() if known(n) is not value and callable(value)]
ours = [known(name) for name in table] if sys.argv[1] == "with" else []
megatron = {
    name: described(value) for name, value in of("megatron").items()
    if ".__" not in name and not any(value is one for one in ours)
}
print(json.dumps({"torch": changed, "megatron": megatron}))
"""


@pytest.mark.launches
def test_exactly_the_names_in_the_table_are_replaced(tmp_path: Path) -> None:

    def replaced(which: str) -> Any:
        folder = tmp_path / which
        folder.mkdir()
        return printed(REPLACED, folder, which)

    with ThreadPoolExecutor() as both:
        ours, stock = both.map(replaced, ("with", "without"))
    torch_names = set(ours["torch"]) - set(stock["torch"])  # Importing changes some by itself.
    shared = ours["megatron"].keys() & stock["megatron"].keys()
    added = ours["megatron"].keys() - shared
    changed = {name for name in shared if ours["megatron"][name] != stock["megatron"][name]}
    assert torch_names | added | changed == STAND_INS.keys()


@pytest.mark.launches
def test_installing_twice_changes_nothing_more(tmp_path: Path) -> None:
    program = """
import json, torch
from megatron_lossagg.cpu import install
install()
first = torch.zeros
install()
print(json.dumps(first is torch.zeros))
"""
    assert printed(program, tmp_path) is True


@pytest.mark.launches
def test_a_machine_with_cuda_is_refused_unless_allowed(tmp_path: Path) -> None:
    program = """
import json, torch
from megatron_lossagg.cpu.stand_ins import StandInError, install
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
try:
    install()
except StandInError as error:
    message = str(error)
torch.cuda.is_available = lambda: False
install(allow_cuda=True)
print(json.dumps([message, str(torch.zeros(1, device="cuda").device)]))
"""
    message, device = printed(program, tmp_path)
    assert "allow_cuda=True" in message
    assert device == "cpu"


@pytest.mark.launches
def test_installing_after_megatron_is_refused(tmp_path: Path) -> None:
    program = """
import json
import megatron.core
from megatron_lossagg.cpu.stand_ins import StandInError, install
try:
    install()
except StandInError as error:
    print(json.dumps(str(error)))
"""
    assert "before the first import of megatron" in printed(program, tmp_path)
