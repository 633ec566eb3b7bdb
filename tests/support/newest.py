"""The newest main of Megatron-LM and of each framework: where it is, and what of it is looked up.

A framework renames what an integration uses; its users should not be the first to see it. For each
checkout, every name that the package imports from the framework, or names by its dotted path, is
looked up without importing anything. Then ``lossagg verify --framework``, if it has the framework,
runs its own functions, with the stand-ins and packages of ``make test-frameworks`` where they are
installed, and for Megatron-LM ``lossagg verify`` at DP 2 x CP 2 on its Megatron-Core.

``docs/test_newest.py`` runs them, by ``make test-newest``. Checkouts are those in ``CHECKOUTS``, a
folder; without it each is cloned into ``.newest``.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework_folders import INSTALLED, PATH, ROOT

PACKAGE = ROOT / "megatron_lossagg"
LAYOUT = ["--dp", "2", "--cp", "2", "--loss-aggregation", "prompt_mean"]
FUNCTIONS = ["--dp", "1", "--loss-aggregation", "sample_mean", "--loss-scaling", "average"]
SECONDS = 900
COULD_NOT_RUN = 2
"""Exit status of ``lossagg verify``."""


@dataclass(frozen=True, kw_only=True)
class Newest:
    """A framework's checkout, and which of its packages ours name."""

    folder: str
    """Its first word in ``tools/frameworks.txt``."""
    packages: tuple[str, ...]
    source: str = "."
    on: str = ""
    """The one of these whose packages its own functions import."""
    stand_ins: str = "stand_ins_first"
    """The module of ``tests/frameworks`` that puts stand-ins before what it imports."""

    @property
    def url(self) -> str:
        """Return where its main is."""
        return addresses()[self.folder]


@functools.cache
def addresses() -> dict[str, str]:
    """Return the address of each checkout's folder."""
    lines = (ROOT / "tools" / "frameworks.txt").read_text().splitlines()
    return dict(line.split()[:2] for line in lines if not line.startswith("#"))


NEWEST = {
    "megatron-lm": Newest(
        folder="Megatron-LM-main",
        packages=("megatron.core", "megatron.training", "megatron.rl"),
    ),
    "bridge": Newest(
        folder="Megatron-Bridge",
        packages=("megatron.bridge",),
        source="src",
    ),
    "slime": Newest(
        folder="slime",
        packages=("slime",),
        on="megatron-lm",
    ),
    "miles": Newest(
        folder="miles",
        packages=("miles",),
        on="megatron-lm",
    ),
    "verl": Newest(folder="verl", packages=("verl",)),
    "skyrl": Newest(folder="SkyRL", packages=("skyrl",)),
    "nemo-rl": Newest(
        folder="NeMo-RL",
        packages=("nemo_rl",),
        stand_ins="nemo_rl_first",
    ),
    "ms-swift": Newest(folder="ms-swift", packages=("swift",)),
    "areal": Newest(
        folder="AReaL",
        packages=("areal",),
        stand_ins="areal_stand_ins_first",
    ),
    "roll": Newest(
        folder="ROLL",
        packages=("mcore_adapter",),
        source="mcore_adapter/src",
    ),
    "roll-rlvr": Newest(folder="ROLL", packages=("roll",)),
    "llama-factory": Newest(
        folder="LLaMA-Factory",
        packages=("llamafactory",),
        source="src",
        on="roll",
        stand_ins="llama_factory_first",
    ),
    "primus": Newest(
        folder="Primus",
        packages=("primus",),
        on="megatron-lm",
    ),
    "open-instruct": Newest(
        folder="open-instruct",
        packages=("open_instruct",),
    ),
}

ELSEWHERE = {
    "megatron.core.utils.get_thd_batch_on_this_cp_rank": "until 0.18",
    "megatron.core.datasets.data_schedule_utils.get_thd_partitioned_indices": "branch dev",
    "megatron.core.packed_seq_params.get_thd_padding_kwargs": "branch dev",
    "megatron.core.packed_seq_params.resolve_thd_tail_padding_policy": "branch dev",
}
"""Names that are used only where a release or branch has them, and main does not."""


def checkout_of(newest: Newest) -> Path | None:
    """Return the checkout in ``CHECKOUTS``, or clone the newest main."""
    if folder := os.environ.get("CHECKOUTS"):
        checkout = Path(folder).resolve() / newest.folder
        return checkout if checkout.is_dir() else None
    checkout = ROOT / ".newest" / newest.folder
    if checkout.is_dir():
        subprocess.run(["git", "-C", checkout, "pull", "--quiet", "--depth", "1"], check=True)
    else:
        subprocess.run(
            ["git", "clone", "--quiet", "--depth", "1", newest.url, checkout], check=True
        )
    return checkout


def commit_of(checkout: Path) -> str:
    """Return a checkout's commit and its date; empty if it is no clone."""
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "-C", checkout, "log", "-1", "--format=%h of %cs"]
    return subprocess.check_output(command, text=True).strip()


@functools.cache
def modules() -> list[tuple[Path, ast.Module]]:
    """Return every file of the package, parsed."""
    return [(file, ast.parse(file.read_text())) for file in sorted(PACKAGE.rglob("*.py"))]


def names_of(packages: tuple[str, ...]) -> set[str]:
    """Return the dotted paths of what the package imports or names of some packages."""
    return {path for _, tree in modules() for path in paths_of(tree, packages)}


def paths_of(tree: ast.Module, packages: tuple[str, ...]) -> Iterator[str]:
    """Yield what a module names: ``from a.b import c``, ``import a.b`` and ``"a.b.c"``."""
    dotted = re.compile(rf"({'|'.join(map(re.escape, packages))})(\.[A-Za-z_]\w*)+")
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        paths: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths = [] if id(node) in docstrings else [node.value]
        yield from (path for path in paths if dotted.fullmatch(path))


def where(path: str) -> str:
    """Return which of our files name a path."""
    packages = (path.partition(".")[0],)
    files = [file for file, tree in modules() if path in paths_of(tree, packages)]
    return ", ".join(str(file.relative_to(ROOT)) for file in files)


def has(source: Path, path: str) -> bool:
    """Whether a dotted path leads to a module, or to a name that one defines.

    What follows the name, such as a method of a class, is not looked up.
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        module = source.joinpath(*parts[:length])
        rest = parts[length:]
        if module.is_dir() and not rest:
            return True
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                return not rest or rest[0] in defined(ast.parse(file.read_text()))
    return False


class Everything:
    """The names of a module that takes all of another's, or computes them."""

    def __contains__(self, name: object) -> bool:
        return True


def defined(tree: ast.Module) -> set[str] | Everything:
    """Return the names that a module defines or imports at its top level."""
    names: set[str] = set()
    nodes: list[ast.AST] = [*tree.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            nodes.extend(ast.iter_child_nodes(node))
    return Everything() if names & {"*", "__getattr__"} else names


def verified(name: str, checkout: Path) -> tuple[list[str], str]:
    """Run what verifies a framework; return what failed, and a line of what ran.

    What could not run here is in the line, and is no failure.
    """
    newest, core, failed = NEWEST[name], "", []
    if name == "megatron-lm":
        report = verify(LAYOUT, [checkout], newest.stand_ins)
        core = f"; Megatron-Core: {report['line']}"
        failed += [] if report["passed"] else [f"Megatron-Core, {LAYOUT}: {report['line']}"]
    path = [checkout / newest.source]
    if newest.on and (other := checkout_of(NEWEST[newest.on])):
        path.append(other / NEWEST[newest.on].source)
    if name == "bridge":
        path.append(checkout / "3rdparty" / "Megatron-LM")
    report = verify(["--framework", name, *FUNCTIONS], path, newest.stand_ins)
    checks = (report.get("framework") or {}).get("checks", [])
    states = [check["state"] for check in checks]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    for check in checks:
        told = f"{check['state']} {check['check']}: {check['explanation'][:300]}"
        print(told)
        failed += [told] if check["state"] == "FAIL" else []
    for verdict in report.get("verdicts", []):
        if not verdict["passed"]:
            failed.append(f"FAIL {verdict['case']}: {verdict['explanation'][:300]}")
    if not checks and report["status"] != COULD_NOT_RUN:
        failed.append(report["line"])
    return failed, f"{counts or report['line']}{core}"


def verify(options: list[str], path: list[Path], stand_ins: str) -> dict[str, Any]:
    """Run ``lossagg verify`` with some folders first on the path.

    Return its report, ``line`` that it printed and its exit ``status``; -1 if it did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, first = Path(folder) / "report.json", [*path, ROOT]
        if INSTALLED.is_dir():  # what frameworks import and never call has stand-ins
            Path(folder, "sitecustomize.py").write_text(f"import {stand_ins}\n")
            first = [Path(folder), *path, *PATH, INSTALLED]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, first))}
        command = [sys.executable, "-m", "megatron_lossagg", "verify", *options]
        try:
            done = subprocess.run(
                [*command, "--json", str(report)],
                env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"passed": False, "line": f"did not end within {SECONDS} s", "status": -1}
        output = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        if not report.exists():
            return {"passed": False, "line": output[-1], "status": done.returncode}
        return {**json.loads(report.read_text()), "line": output[0], "status": done.returncode}
