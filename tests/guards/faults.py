"""Faults that a guard or a refusal before a step catches: each is a program, and says so itself.

``@caught_by`` above a program in one of ``FILES`` makes a row, and ``test_guards.py`` a test of it.
"""

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit_cases import LAYOUTS as OF_TWO_RANKS

from megatron_lossagg.verify.parallelism import Parallelism

LAYOUTS = {
    **OF_TWO_RANKS,
    "CP 2, M 3": Parallelism(cp=2, microbatches=3),
    "TP 2": Parallelism(tp=2, microbatches=2),
    "MoE": Parallelism(dp=2, moe=True, microbatches=2),
    "EP 2": Parallelism(dp=2, ep=2, moe=True, microbatches=2),
}
FILES = ("faults_before_a_step", "faults_in_a_step", "faults_of_deferred_steps")


@dataclass(frozen=True)
class Row:
    """A fault, and the message that stops the step."""

    guard: str
    """The class in ``guards/``, or the function in ``guards/before.py``."""
    fault: str
    message: str = ""
    layout: str = "DP 2"
    arguments: tuple[Any, ...] = ()
    per_token: bool = False
    ranks: tuple[int, ...] = (0, 1)
    """Those that raise it."""
    program: Callable[..., None] | None = None

    def __str__(self) -> str:
        scaling = "per_token" if self.per_token else "average"
        return f"{self.guard} | {self.layout} | {scaling} | {self.fault}"


def caught_by(guard, fault, message, layout="DP 2", *arguments, each=(), **more):
    """Say what catches a program, in which layout.

    ``each``: of several rows, the last argument of each, or a tuple of them; ``fault`` and
    ``message`` are formatted with it.
    """

    def rows(program):
        for given in map(_tuple, each) if each else [()]:
            texts = (text.format(*given) if given else text for text in (fault, message))
            row = Row(guard, *texts, layout, (*arguments, *given), **more, program=program)
            program.__globals__.setdefault("ROWS", []).append(row)
        return program

    return rows


def _tuple(one):
    return one if isinstance(one, tuple) else (one,)


def rows_of(*files):
    """Import programs, on a rank; returns their rows."""
    return [row for file in files for row in importlib.import_module(file).ROWS]


def names_of(*files):
    """Read guard and name of each row, without importing a program."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(Path(__file__).with_name(f"{file}.py").read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "caught_by":
                guard, fault, _, *layout = node.args
                more = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
                more["layout"] = layout[0].value if layout else "DP 2"
                faults = [fault.value.format(*_tuple(one)) for one in more.pop("each", ())]
                found += [Row(guard.value, one, **more) for one in faults or [fault.value]]
    return [(row.guard, str(row)) for row in found]
