"""Weigh a framework's reinforcement learning: which weight each token gets, in each term.

``LOSSAGG_WEIGH=1`` in the environment, with our integration of all but ms-swift. Or in the process
that trains, before its first step::

    from megatron_lossagg.integrations import weigh_rl

    weigh_rl.install("ms-swift")

The first training step is weighed, and rank 0 prints a report for each term of the loss. The
framework's code runs as it is: one function of it gets the per-token losses, and ``HEARD`` of its
integration says which.

With context parallelism every rank has the losses of whole sequences. Each rank hears every CP-th
of them. What a rank's gradient is worth depends on how a framework gathers log-probabilities: if
only a rank's own have a gradient, the weight is what one rank hears; if the gather sums gradients
over the ranks, CP times as much.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import is_asked, replaced
from megatron_lossagg.integrations.weigh_script import Report, ScriptWeighing, rebind_schedule
from megatron_lossagg.weigh.compare import Weighed
from megatron_lossagg.weigh.listen import is_in_backward
from megatron_lossagg.weigh.report import text
from megatron_lossagg.weigh.weighing import Weighing


class Reduction(NamedTuple):
    """A function that reduces per-token losses ``[b, s]``, or ``[T]`` with offsets."""

    module: str
    function: str
    losses: str
    """Its argument; inside, its variable."""
    mask: str | None
    """Without one, a token that weighs 0 is not counted."""
    how: str = "given"
    """Or ``inside``: it makes the losses itself, and multiplies, or selects, by the mask. Or
    ``returned``: they are an attribute of what it returns, and a rank weighs a part of them."""
    cu_seqlens: str = ""
    """Of losses ``[T]``: the argument with their offsets."""
    scale: str = ""
    """The column of a microbatch with what the losses have been multiplied by, like the losses."""


class Where(NamedTuple):
    """Where a framework trains, and reduces its losses."""

    schedule: str
    """The module that looks it up."""
    reductions: Sequence[Reduction]
    sums_gradients: bool
    """Whether its gather over context parallelism sums gradients over the ranks."""
    batch: str = "data"
    """The variable with a microbatch, in a function that calls the one that is heard."""
    names: Callable[[Any], Sequence[str] | None] = lambda batch: None
    """What it calls the sequences of a microbatch."""
    ids: Callable[[Any, Sequence[int]], Mapping[str, Any]] = lambda batch, first: {}
    """The ids of its sequences, as for a step, by the position of the first token of each."""
    column: str = ""
    """The column that ``ids`` reads."""
    has_names: bool = True
    """Whether a microbatch has names or ids."""
    is_by_call: bool = False
    """Whether its loss function may be called for each sequence of a microbatch."""
    reduces: tuple[str, str] = ("", "")
    """The module, and the method, that reduces gradients after the schedule, if it has one."""
    prepare: Callable[[], None] = lambda: None
    """What it needs in this process beforehand."""


_ASSIGNED = re.compile(r"\s*(\w+)\s*=[^=]")
_Site = tuple[str, int]
_LINES = 4
"""How many lines above a call its assignment may begin."""
_SCALE = "what losses were multiplied by"

FRAMEWORKS: dict[str, str] = {
    "verl": f"{__package__}.verl",
    "skyrl": f"{__package__}.skyrl",
    "nemo-rl": f"{__package__}.nemo_rl",
    "areal": f"{__package__}.areal",
    "ms-swift": f"{__package__}.ms_swift_grpo",
}
"""The integration of each framework, whose ``HEARD`` is a :class:`Where`."""


class TermsWeighing(ScriptWeighing):
    """Weighs each term of a loss; one for a run."""

    def __init__(self, steps: int, *, report: Report) -> None:
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


class _Weighing(TermsWeighing):
    """Weighs each term of a framework's loss, from losses of whole sequences."""

    def __init__(self, where: Where, steps: int, *, report: Report) -> None:
        super().__init__(steps, report=report)
        self.where, self.is_reduced_later = where, False
        self._pending: Weighing | None = None
        """A step whose gradients are not reduced yet."""
        self.missed: dict[str, str] = {}
        """What was looked for in this step by the name of a variable, and not found, and where."""

    def _begun(self, chunks: Sequence[Any], num_microbatches: int) -> Weighing:
        self.missed.clear()
        cp_size, _ = _context_parallel()
        scale = 1 / cp_size if self.where.sums_gradients else 1.0
        return Weighing(chunks, num_microbatches=num_microbatches, loss_scale=scale)

    def _end(self, weighing: Weighing) -> None:
        self._pending = weighing
        if not self.is_reduced_later:
            self.reduced()

    def reduced(self) -> None:
        """Report a step whose gradients were reduced after it."""
        if self._pending is not None:
            weighing, self._pending = self._pending, None
            if self.is_reduced_later:
                weighing.reduced()
            super()._end(weighing)

    def _trained(self, terms: dict[str, Weighed]) -> dict[str, Weighed]:
        if not any(step.sequences for step in terms.values()):
            names = ", ".join(row.function for row in self.where.reductions)
            missed = "".join(f" ({what}: {why})" for what, why in self.missed.items())
            raise ContractError(
                f"got a step whose losses no one of {names} reduced, expected one: this loss is "
                f"not weighed here (docs/weigh.md); train it without weighing{missed}"
            )
        if _SCALE in self.missed:
            unknown = f"{_SCALE} was not found: {self.missed[_SCALE]}"
            nothing: dict[str, Any] = {"trains": None, "fits": [], "explained": (), "hints": ()}
            return {
                name: replace(step, **nothing, unknown=unknown, faults=[unknown])
                for name, step in terms.items()
            }
        return {
            name: replace(step, lacks={**step.lacks, **self.missed}) for name, step in terms.items()
        }

    def hear_whole(
        self,
        losses: Tensor,
        mask: Tensor | None,
        cu_seqlens: Any,
        frame: Any,
        *,
        scale: str = "",
        is_shared: bool = True,
    ) -> Tensor:
        """Return losses of whole sequences, and hear this rank's part of what is added to them, 0.

        ``frame``: what reduces them. ``scale``: the column that they were multiplied by.
        ``is_shared``: whether context-parallel ranks do it alike.
        """
        if cu_seqlens is not None:
            lengths = np.diff(torch.as_tensor(cu_seqlens).cpu().numpy())
        else:
            lengths = np.full(losses.shape[0], losses.shape[1])
        cp_size, cp_rank = _context_parallel() if is_shared else (1, 0)
        sequences = np.repeat(np.arange(len(lengths)), lengths)[cp_rank::cp_size]
        index = torch.arange(cp_rank, losses.numel(), cp_size, device=losses.device)
        batch = self._batch(frame, scale)
        names, first = None, np.minimum(np.cumsum(lengths) - lengths, max(losses.numel() - 1, 0))
        ids: Mapping[str, Any] = {}
        if batch is not None:
            names, ids = self.where.names(batch), self.where.ids(batch, first)
        mask = None if mask is None else mask.reshape(-1)[index]
        times = None
        if batch is not None and scale in batch.keys():  # noqa: SIM118  a TensorDict
            times = batch[scale].expand_as(losses).reshape(-1)[index]
            mask = None if mask is None else (mask != 0) & (times != 0)  # padding, or weighs 0
        heard = self.hear(
            losses.new_zeros(len(index), requires_grad=losses.requires_grad),
            mask,
            lengths=np.bincount(sequences, minlength=len(lengths)).tolist(),
            frame=frame,
            is_by_call=self.where.is_by_call,
            names=names if names and len(names) == len(lengths) else None,
            **ids,
        )
        if times is not None:
            heard = heard * times.to(heard)
        return losses.reshape(-1).index_add(0, index, heard).view_as(losses)

    def _batch(self, frame: Any, scale: str) -> Any:
        """Return the nearest microbatch of the framework that has names, ids or the scale.

        By the name of its callers' variable, since what reduces losses is not passed it. Without
        such a variable sequences are numbered, and the report says so. The scale is a column that
        our integration adds.
        """
        where, function, found = self.where, frame.f_code.co_name, False
        while frame is not None:
            batch = frame.f_locals.get(where.batch)
            keys = batch.keys() if hasattr(batch, "keys") else ()
            if scale in keys or (keys and (where.names(batch) is not None or where.column in keys)):
                return batch
            found, frame = found or bool(keys), frame.f_back
        if not found and where.has_names:
            why = f"no caller of {function} has a microbatch in a variable {where.batch}"
            self.missed[_SCALE if scale else "names of sequences"] = why
        return None


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


def install(framework: str, *, steps: int = 1, report: Report = print_term) -> TermsWeighing:
    """Listen in a framework's training in this process; call it before the first step.

    ``steps``: how many training steps are weighed. Raises :class:`ContractError` for a framework
    without an integration in ``FRAMEWORKS``, or whose release has none of the functions of its row.
    """
    if framework not in FRAMEWORKS:
        raise ContractError(f"got {framework!r}, expected one of {', '.join(FRAMEWORKS)}")
    where: Where = importlib.import_module(FRAMEWORKS[framework]).HEARD
    weighing = _Weighing(where, steps, report=report)
    rebind_schedule(where.schedule, weighing, expected=f"the training of {framework} on Megatron")
    where.prepare()
    if method := _method(*where.reduces):
        owner, name, stock = method

        @functools.wraps(stock)
        def reduces(*args: Any, **kwargs: Any) -> Any:
            made = stock(*args, **kwargs)
            weighing.reduced()
            return made

        setattr(owner, name, reduces)
        weighing.is_reduced_later = True
    found = [row.module for row in where.reductions if _listens(weighing, row)]
    if not any(not name.startswith(f"{__package__}.") for name in found):
        wanted = ", ".join(f"{row.module}.{row.function}" for row in where.reductions)
        raise ContractError(f"got a {framework} without one of {wanted}: use a tested release")
    return weighing


def weigh_if_asked(framework: str) -> None:
    """Listen in the training of this process if it was asked to; a second call does nothing.

    Raises :class:`ContractError` where :func:`install` does.
    """
    if is_asked():
        _install_once(framework)


@cache
def _install_once(framework: str) -> None:
    install(framework)


def _method(module: str, function: str) -> tuple[Any, str, Any] | None:
    """Return a function with what has it and its name there; None if this release lacks it."""
    *path, name = function.split(".")
    try:
        owner: Any = importlib.import_module(module or "builtins")
        owner = operator.attrgetter(".".join(path))(owner) if path else owner
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError):
        return None


def _listens(weighing: _Weighing, row: Reduction) -> bool:
    """Listen in a function, if this release has it."""
    found = _method(row.module, row.function)
    if found is not None:
        owner, name, stock = found
        how = {"given": _given, "inside": _inside, "returned": _returned}[row.how]
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def heard(*args: Any, **kwargs: Any) -> Any:
            if not weighing.is_listening:
                return stock(*args, **kwargs)
            return how(weighing, row, stock, signature.bind(*args, **kwargs), sys._getframe(1))

        setattr(owner, name, heard)
    return found is not None


_Stock = Callable[..., Any]
_Given = inspect.BoundArguments


def _given(weighing: _Weighing, row: Reduction, stock: _Stock, given: _Given, frame: Any) -> Any:
    """Hear the losses that a function is given; ``frame``: of its caller."""
    losses, mask = given.arguments[row.losses], given.arguments.get(row.mask or "")
    if losses.dim() == 2:  # and not the means of sequences
        heard = weighing.hear_whole(losses, mask, None, frame, scale=row.scale)
        given.arguments[row.losses] = heard
    return stock(*given.args, **given.kwargs)


def _inside(weighing: _Weighing, row: Reduction, stock: _Stock, given: _Given, frame: Any) -> Any:
    """Hear the losses that a function makes."""
    with _Variables(weighing, row, inspect.unwrap(stock).__code__) as variables:
        made = stock(*given.args, **given.kwargs)
    if not variables.has_heard:
        names = f"{row.losses} and {row.mask}"
        weighing.missed[row.function] = f"no operation there took its variables {names}"
    return made


def _returned(weighing: _Weighing, row: Reduction, stock: _Stock, given: _Given, frame: Any) -> Any:
    """Hear the losses that a function of ours returns; nothing of what runs inside of it."""
    with weighing.paused():
        found = stock(*given.args, **given.kwargs)
    losses = getattr(found, row.losses).view(len(given.arguments["output"]), -1)
    losses = weighing.hear_whole(losses, None, None, sys._getframe(0), is_shared=False)
    return replace(found, **{row.losses: losses.view(-1)})


class _Variables(TorchFunctionMode):
    """Hears two variables of a function where an operation first takes both.

    For AReaL and ms-swift, which make their losses and reduce them in one function, so that no call
    passes them: the variables are read by their names in its frame. A call in which another name
    stands is reported, and a step in which nothing was heard is refused.
    """

    def __init__(self, weighing: _Weighing, row: Reduction, code: Any) -> None:
        super().__init__()
        self._weighing, self._row, self._code = weighing, row, code
        self.has_heard = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, on losses that are heard."""
        frame = sys._getframe(1)
        if frame.f_code is self._code and not self.has_heard:
            named = frame.f_locals
            losses, mask = named.get(self._row.losses), named.get(self._row.mask or "")
            is_reduced = all(any(x is one for one in args) for x in (losses, mask))
            if isinstance(losses, Tensor) and is_reduced:
                self.has_heard = True
                offsets = named.get(self._row.cu_seqlens)
                heard = self._weighing.hear_whole(
                    losses, mask, offsets, frame, scale=self._row.scale
                )
                args = tuple(heard if one is losses else one for one in args)
        return func(*args, **(kwargs or {}))


def _context_parallel() -> tuple[int, int]:
    from megatron.core import parallel_state

    size: int = parallel_state.get_context_parallel_world_size()
    return size, parallel_state.get_context_parallel_rank()
