"""Run the probe once per kind of model, and report what was measured and what was only read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_lossagg.errors import ContractError
from megatron_lossagg.probe.measure import (
    DDP,
    FINALIZE,
    SCHEDULE,
    ProbeStep,
    check_k,
    interval,
    measure,
)
from megatron_lossagg.probe.model import schedule_starts_sync
from megatron_lossagg.probe.together import world, world_flags
from megatron_lossagg.scaling import K_FORMULA, Scaling

if TYPE_CHECKING:
    from megatron_lossagg.aggregator import LossAggregator

__all__ = ["ProbeReport", "run_probe"]

_OWN_GROUPS = (
    "DDP, schedule and finalize (the chunks' groups are not parallel_state's, so only the caller "
    "of the schedule knows which groups it gets)"
)


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What the startup probe found; equal on all ranks but for ``seconds``."""

    seconds: float
    k: int | None = None
    """K of the probe's step, as a step computes it."""
    measured_k: tuple[float, float] | None = None
    """Lowest and highest K measured over ranks and stages; None if nothing was measured."""
    scaling: Scaling | None = None
    """Loss scaling and sizes of the probe's step: its M and N are not those of the run's steps."""
    measured: tuple[str, ...] = ()
    """The parts that were run: of "DDP", "schedule", "finalize"."""
    read: tuple[str, ...] = ()
    """The parts that were read and not run, each with the reason."""
    repeated: bool = False
    """Whether this was found earlier in the process, for a model of the same kind."""

    def __str__(self) -> str:
        findings = []
        if self.measured_k is not None and self.scaling is not None:
            own_sizes = {
                "average": f"M = {self.scaling.num_microbatches}",
                "per_token": f"N = {self.scaling.active_tokens}",
            }
            findings.append(
                f"K = {K_FORMULA[self.scaling.loss_scaling]} confirmed through "
                f"{', '.join(self.measured)}: measured {interval(self.measured_k)} "
                f"at the probe's own {own_sizes[self.scaling.loss_scaling]}"
            )
        if self.read:
            findings.append("read, not measured: " + ", ".join(self.read))
        when = "measured earlier" if self.repeated else f"{self.seconds:.2f} s"
        return f"{'; '.join(findings)} ({when})"


_known: dict[Any, ProbeReport] = {}
"""What was measured in this process, by kind of model."""


def run_probe(aggregator: LossAggregator) -> ProbeReport:
    """Measure K on the live Megatron-Core; raise :class:`ContractError` where it differs.

    The live chunks stay unchanged. If a part cannot run the probe (a finalize function bound to
    the live model, a DDP class that needs more arguments), nothing is measured, and the report says
    why. A kind of model is measured once per process: same loss scaling, classes, DDP configs,
    groups and functions.

    Symbols: ``type(chunk)``, ``pipeline_parallel.get_forward_backward_func``,
    ``config.finalize_model_grads_func``. Collectives: eleven all-gathers of an integer or two
    over the world, and those of two small steps. Host syncs: one each. Call it on every rank,
    outside the schedule. A rank that fails alone while others wait for it raises
    :class:`ContractError` after a minute at most, and the launcher ends the others.
    """
    started = time.perf_counter()
    chunks = aggregator.chunks
    fault, own_groups, parts, kind, step = "", False, {}, None, None
    try:
        own_groups = _has_own_groups(chunks)
        if not own_groups:
            parts = _live_parts(chunks)
            kind = _kind(aggregator, parts)
            step = ProbeStep.of(aggregator)
        is_known = kind in _known
    except Exception as error:  # of any kind: no rank may leave the others waiting
        fault, is_known = f"{type(error).__name__}: {error}", False
    own_groups_by_rank, known_by_rank, failed_by_rank = world_flags(
        own_groups, is_known, bool(fault)
    )
    if failed_by_rank.any():
        rank = int(failed_by_rank.argmax())
        raise ContractError(
            f"rank {rank}: the startup probe cannot read the live model, "
            f"{world().messages(fault)[rank]}: fix the error, or turn the probe off with "
            "--no-loss-aggregation-probe"
        )
    if own_groups_by_rank.any() or step is None:
        return ProbeReport(read=(_OWN_GROUPS,), seconds=time.perf_counter() - started)
    if known_by_rank.all():
        return replace(_known[kind], repeated=True)
    ratios, read = measure(step, parts)
    measured = tuple(name for name in parts if name not in read)
    measured_k = None if ratios is None else check_k(ratios, step, measured)
    report = ProbeReport(
        k=step.k,
        measured_k=measured_k,
        scaling=step.scaling,
        seconds=time.perf_counter() - started,
        measured=measured,
        read=tuple(f"{name} ({reason})" for name, reason in read.items()),
    )
    _known[kind] = report
    return report


def _has_own_groups(chunks: Sequence[Any]) -> bool:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    globals_by_name = {
        "dp_group": parallel_state.get_data_parallel_group(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "pp_group": parallel_state.get_pipeline_model_parallel_group(),
    }
    return any(
        dist.get_process_group_ranks(getattr(chunk, name)) != dist.get_process_group_ranks(group)
        for chunk in chunks
        for name, group in globals_by_name.items()
    )


def _live_parts(chunks: Sequence[Any]) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return {
        DDP: type(chunks[0]),
        SCHEDULE: get_forward_backward_func(),
        FINALIZE: chunks[0].config.finalize_model_grads_func,
    }


def _kind(aggregator: LossAggregator, parts: Mapping[str, Any]) -> Any:
    """Distinguish what may scale losses differently."""
    functions = tuple(parts.values())  # kept alive: the id of a freed one may be used again
    groups = ("dp_group", "dp_cp_group", "pp_group", "intra_dp_cp_group", "intra_expt_dp_group")
    kinds = tuple(
        (
            type(chunk),
            repr(chunk.ddp_config),
            *(tuple(dist.get_process_group_ranks(getattr(chunk, name))) for name in groups),
        )
        for chunk in aggregator.chunks
    )
    config = aggregator.chunks[0].config
    options = ("overlap_p2p_comm", "batch_p2p_comm", "overlap_p2p_comm_warmup_flush")
    pipeline = (
        schedule_starts_sync(aggregator.chunks),
        *(getattr(config, name, None) for name in options),
    )
    return aggregator.loss_scaling, aggregator.cp_size, pipeline, functions, kinds
