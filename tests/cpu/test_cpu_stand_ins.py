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
from conftest import early, fork_server, new_folder
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
# install(), and how install() refuses: with it on a machine with CUDA, without it after Megatron.
# What is bound from torch by Megatron counts only under torch's name.
REPLACED = """
import importlib, json, pkgutil, sys, torch, torch.distributed
from megatron_lossagg.cpu.stand_ins import STAND_INS, StandInError, install
def refusal():
    try:
        install()
    except StandInError as error:
        return str(error)
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
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    found = {"refused": refusal()}
    install(allow_cuda=True)
    torch.cuda.is_available = is_available
for name in (
    "models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel", "transformer.moe.moe_layer"
):
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
if sys.argv[1] == "with":
    zeros = torch.zeros
    install()
    found |= {"device": str(zeros(1, device="cuda").device), "same": torch.zeros is zeros}
else:
    found = {"refused": refusal()}
from megatron.core.fusions.fused_bias_gelu import bias_gelu
found["compiled"] = [
    hasattr(function, "_torchdynamo_orig_callable")
    for function in (bias_gelu, torch.compile(lambda x: x, backend="eager"))
]
print(json.dumps({**found, "torch": changed, "megatron": megatron}))
"""


@early
def replaced() -> tuple[Any, Any]:
    """Return what the program prints with install() and without it."""
    with ThreadPoolExecutor() as both:
        ours, stock = both.map(
            lambda which: printed(REPLACED, new_folder(), which), ("with", "without")
        )
    return ours, stock


def test_exactly_the_names_in_the_table_are_replaced(replaced: tuple[Any, Any]) -> None:
    ours, stock = replaced
    torch_names = set(ours["torch"]) - set(stock["torch"])  # Importing changes some by itself.
    shared = ours["megatron"].keys() & stock["megatron"].keys()
    added = ours["megatron"].keys() - shared
    changed = {name for name in shared if ours["megatron"][name] != stock["megatron"][name]}
    # Releases that define it, as None, have nothing to add.
    defined = {"megatron.core.transformer.moe.moe_utils.te_general_gemm"} & stock["megatron"].keys()
    replaced = {name for name in STAND_INS if "fsdp" not in name or name in ours["megatron"]}
    assert torch_names | added | changed == replaced - defined


def test_installing_twice_changes_nothing_more(replaced: tuple[Any, Any]) -> None:
    ours, _ = replaced
    assert ours["same"]


def test_fusions_of_megatron_are_left_uncompiled_and_no_function_of_a_user(
    replaced: tuple[Any, Any],
) -> None:
    ours, stock = replaced
    assert ours["compiled"] == [False, True]
    assert stock["compiled"] == [True, True]


def test_a_machine_with_cuda_is_refused_unless_allowed(replaced: tuple[Any, Any]) -> None:
    ours, _ = replaced
    assert "allow_cuda=True" in ours["refused"]
    assert ours["device"] == "cpu"


def test_installing_after_megatron_is_refused(replaced: tuple[Any, Any]) -> None:
    _, stock = replaced
    assert "before the first import of megatron" in stock["refused"]
