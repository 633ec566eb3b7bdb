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
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import _weigh_skyrl, areal
from megatron_lossagg.integrations._verl_batch import names_of
from megatron_lossagg.integrations._weigh_terms import TermsWeighing, print_term
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
    prepare: Callable[[], None] = lambda: None
    """What it needs in this process beforehand."""
    has_pieces: bool = False
    """Whether it calls its loss function for each sequence of a microbatch."""
    synced_by: str = ""
    """A method, by its class in that module, that reduces gradients after the schedule."""


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
        prepare=_weigh_skyrl.carry,
        synced_by="MegatronModelWrapper.run_pending_grad_sync",
    ),
    "nemo-rl": Where(
        "nemo_rl.models.megatron.train",
        [Reduction("nemo_rl.algorithms.loss.loss_functions", "masked_mean", "values", None)],
        sums_gradients=True,
        has_pieces=True,
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
    ),
}
"""What is heard of each framework, and under a mode of ours."""


class _Weighing(TermsWeighing):
    """Weighs each term of a framework's loss, from losses of whole sequences."""

    def __init__(self, where: Where, at: int, steps: int, *, report: Report) -> None:
        super().__init__(at, steps, report=report)
        self.where, self.has_pieces = where, where.has_pieces
        self.is_synced_later = False
        self._open: Weighing | None = None
        """What weighs a step whose gradients are not reduced yet."""

    def _weigh(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        if not self.is_synced_later:
            return super()._weigh(schedule, call)
        chunks = [*call["model"]]
        with ExitStack() as stack:
            self._open = stack.enter_context(self._begun(chunks, call["num_microbatches"]))
            out = self._listen(self._open, schedule, call, chunks[-1])
            stack.pop_all()
        return out

    def synced(self) -> None:
        """End the step whose gradients were reduced just now."""
        weighing, self._open = self._open, None
        if weighing is not None:
            weighing.finalized()
            weighing.__exit__()
            self._end(weighing)

    def _begun(self, chunks: Sequence[Any], num_microbatches: int) -> Weighing:
        cp_size, _ = _context_parallel()
        scale = 1 / cp_size if self.where.sums_gradients else 1.0
        return Weighing(chunks, num_microbatches=num_microbatches, loss_scale=scale)

    def _trained(self, terms: dict[str, Weighed]) -> dict[str, Weighed]:
        if not any(step.sequences for step in terms.values()):
            names = ", ".join(row.function for row in self.where.reductions)
            raise ContractError(
                f"got a step whose losses no one of {names} reduced, expected one: this loss is "
                "not weighed here (docs/weigh.md); train it without weighing"
            )
        return terms

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
        batch = _batch(frame, self.where, scale)
        names = None if batch is None else self.where.names(batch)
        heard = self.hear(
            losses.new_zeros(len(index), requires_grad=losses.requires_grad),
            None if mask is None else mask.reshape(-1)[index],
            lengths=np.bincount(sequences, minlength=len(lengths)).tolist(),
            frame=frame,
            names=names if names and len(names) == len(lengths) else None,
        )
        if scale and batch is not None:
            heard = heard * batch[scale].expand_as(losses).reshape(-1)[index].to(heard)
        return losses.reshape(-1).index_add(0, index, heard).view_as(losses)


def install(
    framework: str, at: int = 1, steps: int = 1, *, report: Report = print_term
) -> TermsWeighing:
    """Listen in a framework's training in this process; call it before the first step.

    Raises :class:`ContractError` for a framework that has no function of ``FRAMEWORKS``.
    """
    if framework not in FRAMEWORKS:
        raise ContractError(f"got {framework!r}, expected one of {', '.join(FRAMEWORKS)}")
    where = FRAMEWORKS[framework]
    weighing = _Weighing(where, at, steps, report=report)
    rebind_schedule(where.schedule, weighing, expected=f"the training of {framework} on Megatron")
    where.prepare()
    weighing.is_synced_later = bool(where.synced_by) and _syncs(weighing)
    found = [row.module for row in where.reductions if _listens(weighing, row)]
    if not any(not name.startswith(_OURS) for name in found):
        wanted = ", ".join(f"{row.module}.{row.function}" for row in where.reductions)
        raise ContractError(f"got a {framework} without one of {wanted}: use a tested release")
    return weighing


def _listens(weighing: _Weighing, row: Reduction) -> bool:
    """Listen in a function, if this release has it."""
    *path, name = row.function.split(".")
    try:
        module: Any = importlib.import_module(row.module)
        owner = operator.attrgetter(".".join(path))(module) if path else module
        stock = getattr(owner, name)
    except (ImportError, AttributeError):
        return False
    make = {"given": _given, "inside": _inside, "returned": _returned}[row.how]
    setattr(owner, name, make(weighing, row, stock))
    return True


def _syncs(weighing: _Weighing) -> bool:
    """End a step where gradients are reduced after it, if this release does that."""
    owner, name = weighing.where.synced_by.split(".")
    kind = getattr(importlib.import_module(weighing.where.schedule), owner)
    stock = getattr(kind, name, None)
    if stock is None:
        return False

    @functools.wraps(stock)
    def synced(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        weighing.synced()
        return out

    setattr(kind, name, synced)
    return True


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
        with _Variables(weighing, row, inspect.unwrap(stock).__code__):
            return stock(*args, **kwargs)

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
    """Hears two variables of a function where an operation first takes both."""

    def __init__(self, weighing: _Weighing, row: Reduction, code: Any) -> None:
        super().__init__()
        self._weighing, self._row, self._code = weighing, row, code
        self._has_heard = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, on losses that are heard."""
        frame = sys._getframe(1)
        if frame.f_code is self._code and not self._has_heard:
            named = frame.f_locals
            losses, mask = named.get(self._row.losses), named.get(self._row.mask or "")
            is_reduced = all(any(x is one for one in args) for x in (losses, mask))
            if isinstance(losses, Tensor) and is_reduced:
                self._has_heard = True
                offsets = named.get(self._row.cu_seqlens)
                heard = self._weighing.hear_whole(
                    losses, mask, offsets, frame, scale=self._row.scale
                )
                args = tuple(heard if one is losses else one for one in args)
        return func(*args, **(kwargs or {}))


def _batch(frame: Any, where: Where, scale: str) -> Any:
    """Return the nearest microbatch of a framework that has names or the scale."""
    while frame is not None:
        batch = frame.f_locals.get(where.batch)
        keys = batch.keys() if hasattr(batch, "keys") else ()
        if scale in keys or (keys and where.names(batch) is not None):
            return batch
        frame = frame.f_back
    return None


def _context_parallel() -> tuple[int, int]:
    from megatron.core import parallel_state

    size: int = parallel_state.get_context_parallel_world_size()
    return size, parallel_state.get_context_parallel_rank()
