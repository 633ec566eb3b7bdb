"""What is read from live objects: who holds which token, where f is measured, and what f should be.

``f`` is the same for all tokens of a step. Under Megatron: the gradient buffers' own
``gradient_scaling_factor``, and the mean of a collective that averages; that finalize divides by
num_tokens is of all ranks, and put in by ``compare``. Under torch's DistributedDataParallel: the
mean over its group.

Sources: ``contract/engine.py``; ``MegatronOptimizer.scale_loss`` of Megatron-Core;
``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from megatron_lossagg.contract.engine import Engine, engine_of, is_chunk
from megatron_lossagg.contract.finalize import FinalizeHook, HeldGradients, own_finalize
from megatron_lossagg.contract.megatron_options import check_options
from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.weigh.causes import Added, Array
from megatron_lossagg.weigh.listen import number_of_pass


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank stands, and the sizes of the run."""

    dp_rank: int
    cp_rank: int
    sizes: dict[str, int]
    """DP, CP, TP and PP."""
    counts: bool
    """Whether this rank's tokens count: last pipeline stage, first tensor-parallel rank."""


class Run:
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


class MegatronRun(Run):
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
        self._hook: FinalizeHook | None = None

    def begin(
        self, on_finalize: Callable[[Tensor | None], None], after: Callable[[], None]
    ) -> None:
        """Watch the config's finalize function; without one, or held back, nobody finalizes."""
        config = self.chunks[0].config
        own = own_finalize(config)
        if own is not None and not isinstance(getattr(own, "__self__", None), HeldGradients):
            self._hook = FinalizeHook(config, on_finalize, after)

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
        return Run(model.process_group, [model])
    chunks = [*model] if isinstance(model, (list, tuple)) else [model]
    if chunks and all(map(is_chunk, chunks)):
        return MegatronRun(chunks)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ContractError(
            f"got {[type(chunk).__name__ for chunk in chunks]}, expected a model in Megatron's or "
            "torch's DistributedDataParallel, or in Megatron-FSDP: pass what the schedule gets, or "
            "what wraps the model"
        )
    return Run(None, chunks)


def _offsets(cu_seqlens: IntsLike) -> Tensor:
    """Return offsets on the CPU; -1, with which they may be padded, is left out."""
    offsets = torch.as_tensor(cu_seqlens).detach().cpu().reshape(-1)
    return offsets[offsets >= 0]


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
        return max(self.passes[:first]) if added[:first].any() else -1

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
