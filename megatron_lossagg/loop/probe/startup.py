"""Run the step through the live parts, and report what was found."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.contract.scaling import K_FORMULA, Scaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.loop.probe.all_ranks import NotMeasuredError, part, untouched
from megatron_lossagg.loop.probe.probe_model import build
from megatron_lossagg.loop.probe.probe_step import ProbeStep

if TYPE_CHECKING:
    from megatron_lossagg.loop.aggregator import LossAggregator


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What the startup probe found."""

    seconds: float
    measured_k: float | None = None
    """The measured K furthest from the step's, over this rank's parameters; None if none was."""
    scaling: Scaling | None = None
    """Loss scaling and sizes of the probe's step: its M and N are not those of the run's steps."""
    note: str = ""
    """What was not measured and why, in one sentence; empty if everything was."""

    def __str__(self) -> str:
        finding = "K was read, not measured"
        if self.scaling is not None:
            own_size = {
                "average": f"M = {self.scaling.num_microbatches}",
                "per_token": f"N = {self.scaling.active_tokens}",
            }[self.scaling.loss_scaling]
            finding = (
                f"K = {K_FORMULA[self.scaling.loss_scaling]} confirmed through DDP, schedule, "
                f"finalize: measured {self.measured_k:.6g} at the probe's own {own_size}"
            )
        return f"{'; '.join(filter(None, (finding, self.note)))} ({self.seconds:.2f} s)"


_OWN_GROUPS = (
    "the chunks' groups are not parallel_state's, so only the caller of the schedule knows which "
    "groups it gets"
)
_NOT_SET = (
    "finalize is Megatron-Core's own, because config.finalize_model_grads_func is None until "
    "training sets it"
)


def run_probe(aggregator: LossAggregator) -> ProbeReport:
    """Measure K on the live Megatron-Core; raise :class:`ContractError` if it differs.

    The live chunks stay unchanged. If a part cannot run the probe (a finalize function bound to
    the live model, a DDP class that needs more arguments), nothing is measured, and the report says
    why. A live model that cannot be read is an error.

    Symbols: ``type(chunk)``, ``pipeline_parallel.get_forward_backward_func``,
    ``config.finalize_model_grads_func``. Collectives: eight all-gathers of an integer over the
    world, and those of two small steps. Host syncs: one each. Call it on every rank,
    outside the schedule. A rank that fails by itself while others wait for it raises
    :class:`ContractError` after a minute at most, and the launcher ends the others.
    """
    started = time.perf_counter()
    finalize = None
    try:
        with part("live model", is_fatal=True):
            if _has_own_groups(aggregator.groups):
                raise NotMeasuredError(_OWN_GROUPS)
            from megatron.core.pipeline_parallel import get_forward_backward_func

            schedule = get_forward_backward_func()
            finalize = aggregator.chunks[0].config.finalize_model_grads_func
            step = ProbeStep(aggregator)
        with untouched(aggregator.chunks), torch.enable_grad():
            k = _measured(step, schedule, finalize)
    except NotMeasuredError as error:  # on all ranks alike
        return ProbeReport(note=str(error), seconds=time.perf_counter() - started)
    return ProbeReport(
        measured_k=k,
        scaling=step.scaling,
        note=_NOT_SET if finalize is None else "",
        seconds=time.perf_counter() - started,
    )


def _has_own_groups(groups: LiveGroups) -> bool:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    its_and_global = (
        (groups.dp_group, parallel_state.get_data_parallel_group()),
        (groups.dp_cp_group, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (groups.pp_group, parallel_state.get_pipeline_model_parallel_group()),
    )
    ranks = dist.get_process_group_ranks
    return any(ranks(its) != ranks(other) for its, other in its_and_global)


def _measured(step: ProbeStep, schedule: Any, finalize: Any) -> float:
    """Run the step; return the K that is right for this rank's weights.

    It runs twice: from megatron-core 0.16 on, the reduction of gradients overlaps with the backward
    pass from the second step on, through other code than in the first. Raises on all ranks alike:
    ``NotMeasuredError`` if a part cannot run it, and :class:`ContractError` if K is not right on
    one, if the schedule does not finalize, and if it failed between pipeline stages, where its
    messages may be left over.
    """
    from megatron.core.distributed import finalize_model_grads

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    """Of the finalize function, which the schedule calls."""
    with part("DDP"):
        chunks = build(
            step.aggregator.chunks,
            lambda *arguments, **named: calls.append((arguments, named)),
            step.num_stages,
        )
    for _ in range(2):
        with part("schedule", is_fatal=step.num_stages > 1):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            step.run(chunks, schedule)
        with part("finalize"):
            if len(calls) != 1:
                raise ContractError(
                    f"the schedule called config.finalize_model_grads_func {len(calls)} times, "
                    "expected once: gradients are not reduced as K assumes; remove what patches "
                    "the schedule, or turn the probe off with --no-loss-aggregation-probe"
                )
            arguments, named = calls.pop()
            (finalize or finalize_model_grads)(*arguments, **named)
        with part("DDP"):  # its buffers may be laid out differently
            ratios = torch.cat([ratio for chunk in chunks for ratio in step.ratios(chunk)])
            k = step.measured_k(ratios[(ratios - 1).abs().argmax()].item())
    return k
