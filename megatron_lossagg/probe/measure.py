"""Run the probe's step through Megatron-Core's parts, and compare its gradient with the true one.

The step runs twice: from megatron-core 0.16 on, the reduction of gradients overlaps with the
backward pass from the second step on, through other code than in the first. Both are compared.

Symbols: d counts the data- and context-parallel ranks, r the data-parallel ones, m the
microbatches; v(d, m) is what a partial loss multiplies ``out`` by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.errors import ContractError
from megatron_lossagg.outputs import Outputs
from megatron_lossagg.plan import plan_step
from megatron_lossagg.probe.model import build, free, reduced_part
from megatron_lossagg.probe.together import NotMeasuredError, part, untouched, world, world_flags
from megatron_lossagg.scaling import K_FORMULA, Scaling
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.step import Step

if TYPE_CHECKING:
    from megatron_lossagg.aggregator import LossAggregator

__all__ = [
    "DDP",
    "FINALIZE",
    "SCHEDULE",
    "ProbeStep",
    "check_k",
    "interval",
    "measure",
]

DDP, SCHEDULE, FINALIZE = "DDP", "schedule", "finalize"


@dataclass(frozen=True, kw_only=True)
class ProbeStep:
    """The probe's step: its sizes, its values v(d, m), and its true gradient."""

    aggregator: LossAggregator
    scaling: Scaling
    num_stages: int
    dp_cp_rank: int
    counts: list[int]
    """This rank's active tokens of each microbatch, of one sequence each."""

    @staticmethod
    def of(aggregator: LossAggregator) -> ProbeStep:
        """Make the step for the groups of an aggregator's chunks."""
        from megatron.core import parallel_state

        chunk = aggregator.chunks[0]
        interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        num_stages = dist.get_world_size(chunk.pp_group)
        num_microbatches = 2 * num_stages + (not interleaved)

        def counted(r: int) -> list[int]:
            return [1 + (r + aggregator.dp_size * m) % 13 for m in range(num_microbatches)]

        return ProbeStep(
            aggregator=aggregator,
            scaling=Scaling(
                loss_scaling=aggregator.loss_scaling,
                num_microbatches=num_microbatches,
                dp_cp_size=aggregator.dp_cp_size,
                active_tokens=sum(sum(counted(r)) for r in range(aggregator.dp_size)),
            ),
            num_stages=num_stages,
            dp_cp_rank=dist.get_rank(chunk.dp_cp_group),
            counts=counted(dist.get_rank(chunk.dp_group)),
        )

    @property
    def k(self) -> int:
        """K as a step computes it."""
        return self.scaling.k

    def begin(self) -> Step:
        """Begin one run of the step."""
        plan = plan_step(
            Aggregation("token_sum"),
            Sequences(active_tokens=self.counts),
            totals=StepTotals(active_tokens=self.scaling.active_tokens),
        )
        return Step(
            aggregator=self.aggregator,
            plan=plan,
            num_microbatches=self.scaling.num_microbatches,
            accumulates=True,  # the live model's gradients are not the probe's
        )

    def outputs(self, step: Step, output: Tensor, m: int) -> Outputs:
        """Return what loss_func returns of microbatch m, whose loss is ``v(d, m) * output``."""
        mask = torch.ones(self.counts[m], device="cpu")
        mb = step.microbatch([m], mask, lengths=[self.counts[m]])
        losses = torch.zeros_like(mask, dtype=output.dtype, device=output.device)
        losses[0] = output.sum() * self.value(self.dp_cp_rank, m)
        return mb.outputs(mb.reduce(losses))

    def value(self, d: int, m: int) -> int:
        """Return v(d, m)."""
        return 1 + (d + self.scaling.dp_cp_size * m) % 251

    def own_gradient(self, d: int) -> int:
        """Return rank d's part of the true gradient."""
        return sum(self.value(d, m) for m in range(self.scaling.num_microbatches))

    @property
    def true_gradient(self) -> int:
        """The sum of v(d, m) over all d and m."""
        return sum(map(self.own_gradient, range(self.scaling.dp_cp_size)))

    def measured_k(self, low: float, high: float) -> tuple[float, float]:
        """Return the K that is right where gradients are low to high times the true ones."""
        smallest, largest = (self.k / r if r else float("inf") for r in (high, low))
        return smallest, largest

    @property
    def tolerance(self) -> float:
        """One float32 rounding per addition and a few more, one of finalize's 1/N.

        That one is in torch's default dtype.
        """
        additions = self.scaling.dp_cp_size + self.scaling.num_microbatches + 8
        default = torch.finfo(torch.get_default_dtype())
        return torch.finfo(torch.float32).eps * additions + default.eps


def measure(
    step: ProbeStep, live: Mapping[str, Any]
) -> tuple[tuple[float, float] | None, dict[str, str]]:
    """Return :func:`_run`'s ratios, None if there are none, and why parts were not measured.

    ``live``: the parts by name. A finalize function that training sets later is Megatron-Core's.
    """
    from megatron.core.distributed import finalize_model_grads

    parts, not_measured = dict(live), {}
    if parts[FINALIZE] is None:
        parts[FINALIZE] = finalize_model_grads
        not_measured[FINALIZE] = "config.finalize_model_grads_func is None until training sets it"
    try:
        with untouched(step.aggregator.chunks), torch.enable_grad():
            return _run(step, parts), not_measured
    except NotMeasuredError as error:  # on all ranks alike
        failed, reason = error.args
    if failed == SCHEDULE and step.num_stages > 1:
        raise ContractError(
            f"the startup probe cannot run this schedule, {reason}. Messages between pipeline "
            "stages may be left over, so training cannot go on. Turn the probe off with "
            "--no-loss-aggregation-probe"
        )
    others = dict.fromkeys(live, f"the probe ended in the {failed}")
    return None, {**others, **not_measured, failed: reason}


def _run(step: ProbeStep, parts: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and highest ``main_grad / true`` of this rank's weights."""
    finalize_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*arguments: Any, **named: Any) -> None:
        finalize_calls.append((arguments, named))

    with part(DDP):
        built = build(step.aggregator.chunks, parts[DDP], record, step.num_stages)
    ratios: list[Tensor] = []
    for _ in range(2):
        with part(SCHEDULE):
            for chunk in built:
                chunk.zero_grad_buffer()
            _run_schedule(built, step, parts[SCHEDULE])
        with part(FINALIZE):
            is_finalized = bool(finalize_calls)
            while finalize_calls:
                arguments, named = finalize_calls.pop()
                parts[FINALIZE](*arguments, **named)
        with part(DDP):  # its buffers may be laid out differently
            ratios += [ratio for chunk in built for ratio in _ratios(chunk, step)]
        (finalized_by_rank,) = world_flags(is_finalized)
        if not finalized_by_rank.all():  # a reduction may be pending: nothing can follow
            break
    else:
        free(built)
    low, high = torch.stack([f(torch.cat(ratios)) for f in (torch.min, torch.max)]).tolist()
    return low, high


def _run_schedule(built: list[Any], step: ProbeStep, schedule: Any) -> None:
    begun = step.begin()

    def forward_step(microbatches: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        m = next(microbatches)

        return chunk(), lambda output: step.outputs(begun, output, m)

    num_microbatches = step.scaling.num_microbatches
    schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(range(num_microbatches)) for _ in built],
        model=built,
        num_microbatches=num_microbatches,
        seq_length=step.aggregator.cp_size,  # one position per CP rank
        micro_batch_size=1,
        forward_only=False,
    )
    begun.end()


def _ratios(chunk: Any, step: ProbeStep) -> Iterator[Tensor]:
    """Divide gradients by the true ones: of dense weights, and of experts' where there are some.

    An expert's gradient is summed over the ranks that hold it, ``expt_dp_group``. One
    all-reduce over that group where there are experts.
    """
    yield reduced_part(chunk, chunk.module.dense, chunk.intra_dp_cp_group) / step.true_gradient
    if chunk.expert_parallel_buffers:
        gradient = reduced_part(chunk, chunk.module.expert, chunk.intra_expt_dp_group)
        true = torch.tensor(step.own_gradient(step.dp_cp_rank), device=gradient.device)
        dist.all_reduce(true, group=chunk.expt_dp_group)
        yield gradient / true


def check_k(
    ratios: tuple[float, float], step: ProbeStep, measured: Sequence[str]
) -> tuple[float, float]:
    """Return the lowest and highest K of the world; raise if one is not the step's.

    ``ratios``: this rank's lowest and highest. One all-gather over the world.
    """
    ratios_by_rank = world().integers(np.array(ratios).view(np.int64)).view(np.float64)
    for rank, (low, high) in enumerate(ratios_by_rank.tolist()):
        if abs(low - 1) <= step.tolerance and abs(high - 1) <= step.tolerance:
            continue
        aggregator, loss_scaling = step.aggregator, step.scaling.loss_scaling
        raise ContractError(
            f"rank {rank}: the startup probe measured K = {interval(step.measured_k(low, high))}, "
            f"expected K = {K_FORMULA[loss_scaling]} = {step.k} in the {loss_scaling} loss scaling "
            f"(at the probe's own M {step.scaling.num_microbatches}, DP {aggregator.dp_size}, "
            f"CP {aggregator.cp_size}, PP {step.num_stages}; through {', '.join(measured)}). A "
            f"step's gradient would be {interval((low, high))} times that of its loss, because "
            "this Megatron-Core scales losses differently. Remove what patches it, or turn the "
            "probe off (--no-loss-aggregation-probe) if this factor is intended"
        )
    return step.measured_k(float(ratios_by_rank.min()), float(ratios_by_rank.max()))


def interval(bounds: tuple[float, float]) -> str:
    """Write a lowest and a highest value: ``6``, or ``6 to 7`` where they differ."""
    low, high = (f"{bound:.6g}" for bound in bounds)
    return low if low == high else f"{low} to {high}"
