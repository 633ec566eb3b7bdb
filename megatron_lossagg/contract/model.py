"""What is read from the live, wrapped model chunks: their loss scaling, and their process groups.

Which options are rejected is in ``megatron_options.py``, what an engine is asked in ``engine.py``.
Symbols: ``TransformerConfig``, ``rerun_state_machine``, ``pg_collection``, ``parallel_state``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.contract.engine import engine_of, model_group
from megatron_lossagg.contract.megatron_options import (
    check_options,
    megatron_release,
    megatron_version,
)
from megatron_lossagg.contract.scaling import LossScaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout

_OLDEST_MEGATRON = (0, 13)


def checked_loss_scaling(chunks: Sequence[Any], *, counts_parts: bool = False) -> LossScaling:
    """Refuse what cannot be compensated; return the loss scaling of the first chunk's config.

    ``counts_parts``: as in :func:`check_options`.
    """
    if megatron_release() < _OLDEST_MEGATRON:
        raise ContractError(
            f"megatron-core {megatron_version()}: before 0.13 num_tokens is reduced over a "
            "different group and the schedule multiplies by CP: install megatron-core>=0.13"
        )
    if not chunks:
        raise ContractError("got no model chunk: pass the chunks that the schedule gets")
    for chunk in chunks:
        if fault := engine_of(chunk).fault():
            raise ContractError(fault)
    config = chunks[0].config
    check_options(
        "model config",
        config,
        cp_size=int(config.context_parallel_size),
        num_chunks=len(chunks),
        counts_parts=counts_parts,
    )
    return "per_token" if config.calculate_per_token_loss else "average"


def may_hold_back(no_sync: Any, chunks: Sequence[Any]) -> bool:
    """Whether a no_sync_func may hold back the reduction of these chunks' gradients.

    That of a different model does not, nor ``nullcontext``; what others do is not known.
    """
    while isinstance(no_sync, partial):
        no_sync = no_sync.func
    owner = getattr(no_sync, "__self__", None)
    is_of_others = hasattr(owner, "ddp_config") and all(
        owner is not module for chunk in chunks for module in engine_of(chunk).modules
    )
    return no_sync is not None and no_sync is not nullcontext and not is_of_others


def is_rerunning() -> bool:
    """Whether Megatron's rerun machine runs a step again (``RerunState``, from 0.9 on)."""
    from megatron.core import rerun_state_machine

    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return machine is not None and "RERUNNING" in machine.state.name


@dataclass(frozen=True, kw_only=True)
class LiveGroups:
    """The chunks' own process groups, as far as a loss needs them."""

    dp_cp_group: ProcessGroup
    """The dense data-parallel group with context parallelism."""
    dp_group: ProcessGroup
    """The dense data-parallel group without context parallelism."""
    dp_size: int
    dp_cp_size: int
    cp_group: ProcessGroup | None
    """None if ``is_dynamic``."""
    cp_size: int
    cp_rank: int
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    is_last_stage: bool
    """Whether this rank's pipeline stage calls loss_func."""
    split: Literal["zigzag", "contiguous"]
    """How a packed buffer is split over context-parallel ranks: two chunks of each sequence, or one
    interval of the buffer."""
    is_dynamic: bool = False
    """Whether a microbatch has a context-parallel group of its own (dynamic context parallelism),
    so that each rank counts its parts of sequences."""

    @staticmethod
    def of(chunks: Sequence[Any]) -> LiveGroups:
        """Read the groups; raises :class:`ContractError` if they contradict one another."""
        first, engines = chunks[0], [engine_of(chunk) for chunk in chunks]
        engine = engines[0]
        dp, dp_cp = _ranks(engine.dp_group), _ranks(engine.dp_cp_group)
        for name in ("dp_group", "dp_cp_group", "pp_group"):
            expected = _ranks(getattr(engine, name))
            for index, other in enumerate(engines):
                found = _ranks(getattr(other, name))
                if found != expected:
                    raise ContractError(
                        f"chunk {index} has ranks {list(found)} in its {name}, chunk 0 "
                        f"{list(expected)}: wrap all chunks of a rank with the same groups"
                    )
        cp_group = model_group(first, "cp")
        cp = _ranks(cp_group)
        size = int(first.config.context_parallel_size)
        is_product = set(cp) <= set(dp_cp) and len(cp) * len(dp) == len(dp_cp)
        if len(cp) != size or not is_product or set(cp) & set(dp) != {dist.get_rank()}:
            raise ContractError(
                f"context parallelism of size {size} in the config, over ranks {list(cp)}, does "
                f"not split the chunk's data-parallel ranks {list(dp_cp)} into groups such as "
                f"{list(dp)}: build and wrap the model with the same groups"
            )
        groups = LiveGroups(
            dp_cp_group=engine.dp_cp_group,
            dp_group=engine.dp_group,
            dp_size=len(dp),
            dp_cp_size=len(dp_cp),
            cp_group=cp_group,
            cp_size=size,
            cp_rank=cp.index(dist.get_rank()),
            tp_group=model_group(first, "tp"),
            pp_group=engine.pp_group,
            is_last_stage=_ranks(engine.pp_group)[-1] == dist.get_rank(),
            split=_split(first.config, size),
        )
        if getattr(first.config, "dynamic_context_parallel", False):
            # A rank's part of a sequence is counted as a sequence of its own, over all ranks.
            return replace(
                groups,
                dp_group=groups.dp_cp_group,
                dp_size=groups.dp_cp_size,
                cp_group=None,
                cp_size=1,
                cp_rank=0,
                split=_split(first.config, groups.dp_cp_size),
                is_dynamic=True,
            )
        return groups

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the last pipeline stage, which counts the steps."""
        of_stage = dist.get_rank(self.tp_group) + dist.get_rank(self.dp_cp_group)
        return self.is_last_stage and of_stage == 0

    def thd(self, cu_seqlens_padded: IntsLike) -> Layout:
        """Return the layout of packed sequences for this rank; a CUDA tensor costs one host sync.

        ``Layout.thd_contiguous`` if the model's ``cp_partition_mode`` is ``contiguous``, else
        ``Layout.thd_zigzag``.
        """
        kind = Layout.thd_contiguous if self.split == "contiguous" else Layout.thd_zigzag
        return kind(cu_seqlens_padded, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def local(self, sequence_lengths_here: IntsLike) -> Layout:
        """Return ``Layout.local`` for this rank: mask and losses are already its own."""
        return Layout.local(sequence_lengths_here, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def sliced(self, lengths: Sequence[int]) -> Layout:
        """Return ``Layout.local`` for packed sequences that the framework has sliced already.

        ``lengths``: of the whole, padded sequences. The part is what :meth:`thd` would take.
        """
        if self.split == "zigzag":
            return self.local([length // self.cp_size for length in lengths])
        return self.local(self.thd([0, *itertools.accumulate(lengths)]).local_lengths)


def _split(config: Any, cp_size: int) -> Literal["zigzag", "contiguous"]:
    mode = getattr(config, "cp_partition_mode", "zigzag")
    return "contiguous" if mode == "contiguous" and cp_size > 1 else "zigzag"


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
