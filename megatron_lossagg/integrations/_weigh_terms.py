"""Weigh each term of a framework's loss: what the frameworks' integrations of weigh share."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.integrations._refusals import replaced
from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.weigh.compare import Weighed
from megatron_lossagg.weigh.report import text
from megatron_lossagg.weigh.weighing import Weighing

_ASSIGNED = re.compile(r"\s*(\w+)\s*=[^=]")
_LINES = 4
"""How many lines above a call its assignment may begin."""


class TermsWeighing(ScriptWeighing):
    """Weighs each term of a loss; one for a run."""

    def __init__(self, at: int, steps: int, *, report: Callable[[Weighed, int, str], None]) -> None:
        super().__init__(at, steps, stop=False, report=report)
        self._listening: Weighing | None = None

    @property
    def is_listening(self) -> bool:
        """Whether losses that are reduced now are trained by a step that is weighed."""
        return self._listening is not None and torch.is_grad_enabled()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hear nothing for a while."""
        with replaced(self, _listening=None):
            yield

    def hear(
        self,
        losses: Tensor,
        mask: Tensor | None,
        *,
        lengths: Sequence[int],
        term: str,
        **more: Any,
    ) -> Tensor:
        """Hear a term's losses of this rank's response tokens, if a step is weighed."""
        if self._listening is None or not self.is_listening:
            return losses
        return self._listening.losses(losses, mask, lengths=lengths, term=term, **more)

    def _listen(
        self, weighing: Weighing, schedule: Callable[..., Any], call: dict[str, Any], chunk: Any
    ) -> Any:
        with replaced(self, _listening=weighing):
            return schedule(**call)

    def _trained(self, terms: dict[str, Weighed]) -> dict[str, Weighed]:
        """Leave out metrics, which are reduced as terms are and have no gradient on any rank."""
        trained = {
            name: step for name, step in terms.items() if any(s.weight_sum for s in step.sequences)
        }
        return trained or terms


def print_term(step: Weighed, number: int, term: str) -> None:
    """Print the report of a term."""
    print(f"term {term}\n{text(step, number=number, advises=False)}", flush=True)


def term_of(frame: Any) -> str:
    """Name a term as the framework's line does: ``kl_loss = sum_of_sample_mean(kl)``."""
    code, line = frame.f_code, frame.f_lineno
    for number in range(line, max(line - _LINES, code.co_firstlineno), -1):
        if found := _ASSIGNED.match(linecache.getline(code.co_filename, number)):
            return found[1]
    return "loss"
