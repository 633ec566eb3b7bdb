"""Weigh each term of a framework's loss: what the frameworks' integrations of weigh share."""

from __future__ import annotations

import functools
import linecache
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.integrations._shared import replaced
from megatron_lossagg.integrations.weigh_script import ScriptWeighing
from megatron_lossagg.weigh.compare import Weighed
from megatron_lossagg.weigh.listen import is_in_backward
from megatron_lossagg.weigh.report import text
from megatron_lossagg.weigh.weighing import Weighing

_ASSIGNED = re.compile(r"\s*(\w+)\s*=[^=]")
_Site = tuple[str, int]
_LINES = 4
"""How many lines above a call its assignment may begin."""


class TermsWeighing(ScriptWeighing):
    """Weighs each term of a loss; one for a run."""

    def __init__(self, steps: int, *, report: Callable[[Weighed, int, str], None]) -> None:
        super().__init__(1, steps, stop=False, report=report)
        self._listening: Weighing | None = None
        self._microbatch, self._is_new = -1, False
        """The microbatch, and whether nothing of the next one has been heard."""
        self._sites: Counter[_Site] = Counter()
        """How often each place has reduced losses in this microbatch."""
        self._frame: Any = None
        """Of the last call, while a step is weighed."""
        self._terms: dict[str, list[tuple[_Site, int]]] = {}
        """Of each name, the places and their orders, each of which is a term."""

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
        frame: Any,
        prompt: Sequence[Hashable] = (),
        is_by_call: bool = False,
        **more: Any,
    ) -> Tensor:
        """Hear a term's losses of this rank's response tokens, if a step is weighed.

        ``frame``: what reduces them. ``prompt``: of each sequence, None of padding; each other one
        is a sample, if there is no ``sample``. ``is_by_call``: another call of the function
        whose frame it is has further sequences of the same terms.
        """
        if self._listening is None or not self.is_listening:
            return losses
        if is_in_backward():  # recomputed, of any microbatch
            more |= {"term": term_of(frame)}
        else:
            if self._is_new:
                self._microbatch, self._is_new = self._microbatch + 1, False
                self._sites.clear()
            if is_by_call and frame is not self._frame:
                self._sites.clear()
                self._frame = frame
            more |= {"term": self._term(frame), "microbatch": self._microbatch}
            if prompt:
                place = self._listening.run.place.dp_rank, self._microbatch
                each = [None if one is None else (*place, n) for n, one in enumerate(prompt)]
                more = {"sample": each, "prompt": prompt, **more}
        return self._listening.losses(losses, mask, lengths=lengths, **more)

    def _term(self, frame: Any) -> str:
        """Name a term: a place that reduces losses, and its order in the microbatch."""
        site, name = (frame.f_code.co_filename, frame.f_lineno), term_of(frame)
        self._sites.update([site])
        places = self._terms.setdefault(name, [])
        if (place := (site, self._sites[site])) not in places:
            places.append(place)
        number = places.index(place) + 1
        return name if number == 1 else f"{name} {number}"

    def _listen(
        self, weighing: Weighing, schedule: Callable[..., Any], call: dict[str, Any], chunk: Any
    ) -> Any:
        step = call["forward_step_func"]
        self._microbatch = -1
        self._terms.clear()

        @functools.wraps(step)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            self._is_new = True
            return step(*args, **kwargs)

        with replaced(self, _listening=weighing, _frame=None):
            return schedule(**{**call, "forward_step_func": forward_step})


def print_term(step: Weighed, number: int, term: str) -> None:
    """Print the report of a term."""
    print(f"term {term}\n{text(step, number=number, advises=False)}", flush=True)


def term_of(frame: Any) -> str:
    """Name a term as the framework's line does: ``kl_loss = sum_of_sample_mean(kl)``.

    Frameworks pass no name. It is a heading only: which losses are one term is their place and
    order in the microbatch, and a line that assigns nothing is called ``loss``.
    """
    code, line = frame.f_code, frame.f_lineno
    for number in range(line, max(line - _LINES, code.co_firstlineno), -1):
        if found := _ASSIGNED.match(linecache.getline(code.co_filename, number)):
            return found[1]
    return "loss"
