"""What is read from the live, wrapped model chunks, and what of it is refused.

The regime is frozen in two places when a model is built and wrapped (DDP's
``gradient_scaling_factor``, every MoE router) and read live in two (schedule, finalize):
all must agree. Groups are the chunks' own. Symbols: ``DistributedDataParallel.__init__``,
``TransformerConfig``, ``LanguageModule.__init__``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError
from megatron_lossagg.scaling import Regime, ddp_factor

__all__ = [
    "LiveGroups",
    "check_config",
    "check_live",
    "checked_regime",
    "is_rerunning",
    "megatron_version",
]

_OLDEST_MEGATRON = (0, 13)

_FLIPPED = (
    "the regime is frozen when the model is built and wrapped; set --calculate-per-token-loss "
    "before that and leave it"
)


def megatron_version() -> str:
    """Return the version of the Megatron-Core that is imported."""
    import megatron.core

    return str(megatron.core.__version__)


@dataclass(frozen=True, kw_only=True)
class LiveGroups:
    """The chunks' own process groups, as far as a loss needs them."""

    dp_group: ProcessGroup
    """The dense data-parallel group without context parallelism."""
    dp_size: int
    dp_cp_size: int
    cp_group: ProcessGroup
    cp_size: int
    cp_rank: int
    tp_group: ProcessGroup
    is_last_stage: bool
    """Whether this rank's pipeline stage calls loss_func."""

    @staticmethod
    def of(chunks: Sequence[Any]) -> LiveGroups:
        """Read the groups; raises :class:`ContractError` where they contradict one another."""
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
        stages = _ranks(first.pp_group)
        return LiveGroups(
            dp_group=first.dp_group,
            dp_size=len(dp),
            dp_cp_size=len(dp_cp),
            cp_group=cp_group,
            cp_size=size,
            cp_rank=cp.index(dist.get_rank()),
            tp_group=_model_group(first, "tp"),
            is_last_stage=stages[-1] == dist.get_rank(),
        )


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _model_group(chunk: Any, name: Literal["cp", "tp"]) -> ProcessGroup:
    """Return a group that the model was built with (the model keeps them from 0.14 on)."""
    module = chunk
    while hasattr(module, "module"):
        module = module.module
    group: ProcessGroup | None = getattr(getattr(module, "pg_collection", None), name, None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    global_groups = {
        "cp": parallel_state.get_context_parallel_group,
        "tp": parallel_state.get_tensor_model_parallel_group,
    }
    global_group: ProcessGroup = global_groups[name]()
    return global_group


def checked_regime(chunks: Sequence[Any]) -> Regime:
    """Refuse what cannot be compensated; return the regime that construction froze."""
    version = megatron_version()
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < _OLDEST_MEGATRON:
        raise ContractError(
            f"megatron-core {version}: before 0.13 num_tokens is reduced over another group and "
            "the schedule multiplies by CP: install megatron-core>=0.13"
        )
    if not chunks:
        raise ContractError("got no model chunk: pass the chunks that the schedule gets")
    for chunk in chunks:
        _check_wrapper(chunk)
    check_config(chunks[0].config, len(chunks))
    regime: Regime = "per-token" if chunks[0].config.calculate_per_token_loss else "average"
    check_live(chunks, regime)
    return regime


def _check_wrapper(chunk: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel

    kind = type(chunk).__name__
    if "fsdp" in f"{type(chunk).__module__}.{kind}".lower() or "FullyShard" in kind:
        raise ContractError(
            f"{kind}: Megatron-FSDP reduces gradients by rules of its own that are not compensated "
            "here yet: use Megatron-Core's DistributedDataParallel"
        )
    if not isinstance(chunk, DistributedDataParallel):
        raise ContractError(
            f"got a {kind}, expected Megatron-Core's DistributedDataParallel: pass the wrapped "
            "chunks that the schedule gets, after wrapping"
        )


def check_config(config: Any, num_chunks: int) -> None:
    """Refuse options under which K or the layout changes while a step runs."""
    if getattr(config, "hybrid_context_parallel", False):
        raise ContractError(
            "hybrid context parallelism changes CP with every microbatch, so rows have no single "
            "layout: drop --hybrid-context-parallel"
        )
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):  # from 0.19 on
        if (getattr(config, name, 1) or 1) > 1:
            raise ContractError(
                f"{name} is {getattr(config, name)}: its ranks train microbatches of their own, "
                "outside the data-parallel group that is counted over, which is not compensated "
                "here: set it to 1"
            )
    graphs = [getattr(config, name, None) for name in ("cuda_graph_impl", "cuda_graph_scope")]
    if "full_iteration" in str(graphs):
        raise ContractError(
            "a full-iteration CUDA graph freezes K at capture, and K changes with the step's "
            "tokens: use another --cuda-graph-scope"
        )
    interleaved = num_chunks > 1 and config.pipeline_model_parallel_size == 2
    overlaps = getattr(config, "overlap_p2p_comm", False)
    if interleaved and (not overlaps or getattr(config, "batch_p2p_comm", True)):
        raise ContractError(
            "interleaved pipelining over 2 stages mixes up its messages unless "
            "overlap_p2p_comm=True and batch_p2p_comm=False: set both"
        )


def check_live(chunks: Sequence[Any], regime: Regime) -> None:
    """Compare what DDP and the routers froze at construction with the live config."""
    per_token = regime == "per-token"
    for index, chunk in enumerate(chunks):
        config = chunk.config
        if bool(config.calculate_per_token_loss) != per_token:
            raise ContractError(
                f"calculate_per_token_loss is {config.calculate_per_token_loss} in the config of "
                f"chunk {index}, the model was wrapped in the {regime} regime: {_FLIPPED}"
            )
        size = dist.get_world_size(chunk.dp_cp_group)
        expected = ddp_factor(
            regime, size, average_in_collective=bool(chunk.ddp_config.average_in_collective)
        )
        buffers = [*chunk.buffers, *(chunk.expert_parallel_buffers if per_token else [])]
        # DDP scales by each bucket's own copy.
        scaled = itertools.chain(buffers, *(buffer.buckets for buffer in buffers))
        found = {part.gradient_scaling_factor for part in scaled}
        if found - {expected}:
            raise ContractError(
                f"chunk {index} scales gradients by {sorted(found)}, the {regime} regime over "
                f"{size} ranks scales by {expected}: {_FLIPPED}"
            )
        for name, module in chunk.named_modules():
            frozen = getattr(module, "calculate_per_token_loss", None)
            if isinstance(frozen, bool) and frozen != per_token:
                raise ContractError(
                    f"{name} was built with calculate_per_token_loss={frozen}, the config now has "
                    f"{per_token}: {_FLIPPED}"
                )


def is_rerunning() -> bool:
    """Whether Megatron's rerun machine runs a step again (``RerunState``, from 0.9 on)."""
    from megatron.core import rerun_state_machine

    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return machine is not None and "RERUNNING" in machine.state.name
