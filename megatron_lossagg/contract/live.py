"""What is read from the live, wrapped model chunks, and what of it is refused.

The loss scaling is frozen in two places when a model is built and wrapped (DDP's
``gradient_scaling_factor``, every MoE router) and read live in two (schedule, finalize):
all must agree. Groups are the chunks' own. Which options are rejected is in
:mod:`megatron_lossagg.contract.megatron_options`. Symbols: ``DistributedDataParallel.__init__``,
``TransformerConfig``, ``LanguageModule.__init__``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.contract.megatron_options import check_options
from megatron_lossagg.contract.scaling import LossScaling, ddp_factor
from megatron_lossagg.errors import ContractError

__all__ = [
    "Frozen",
    "LiveGroups",
    "checked_loss_scaling",
    "is_megatrons_finalize",
    "is_rerunning",
    "may_hold_back",
    "megatron_version",
    "note_on_side_losses",
    "unwrapped",
]

_OLDEST_MEGATRON = (0, 13)
_MOE_FREE_OF_CP = {"average": (0, 16), "per_token": (0, 19)}
"""The release from which the gradient of the MoE side losses does not depend on CP."""
_MTP_NEVER_FREE_OF_CP = (0, 17)
"""The release from which MTP's gradient depends on CP in both loss scalings."""

_FLIPPED = (
    "the loss scaling is frozen when the model is built and wrapped; set "
    "--calculate-per-token-loss before that and leave it"
)


def megatron_version() -> str:
    """Return the version of the Megatron-Core that is imported."""
    import megatron.core

    return str(megatron.core.__version__)


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", megatron_version())[:2])


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
    """None if a microbatch has a group of its own (dynamic context parallelism)."""
    cp_size: int
    cp_rank: int
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    is_last_stage: bool
    """Whether this rank's pipeline stage calls loss_func."""

    @staticmethod
    def of(chunks: Sequence[Any]) -> LiveGroups:
        """Read the groups; raises :class:`ContractError` if they contradict one another."""
        first = chunks[0]
        dp, dp_cp = _ranks(first.dp_group), _ranks(first.dp_cp_group)
        for name in ("dp_group", "dp_cp_group", "pp_group"):
            expected = _ranks(getattr(first, name))
            for index, chunk in enumerate(chunks):
                found = _ranks(getattr(chunk, name))
                if found != expected:
                    raise ContractError(
                        f"chunk {index} has ranks {list(found)} in its {name}, chunk 0 "
                        f"{list(expected)}: wrap all chunks of a rank with the same groups"
                    )
        cp_group = _model_group(first, "cp")
        cp = _ranks(cp_group)
        size = int(first.config.context_parallel_size)
        is_product = set(cp) <= set(dp_cp) and len(cp) * len(dp) == len(dp_cp)
        if len(cp) != size or not is_product or set(cp) & set(dp) != {dist.get_rank()}:
            raise ContractError(
                f"context parallelism of size {size} in the config, over ranks {list(cp)}, does "
                f"not split the chunk's data-parallel ranks {list(dp_cp)} into groups such as "
                f"{list(dp)}: build model and DistributedDataParallel with the same groups"
            )
        groups = LiveGroups(
            dp_cp_group=first.dp_cp_group,
            dp_group=first.dp_group,
            dp_size=len(dp),
            dp_cp_size=len(dp_cp),
            cp_group=cp_group,
            cp_size=size,
            cp_rank=cp.index(dist.get_rank()),
            tp_group=_model_group(first, "tp"),
            pp_group=first.pp_group,
            is_last_stage=_ranks(first.pp_group)[-1] == dist.get_rank(),
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
            )
        return groups


def unwrapped(chunk: Any) -> Any:
    """Return the model inside its wrappers (DDP, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _model_group(chunk: Any, name: Literal["cp", "tp"]) -> ProcessGroup:
    """Return a group that the model was built with (the model keeps them from 0.14 on)."""
    groups = getattr(unwrapped(chunk), "pg_collection", None)
    group: ProcessGroup | None = getattr(groups, name, None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    global_groups = {
        "cp": parallel_state.get_context_parallel_group,
        "tp": parallel_state.get_tensor_model_parallel_group,
    }
    global_group: ProcessGroup = global_groups[name]()
    return global_group


def checked_loss_scaling(chunks: Sequence[Any], *, counts_parts: bool = False) -> LossScaling:
    """Refuse what cannot be compensated; return the loss scaling of the first chunk's config.

    ``counts_parts``: as in :func:`check_options`.
    """
    if _release() < _OLDEST_MEGATRON:
        raise ContractError(
            f"megatron-core {megatron_version()}: before 0.13 num_tokens is reduced over a "
            "different group and the schedule multiplies by CP: install megatron-core>=0.13"
        )
    if not chunks:
        raise ContractError("got no model chunk: pass the chunks that the schedule gets")
    for chunk in chunks:
        _check_wrapper(chunk)
    config = chunks[0].config
    check_options(
        "model config",
        config,
        cp_size=int(config.context_parallel_size),
        num_chunks=len(chunks),
        counts_parts=counts_parts,
    )
    return "per_token" if config.calculate_per_token_loss else "average"


def _check_wrapper(chunk: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel

    kind = type(chunk).__name__
    # torch's fully_shard makes a subclass of what it shards.
    is_fsdp = "fsdp" in f"{type(chunk).__module__}.{kind}".lower() or "FullyShard" in kind
    if is_fsdp or not isinstance(chunk, DistributedDataParallel):
        raise ContractError(
            f"got a {kind}, expected Megatron-Core's DistributedDataParallel: pass "
            "the wrapped chunks that the schedule gets, after wrapping; Megatron-FSDP and FSDP2 "
            "reduce gradients by rules of their own that are not compensated here"
        )


@dataclass(frozen=True)
class _FrozenChunk:
    """What one chunk keeps of the loss scaling that it was built in."""

    chunk: Any
    scaled: tuple[Any, ...]
    """Gradient buffers and their buckets: DDP scales by each bucket's own copy."""
    modules: tuple[tuple[str, Any], ...]
    """Those with a ``calculate_per_token_loss`` of their own: MoE routers."""


class Frozen:
    """What construction froze, found once, so that a step compares no more than that.

    :meth:`of` walks every module of the chunks; :meth:`check` only what it found. A module
    that is added or replaced afterwards is not seen. Neither communicates.
    """

    def __init__(
        self, chunks: Sequence[_FrozenChunk], loss_scaling: LossScaling, cp_size: int
    ) -> None:
        self._chunks = tuple(chunks)
        self._loss_scaling = loss_scaling
        self._cp_size = cp_size

    @staticmethod
    def of(chunks: Sequence[Any], loss_scaling: LossScaling) -> Frozen:
        """Find buffers, buckets and routers, and compare them for the first time."""
        found = []
        for chunk in chunks:
            # In the average loss scaling DDP gives experts a factor of their own.
            experts = chunk.expert_parallel_buffers if loss_scaling == "per_token" else []
            buffers = [*chunk.buffers, *experts]
            scaled = (*buffers, *(bucket for buffer in buffers for bucket in buffer.buckets))
            modules = tuple(
                (name, module)
                for name, module in chunk.named_modules()
                if isinstance(getattr(module, "calculate_per_token_loss", None), bool)
            )
            found.append(_FrozenChunk(chunk, scaled, modules))
        frozen = Frozen(found, loss_scaling, int(chunks[0].config.context_parallel_size))
        frozen.check()
        return frozen

    def check(self) -> None:
        """Compare with the live configs; raises :class:`ContractError` if they differ."""
        per_token = self._loss_scaling == "per_token"
        for index, frozen in enumerate(self._chunks):
            chunk, config = frozen.chunk, frozen.chunk.config
            if bool(config.calculate_per_token_loss) != per_token:
                raise ContractError(
                    f"calculate_per_token_loss is {config.calculate_per_token_loss} in the config "
                    f"of chunk {index}, the model was wrapped in the {self._loss_scaling} "
                    f"loss scaling: {_FLIPPED}"
                )
            if config.context_parallel_size != self._cp_size:
                raise ContractError(
                    f"context_parallel_size is {config.context_parallel_size} in the config of "
                    f"chunk {index}, the LossAggregator was made at {self._cp_size}: groups and "
                    "layouts are read once; leave it, and eval_context_parallel_size of "
                    "Megatron-Bridge unset"
                )
            size = dist.get_world_size(chunk.dp_cp_group)
            averages = bool(chunk.ddp_config.average_in_collective)
            if per_token and averages:
                raise ContractError(
                    f"average_in_collective is True in the ddp_config of chunk {index} in the "
                    "per-token loss scaling, which sums: gradients would be divided by DP CP; "
                    "leave it False"
                )
            expected = ddp_factor(self._loss_scaling, size, average_in_collective=averages)
            factors = {part.gradient_scaling_factor for part in frozen.scaled}
            if factors - {expected}:
                raise ContractError(
                    f"chunk {index} scales gradients by {sorted(factors)}, the "
                    f"{self._loss_scaling} loss scaling over {size} ranks scales by {expected}: "
                    f"{_FLIPPED}"
                )
            for name, module in frozen.modules:
                if module.calculate_per_token_loss != per_token:
                    raise ContractError(
                        f"{name} was built with calculate_per_token_loss="
                        f"{module.calculate_per_token_loss}, the config now has {per_token}: "
                        f"{_FLIPPED}"
                    )


def is_megatrons_finalize(function: Any) -> bool:
    """Whether a finalize function is Megatron-Core's own, or a partial of it."""
    from megatron.core.distributed import finalize_model_grads

    while isinstance(function, partial):
        function = function.func
    return function is finalize_model_grads


def may_hold_back(no_sync: Any, chunks: Sequence[Any]) -> bool:
    """Whether a no_sync_func may hold back the reduction of these chunks' gradients.

    That of a different model does not, nor ``nullcontext``; what others do is not known.
    """
    while isinstance(no_sync, partial):
        no_sync = no_sync.func
    owner = getattr(no_sync, "__self__", None)
    is_of_others = hasattr(owner, "ddp_config") and all(owner is not chunk for chunk in chunks)
    return no_sync is not None and no_sync is not nullcontext and not is_of_others


def note_on_side_losses(config: Any, loss_scaling: LossScaling) -> str:
    """Say which of stock's side losses depend on CP here; empty if none does.

    MTP's does, but in the per-token loss scaling before megatron-core 0.17. Those of MoE routers do
    before 0.16 in the average loss scaling, and before 0.19 in the per-token loss scaling.
    """
    release = _release()
    coefficients = getattr(config, "moe_aux_loss_coeff", 0)
    is_balanced = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    has_moe = bool(config.num_moe_experts and (is_balanced or config.moe_z_loss_coeff))
    remedies = {}
    if config.mtp_num_layers and (loss_scaling == "average" or release >= _MTP_NEVER_FREE_OF_CP):
        has_remedy = not has_moe and release < _MTP_NEVER_FREE_OF_CP
        remedies["MTP"] = (
            "train with --calculate-per-token-loss"
            if has_remedy
            else "compare runs at one CP size only"
        )
    if has_moe and release < _MOE_FREE_OF_CP[loss_scaling]:
        major, minor = _MOE_FREE_OF_CP[loss_scaling]
        remedies["MoE"] = f"install megatron-core>={major}.{minor}"
    if not remedies:
        return ""
    return (
        f"side losses ({' and '.join(remedies)}) are Megatron's own and no --loss-aggregation "
        f"changes them; in the {loss_scaling} loss scaling of megatron-core "
        f"{megatron_version()} their gradient depends on CP: {' and '.join(remedies.values())}"
    )


def is_rerunning() -> bool:
    """Whether Megatron's rerun machine runs a step again (``RerunState``, from 0.9 on)."""
    from megatron.core import rerun_state_machine

    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return machine is not None and "RERUNNING" in machine.state.name
