"""A row of ``fault_table``, and the layouts that its programs run in."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Row:
    """A fault, and the message that stops the step."""

    guard: str
    """The class in ``guards/``, or the function in ``guards/before.py``."""
    fault: str
    program: str
    """The function that makes it, of one of the ``*_programs.py``."""
    message: str
    layout: str = "DP 2"
    arguments: tuple[Any, ...] = ()
    per_token: bool = False
    ranks: tuple[int, ...] = (0, 1)
    """Those that raise it."""

    def __str__(self) -> str:
        scaling = "per_token" if self.per_token else "average"
        return f"{self.guard} | {self.layout} | {scaling} | {self.fault}"
