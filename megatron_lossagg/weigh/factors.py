"""What is read from live objects: who holds which token, where f is measured, and what f should be.

``f`` is the same for all tokens of a step. Under Megatron: the gradient buffers' own
``gradient_scaling_factor``, and the mean of a collective that averages; that finalize divides by
num_tokens is of all ranks, and put in by ``compare``. Under torch's DistributedDataParallel: the
mean over its group.

Sources: ``contract/engine.py``; ``MegatronOptimizer.scale_loss`` of Megatron-Core;
``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from megatron_lossagg.contract.engine import engine_of, is_chunk
from megatron_lossagg.contract.finalize import HeldGradients, ListeningHook, own_finalize
from megatron_lossagg.contract.megatron_options import check_options
from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.weigh.parameters import Candidate


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

    def begin(
        self, on_finalize: Callable[[Tensor | None], None], after: Callable[[], None]
    ) -> None:
        """Watch the schedule call that follows; ``after``: when gradients are finalized."""

    def end(self) -> None:
        """Watch no longer."""

    def factor(self) -> float:
        """Return what f should be but for ``/ num_tokens``."""

    def scale(self) -> Tensor | None:
        """Return what the schedule multiplies a loss by now; no host sync."""

    def candidates(self) -> Iterator[Candidate]:
        """List the parameters at which f can be measured."""

    def of_microbatch(self, cp_group: ProcessGroup | None) -> Run:
        """Return the run with this rank's place in a microbatch, and its layout."""

    def layout(self, shape: tuple[int, ...], cu_seqlens: IntsLike | None) -> Layout:
        """Return whose tokens this rank's losses of a microbatch are."""


class MegatronRun:
    """A run of model chunks in one of Megatron's engines.

    Raises :class:`ContractError` for an option that changes which rank holds a token, such as
    hybrid context parallelism.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = chunks
        self._engines = [engine_of(chunk) for chunk in chunks]
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
        self._hook: ListeningHook | None = None

    def begin(
        self, on_finalize: Callable[[Tensor | None], None], after: Callable[[], None]
    ) -> None:
        """Watch the config's finalize function; without one, or held back, nobody finalizes."""
        config = self.chunks[0].config
        own = own_finalize(config)
        if own is not None and not isinstance(getattr(own, "__self__", None), HeldGradients):
            self._hook = ListeningHook(config, on_finalize, after)

    def end(self) -> None:
        """Put the config's own function back."""
        if self._hook is not None:
            self._hook.end()
            self._hook = None  # which knows who weighs, and so the copies of gradients

    def scale(self) -> Tensor | None:
        """Return the loss scale."""
        chunk = self.chunks[-1]
        if chunk.config.grad_scale_func is None:
            return None
        device = next((parameter.device for parameter in chunk.parameters()), None)
        scale: Tensor = chunk.config.grad_scale_func(torch.ones((), device=device))
        return scale

    def candidates(self) -> Iterator[Candidate]:
        """List the parameters of all chunks."""
        stage, tp_rank = dist.get_rank(self.groups.pp_group), dist.get_rank(self.groups.tp_group)
        for number, engine in enumerate(self._engines):
            splits_sequences = bool(engine.chunk.config.sequence_parallel)
            for name, parameter in engine.parameters():
                # Under sequence parallelism each of them has the gradient of its own tokens.
                is_summed = splits_sequences and getattr(parameter, "sequence_parallel", False)
                yield Candidate(
                    name=f"{number} {name}",
                    parameter=parameter,
                    place=(stage, -1 if is_summed else tp_rank),
                    engine=engine,
                )

    def factor(self) -> float:
        """Multiply the dense buffers' own factor and the collective's mean.

        Without dense buffers on this rank: what Megatron would give them.
        """
        chunk, size = self.chunks[-1], self.groups.dp_cp_size
        found = [one for each in self._engines for one in each.factors(of_experts=False)]
        if not found:
            return 1.0 if chunk.config.calculate_per_token_loss else 1 / size
        averages = getattr(chunk.ddp_config, "average_in_collective", False)
        return found[0] / (size if averages else 1)

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

    def __init__(self, group: dist.ProcessGroup | None, modules: Iterable[Any]) -> None:
        self._modules = [one for one in modules if isinstance(one, torch.nn.Module)]
        self._size = 1 if group is None else dist.get_world_size(group)
        sizes = {"DP": self._size, "CP": 1, "TP": 1, "PP": 1}
        dp_rank = 0 if group is None else dist.get_rank(group)
        self.place = Place(dp_rank=dp_rank, cp_rank=0, sizes=sizes, counts=True)

    def begin(
        self, on_finalize: Callable[[Tensor | None], None], after: Callable[[], None]
    ) -> None:
        """Count the step as finalized: the backward pass reduces."""
        on_finalize(None)

    def end(self) -> None:
        """Do nothing."""

    def scale(self) -> Tensor | None:
        """Return None: who calls backward says by what a loss was multiplied."""
        return None

    def candidates(self) -> Iterator[Candidate]:
        """List the parameters."""
        for number, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                yield Candidate(name=f"{number} {name}", parameter=parameter)

    def factor(self) -> float:
        """Return one over the size of the group."""
        return 1 / self._size

    def of_microbatch(self, cp_group: ProcessGroup | None) -> Run:
        """Return the run whose ranks of this group hold parts of the same sequences."""
        ranks = [] if cp_group is None else dist.get_process_group_ranks(cp_group)
        if len(ranks) < 2:
            return self
        run, size, sizes = copy(self), len(ranks), self.place.sizes
        is_next = max(ranks) - min(ranks) == size - 1
        run.place = replace(
            self.place,
            dp_rank=min(ranks) // (size if is_next else 1),
            cp_rank=dist.get_rank(cp_group),
            sizes={**sizes, "DP": self._size // size, "CP": size},
        )
        return run

    def layout(self, shape: tuple[int, ...], cu_seqlens: IntsLike | None) -> Layout:
        """Return the layout of packed sequences, or of a batch whose entries are sequences."""
        if cu_seqlens is not None and self.place.sizes["CP"] > 1:
            raise ContractError(
                "got cu_seqlens with a cp_group outside of Megatron, expected lengths=: pass how "
                "many tokens of each sequence this rank holds"
            )
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
        return TorchRun(model.process_group, [model])
    chunks = [*model] if isinstance(model, (list, tuple)) else [model]
    if chunks and all(map(is_chunk, chunks)):
        return MegatronRun(chunks)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ContractError(
            f"got {[type(chunk).__name__ for chunk in chunks]}, expected a model in Megatron's or "
            "torch's DistributedDataParallel, or in Megatron-FSDP: pass what the schedule gets, or "
            "what wraps the model"
        )
    return TorchRun(None, chunks)


def _offsets(cu_seqlens: IntsLike) -> Tensor:
    """Return offsets on the CPU; what Bridge pads them with, -1, is left out."""
    offsets = torch.as_tensor(cu_seqlens).detach().cpu().reshape(-1)
    return offsets[offsets >= 0]
