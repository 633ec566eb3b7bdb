"""Hears what backward passes add to a few small parameters, and what their gradients become."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable

from megatron_lossagg.contract.engine import Engine
from megatron_lossagg.weigh.calls import number_of_pass
from megatron_lossagg.weigh.measured import Added, Array

_PARAMETERS, _ENTRIES = 4, 128
"""How many parameters are heard, and of each how many entries at most."""
_FEW = 8
_OTHERWISE = (
    "shared",
    "shared_embedding",
    "pipeline_parallel",
    "average_gradients_across_tp_domain",
)
"""Attributes of parameters that Megatron's finalize reduces over further ranks."""
_QK_NORM = re.compile(r"[qk]_layernorm")
"""And a part of the names of others."""


@dataclass(kw_only=True, eq=False)
class Candidate:
    """A parameter at which f can be measured."""

    name: str
    parameter: torch.nn.Parameter
    place: tuple[int, ...] = ()
    engine: Engine | None = None
    """What reduces its gradient; None: torch, in place."""
    node: Any = None
    """What adds to its gradient in a backward pass."""
    _heard: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each backward pass: what was there before, and what it added."""
    passes: list[int] = field(default_factory=list)
    _zeroed: list[int] = field(default_factory=list)
    """Before which of them gradients were zeroed, unseen by this rank, which has a part of them."""
    _is_fused: bool = False
    """Whether a kernel adds its gradient, so that what arrives at the node is none."""
    _after: Tensor | None = None

    def _some(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the entries that are heard, of values from an entry on; NaN of the others."""
        step = max(1, self.parameter.numel() // _ENTRIES)
        number = min(-(-self.parameter.numel() // step), _ENTRIES)
        begin = min(-(-first // step), number)
        here = values.detach().reshape(-1)[begin * step - first :: step][: number - begin]
        some = here.new_full((number,), torch.nan)
        some[begin : begin + len(here)] = here
        return some

    @property
    def _before(self) -> Tensor | None:
        """What a backward pass adds to, as far as it is on this rank."""
        if self.engine is not None:
            return self._some(*self.engine.added_up(self.parameter))
        return None if self.parameter.grad is None else self._some(self.parameter.grad)

    def begin(self, until: ExitStack) -> None:
        """Hear what backward passes add. No host sync."""
        with torch.enable_grad():  # the node outlives this, as long as something refers to it
            # Of a parameter that is not gathered nothing else than a view can be made.
            self.node = self.parameter.view_as(self.parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        until.callback(self.node.register_prehook(self._adds).remove)
        if self.engine is not None:
            until.callback(self.engine.when_zeroed(self._are_zeroed))

    def _are_zeroed(self) -> None:
        self._zeroed.append(len(self._heard))

    def _adds(self, gradients: Sequence[Tensor | None]) -> None:
        added, before = gradients[0], self._before
        self._is_fused |= getattr(self.parameter, "grad_added_to_main_grad", False)
        if added is not None and not added.is_sparse:
            added = self._some(added)
            self._heard.append((torch.zeros_like(added) if before is None else before, added))
            self.passes.append(number_of_pass())

    def read(self) -> None:
        """Keep the gradient as it is now. No host sync."""
        if self.engine is not None:
            self._after = self._some(*self.engine.reduced(self.parameter))
        elif self.parameter.grad is not None:
            self._after = self._some(self.parameter.grad)

    def _begun(self) -> tuple[Array, Array, int]:
        """Return what was heard, and in which pass the gradient was zero for the last time."""
        nothing = torch.zeros(1) if self._after is None else torch.zeros_like(self._after)
        before, added = (
            np.stack([values.double().cpu().numpy() for values in of])
            for of in zip(*(self._heard or [(nothing, nothing)]), strict=True)
        )
        zero = [k for k in range(len(before)) if k in self._zeroed or not before[k].any()]
        return before, added, max(zero, default=0)

    @property
    def gone(self) -> int:
        """The last backward pass of which what it added was zeroed; waits for the device."""
        _, added, first = self._begun()
        return max(self.passes[:first], default=-1) if added[:first].any() else -1

    def result(self) -> Added | None:
        """Return what was heard; None if it was not read. Waits for the device."""
        if self._after is None or self._is_fused:
            return None
        before, added, first = self._begun()
        return Added(
            place=self.place,
            name=self.name,
            added=added[first:].sum(0),
            size=np.abs(added[first:]).sum(0),
            before=before[first],
            after=self._after.double().cpu().numpy(),
            eps=torch.finfo(self._after.dtype).eps,
        )


class Listening:
    """Hears some parameters of a model while a step runs."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        usable = [one for one in candidates if _is_usable(one)]
        usable.sort(key=_order)
        # One of each kind: of all that a freezing or LoRA leaves without a gradient, one is enough.
        kinds = {re.sub(r"\d+", "", one.name): one for one in reversed(usable)}
        self._heard = [one for one in usable if one in kinds.values()][:_PARAMETERS]
        self._until_end = ExitStack()
        self._is_final = False

    def begin(self) -> None:
        """Begin; no collective, no host sync."""
        for one in self._heard:
            one.begin(self._until_end)
            self._until_end.callback(one.node.register_prehook(self.read_later).remove)

    def end(self) -> None:
        """Hear nothing any longer."""
        self._until_end.close()

    def read(self) -> None:
        """Keep the gradients as they are now, unless they were finalized before."""
        for one in () if self._is_final else self._heard:
            one.read()

    def finalized(self) -> None:
        """Keep the gradients as they are now, for good."""
        self._is_final = False
        self.read()
        self._is_final = True

    def read_later(self, *_: object) -> None:
        """In a backward pass: keep the gradients as they are at its end, reduced by torch's DDP.

        Its reducer asks to be called at the end too, with a static graph when it is called: this
        is called once more after both.
        """
        queue = Variable._execution_engine.queue_callback
        queue(partial(queue, partial(queue, self.read)))

    @property
    def gone(self) -> int:
        """The last backward pass whose gradients were zeroed, -1 if none; waits for the device."""
        return max((one.gone for one in self._heard), default=-1)

    @property
    def reaching(self) -> set[int]:
        """The backward passes that reached one of them."""
        return {number for one in self._heard for number in one.passes}

    def results(self) -> list[Added]:
        """Return what this rank has heard; waits for the device."""
        return [found for one in self._heard if (found := one.result()) is not None]


def _order(one: Candidate) -> tuple[bool, bool, int]:
    """Small ones first, but not of a few entries, whose sum may cancel."""
    of = one.parameter
    return of.dim() != 1, of.numel() < _FEW, of.numel()


def _is_usable(one: Candidate) -> bool:
    of = one.parameter
    is_dense = getattr(of, "allreduce", True) and not any(getattr(of, x, False) for x in _OTHERWISE)
    is_trained = of.requires_grad and of.is_floating_point()
    return is_dense and is_trained and _QK_NORM.search(one.name) is None
