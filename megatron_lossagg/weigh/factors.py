"""What follows the gradient of a loss, read from live objects: f, and who holds which token.

``f`` is the same for all tokens of a step on a rank. Under Megatron: the gradient buffers' own
``gradient_scaling_factor``, the mean of a collective that averages, and one over the loss scale;
that finalize divides by num_tokens is of all ranks, and put in by ``compare``. Under torch's
DistributedDataParallel: the mean over its group.

Sources: ``DistributedDataParallel.__init__`` and ``MegatronOptimizer.scale_loss`` of Megatron-Core;
``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from megatron_lossagg.contract.finalize import FinalizeHook, own_finalize
from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.contract.held_gradients import HeldGradients
from megatron_lossagg.contract.megatron_options import check_options
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank stands, and the sizes of the run."""

    dp_rank: int
    cp_rank: int
    sizes: dict[str, int]
    """DP, CP, TP and PP."""
    counts: bool
    """Whether this rank's tokens count: last pipeline stage, first tensor-parallel rank."""


class Run(Protocol):
    """What weighing reads from a run."""

    place: Place

    def begin(self, on_finalize: Callable[[Tensor | None], None]) -> None:
        """Watch the schedule call that follows."""

    def end(self) -> None:
        """Watch no longer."""

    def factor(self) -> float:
        """Return f on this rank but for ``/ num_tokens``; waits for the device."""

    def of_microbatch(self, cp_group: ProcessGroup | None) -> Run:
        """Return the run with this rank's place in a microbatch, and its layout."""

    def layout(self, shape: tuple[int, ...], cu_seqlens: IntsLike | None) -> Layout:
        """Return whose tokens this rank's losses of a microbatch are."""


class MegatronRun:
    """A run of model chunks in Megatron's DistributedDataParallel.

    Raises :class:`ContractError` for an option that changes which rank holds a token, such as
    hybrid context parallelism.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = chunks
        config = chunks[0].config
        check_options(
            "model config",
            config,
            cp_size=config.context_parallel_size,
            counts_parts=True,
            only_moves=True,
        )
        self.groups = groups = LiveGroups.of(chunks)
        self.place = Place(
            dp_rank=dist.get_rank(groups.dp_group),
            cp_rank=groups.cp_rank,
            sizes={
                "DP": groups.dp_size,
                "CP": groups.cp_size,
                "TP": dist.get_world_size(groups.tp_group),
                "PP": dist.get_world_size(groups.pp_group),
            },
            counts=groups.is_last_stage and dist.get_rank(groups.tp_group) == 0,
        )
        self._hook: FinalizeHook | None = None
        self._scale: Tensor | None = None

    def begin(self, on_finalize: Callable[[Tensor | None], None]) -> None:
        """Watch the config's finalize function; without one, or held back, nobody finalizes."""
        config = self.chunks[0].config
        own = own_finalize(config)
        if own is not None and not isinstance(getattr(own, "__self__", None), HeldGradients):
            self._hook = FinalizeHook(config, on_finalize)

    def end(self) -> None:
        """Put the config's own function back, and keep the loss scale, which a step may change."""
        if self._hook is not None:
            self._hook.end()
            self._hook = None  # which knows who weighs, and so the copies of gradients
        chunk = self.chunks[-1]
        if chunk.config.grad_scale_func is not None:
            device = next((parameter.device for parameter in chunk.parameters()), None)
            self._scale = chunk.config.grad_scale_func(torch.ones((), device=device))

    def factor(self) -> float:
        """Multiply the dense buffers' own factor, the collective's mean and 1 / loss scale.

        Without dense buffers on this rank: what Megatron would give them.
        """
        chunk, size = self.chunks[-1], self.groups.dp_cp_size
        buffers = [buffer for each in self.chunks for buffer in each.buffers]
        factor = 1.0 if chunk.config.calculate_per_token_loss else 1 / size
        if buffers:
            factor = float(buffers[0].gradient_scaling_factor)
            if getattr(chunk.ddp_config, "average_in_collective", False):
                factor /= size
        return factor if self._scale is None else factor / float(self._scale)

    def of_microbatch(self, cp_group: ProcessGroup | None) -> Run:
        """Return this run, but with dynamic context parallelism, whose microbatches have groups.

        Its ``dp_rank`` is then of the group's first rank, over data- and context-parallel ranks.
        """
        if not self.groups.is_dynamic:
            return self
        if cp_group is None:
            raise ContractError(
                "got losses without a cp_group in a run with dynamic_context_parallel, expected "
                "the microbatch's own: pass packed_seq_params.cp_group, or drop the option"
            )
        run, cp_rank = copy(self), dist.get_rank(cp_group)
        size, first = dist.get_world_size(cp_group), dist.get_global_rank(cp_group, 0)
        run.groups = replace(self.groups, cp_group=cp_group, cp_size=size, cp_rank=cp_rank)
        dp_rank = dist.get_group_rank(self.groups.dp_cp_group, first)
        run.place = replace(self.place, dp_rank=dp_rank, cp_rank=cp_rank)
        return run

    def layout(self, shape: tuple[int, ...], cu_seqlens: IntsLike | None) -> Layout:
        """Return the layout of packed sequences, or of a batch whose entries are sequences."""
        groups = self.groups
        if cu_seqlens is not None:
            return groups.thd(_offsets(cu_seqlens))
        b, s = shape if len(shape) == 2 else (1, *shape)
        kind = Layout.bshd_contiguous if groups.split == "contiguous" else Layout.bshd_zigzag
        return kind(b, s * groups.cp_size, cp_size=groups.cp_size, cp_rank=groups.cp_rank)


class TorchRun:
    """A run of a model in torch's DistributedDataParallel, which averages over its group.

    ``group``: that group; None for a model on one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._size = 1 if group is None else dist.get_world_size(group)
        sizes = {"DP": self._size, "CP": 1, "TP": 1, "PP": 1}
        dp_rank = 0 if group is None else dist.get_rank(group)
        self.place = Place(dp_rank=dp_rank, cp_rank=0, sizes=sizes, counts=True)

    def begin(self, on_finalize: Callable[[Tensor | None], None]) -> None:
        """Count the step as finalized: the backward pass reduces."""
        on_finalize(None)

    def end(self) -> None:
        """Do nothing."""

    def factor(self) -> float:
        """Return one over the size of the group."""
        return 1 / self._size

    def of_microbatch(self, cp_group: ProcessGroup | None) -> Run:
        """Return this run."""
        return self

    def layout(self, shape: tuple[int, ...], cu_seqlens: IntsLike | None) -> Layout:
        """Return the layout of packed sequences, or of a batch whose entries are sequences."""
        if cu_seqlens is not None:
            return Layout.thd_zigzag(_offsets(cu_seqlens), cp_size=1, cp_rank=0)
        b, s = shape if len(shape) == 2 else (1, *shape)
        return Layout.bshd_zigzag(b, s, cp_size=1, cp_rank=0)


def run_of(model: Any) -> Run:
    """Return the run of a model in torch's DDP, or of a chunk or a list of chunks in Megatron's.

    Raises :class:`ContractError` for any other model of several processes: who adds up its
    gradients is not known.
    """
    if isinstance(model, DistributedDataParallel):
        size, world = dist.get_world_size(model.process_group), dist.get_world_size()
        if size != world:
            raise ContractError(
                f"got a model in torch's DistributedDataParallel over {size} of {world} ranks, "
                "expected all: who trains which sequence in other groups is not known"
            )
        return TorchRun(model.process_group)
    chunks = [*model] if isinstance(model, (list, tuple)) else [model]
    # torch's modules have a method of the name; FSDP's wrappers in Megatron have no such list.
    if chunks and all(isinstance(getattr(chunk, "buffers", None), list) for chunk in chunks):
        return MegatronRun(chunks)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ContractError(
            f"got {[type(chunk).__name__ for chunk in chunks]}, expected a model in Megatron's or "
            "torch's DistributedDataParallel: pass what the schedule gets, or what wraps the model"
        )
    return TorchRun(None)


def _offsets(cu_seqlens: IntsLike) -> Tensor:
    """Return offsets on the CPU; what Bridge pads them with, -1, is left out."""
    offsets = torch.as_tensor(cu_seqlens).detach().cpu().reshape(-1)
    return offsets[offsets >= 0]
