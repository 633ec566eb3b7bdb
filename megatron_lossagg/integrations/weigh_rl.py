"""Weigh verl, SkyRL, NeMo-RL, AReaL and ms-swift: which weight each token gets, in each term.

``LOSSAGG_WEIGH=1`` in the environment, with our integration of all but ms-swift. Or in the process
that trains, before its first step::

    from megatron_lossagg.integrations import weigh_rl

    weigh_rl.install("ms-swift")

The first training step is weighed, and rank 0 prints a report for each term of the loss. Their
code runs as it is: one function of each gets the per-token losses, and ``FRAMEWORKS`` says which.

With context parallelism every rank has the losses of whole sequences. Each rank hears every CP-th
of them. What a rank's gradient is worth depends on how a framework gathers log-probabilities: if
only a rank's own have a gradient, the weight is what one rank hears; if the gather sums gradients
over the ranks, CP times as much.

Sources: verl 0.9.1 ``agg_loss``, ``postprocess_thd_engine``; SkyRL a9564572 ``reduce_loss``,
``AllGatherPackedCPTensor``; NeMo-RL ``masked_mean``, ``AllGatherCPTensor``; AReaL 4aef98d8
``ppo_actor_loss_fn``, ``reassemble_cp_packed_logprobs``; ms-swift 4.6.0
``MegatronGRPOTrainer.loss_func``, ``reconstruct_tensor_cp``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import _weigh_skyrl, areal
from megatron_lossagg.integrations._weigh_terms import TermsWeighing, print_term
from megatron_lossagg.integrations.verl import names_of
from megatron_lossagg.integrations.weigh_script import Report, rebind_schedule
from megatron_lossagg.weigh.compare import Weighed
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


_SCALE = "what losses were multiplied by"
_OURS, _SKYRL = "megatron_lossagg.integrations", "skyrl.backends.skyrl_train"
_SKYRL_WORKER = f"{_SKYRL}.workers.megatron.megatron_model_wrapper"
_SWIFT = "swift.megatron.trainers"

FRAMEWORKS: Mapping[str, Where] = {
    "verl": Where(
        "verl.workers.engine.megatron.transformer_impl",
        [
            Reduction("verl.trainer.ppo.core_algos", "agg_loss", "loss_mat", "loss_mask"),
            Reduction("verl.workers.utils.losses", "agg_loss", "loss_mat", "loss_mask"),
            Reduction("verl.trainer.distillation.losses", "agg_loss", "loss_mat", "loss_mask"),
            Reduction(f"{_OURS}.verl", "_Microbatch.agg_loss", "loss_mat", "loss_mask"),
        ],
        sums_gradients=False,
        names=names_of,
    ),
    "skyrl": Where(
        _SKYRL_WORKER,
        [
            Reduction(
                *(f"{_SKYRL}.utils.ppo_utils", "reduce_loss", "loss", "loss_mask"),
                scale=_weigh_skyrl.SCALE,
            ),
            Reduction(_SKYRL_WORKER, "masked_mean", "tensor", "mask"),
        ],
        sums_gradients=False,
        ids=_weigh_skyrl.ids_of,
        column=_weigh_skyrl.IDS,
        reduces=(_SKYRL_WORKER, "MegatronModelWrapper.run_pending_grad_sync"),
        prepare=_weigh_skyrl.carry,
    ),
    "nemo-rl": Where(
        "nemo_rl.models.megatron.train",
        [Reduction("nemo_rl.algorithms.loss.loss_functions", "masked_mean", "values", None)],
        sums_gradients=True,
        has_names=False,
        is_by_call=True,
    ),
    "areal": Where(
        "areal.engine.megatron_engine",
        [
            Reduction(
                *("areal.trainer.ppo.actor", "ppo_actor_loss_fn", "pg_loss", "loss_mask"),
                how="inside",
                cu_seqlens="cu_seqlens",
                scale=areal.SCALE,
            )
        ],
        sums_gradients=True,
        batch="input_data",
        ids=areal.ids_of,
        column=areal.PROMPT,
    ),
    "ms-swift": Where(
        f"{_SWIFT}.base",
        [
            Reduction(
                *(f"{_SWIFT}.grpo_trainer", "MegatronGRPOTrainer.loss_func"),
                *("per_token_loss", "completion_mask", "inside"),
            ),
            Reduction(f"{_OURS}.ms_swift_grpo", "GRPOIntegration.loss", "losses", None, "returned"),
        ],
        sums_gradients=False,
        has_names=False,
    ),
}
"""What is heard of each framework, and under a mode of ours."""


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


def install(framework: str, *, steps: int = 1, report: Report = print_term) -> TermsWeighing:
    """Listen in a framework's training in this process; call it before the first step.

    ``steps``: how many training steps are weighed. Raises :class:`ContractError` for a framework
    that has no function of ``FRAMEWORKS``.
    """
    if framework not in FRAMEWORKS:
        raise ContractError(f"got {framework!r}, expected one of {', '.join(FRAMEWORKS)}")
    where = FRAMEWORKS[framework]
    weighing = _Weighing(where, steps, report=report)
    rebind_schedule(where.schedule, weighing, expected=f"the training of {framework} on Megatron")
    where.prepare()
    if method := _method(*where.reduces):
        owner, name, stock = method
        setattr(owner, name, _reducing(weighing, stock))
        weighing.is_reduced_later = True
    found = [row.module for row in where.reductions if _listens(weighing, row)]
    if not any(not name.startswith(_OURS) for name in found):
        wanted = ", ".join(f"{row.module}.{row.function}" for row in where.reductions)
        raise ContractError(f"got a {framework} without one of {wanted}: use a tested release")
    return weighing


def _method(module: str, function: str) -> tuple[Any, str, Any] | None:
    """Return a function with what has it and its name there; None if this release lacks it."""
    *path, name = function.split(".")
    try:
        owner: Any = importlib.import_module(module or "builtins")
        owner = operator.attrgetter(".".join(path))(owner) if path else owner
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError):
        return None


def _reducing(weighing: _Weighing, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Report a step once its gradients are reduced."""

    @functools.wraps(stock)
    def reduces(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        weighing.reduced()
        return made

    return reduces


def _listens(weighing: _Weighing, row: Reduction) -> bool:
    """Listen in a function, if this release has it."""
    found = _method(row.module, row.function)
    if found is not None:
        owner, name, stock = found
        make = {"given": _given, "inside": _inside, "returned": _returned}[row.how]
        setattr(owner, name, make(weighing, row, stock))
    return found is not None


def _given(weighing: _Weighing, row: Reduction, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hear the losses that a function is given."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def heard(*args: Any, **kwargs: Any) -> Any:
        if not weighing.is_listening:
            return stock(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        losses, mask = given.arguments[row.losses], given.arguments.get(row.mask or "")
        if losses.dim() == 2:  # and not the means of sequences
            frame = sys._getframe(1)
            given.arguments[row.losses] = weighing.hear_whole(
                losses, mask, None, frame, scale=row.scale
            )
        return stock(*given.args, **given.kwargs)

    return heard


def _inside(weighing: _Weighing, row: Reduction, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hear the losses that a function makes."""

    @functools.wraps(stock)
    def heard(*args: Any, **kwargs: Any) -> Any:
        if not weighing.is_listening:
            return stock(*args, **kwargs)
        with _Variables(weighing, row, inspect.unwrap(stock).__code__) as variables:
            made = stock(*args, **kwargs)
        if not variables.has_heard:
            names = f"{row.losses} and {row.mask}"
            weighing.missed[row.function] = f"no operation there took its variables {names}"
        return made

    return heard


def _returned(weighing: _Weighing, row: Reduction, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hear the losses that a function of ours returns; nothing of what runs inside of it."""

    @functools.wraps(stock)
    def heard(self: Any, loss_func: Any, output: Tensor) -> Any:
        if not weighing.is_listening:
            return stock(self, loss_func, output)
        with weighing.paused():
            found = stock(self, loss_func, output)
        losses = getattr(found, row.losses).view(len(output), -1)
        losses = weighing.hear_whole(losses, None, None, sys._getframe(0), is_shared=False)
        return replace(found, **{row.losses: losses.view(-1)})

    return heard


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
