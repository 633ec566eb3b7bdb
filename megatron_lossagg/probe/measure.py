"""Run the probe's step through Megatron-Core's parts, and compare its gradient with the true one.

The step runs twice: from megatron-core 0.16 on, the reduction of gradients overlaps with the
backward pass from the second step on, through other code than in the first. Both are compared.

Symbols: d counts the data- and context-parallel ranks, r the data-parallel ones, m the
microbatches; v(d, m) is what a share multiplies ``out`` by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.probe.model import build, free, reduced_part
from megatron_lossagg.probe.together import NotMeasuredError, part, untouched, world, world_flags
from megatron_lossagg.scaling import K_FORMULA, LossScaling, Scaling

__all__ = [
    "DDP",
    "FINALIZE",
    "SCHEDULE",
    "BeginTrial",
    "Contract",
    "ProbeStep",
    "Trial",
    "check_factors",
    "interval",
    "measure",
]

DDP, SCHEDULE, FINALIZE = "DDP", "schedule", "finalize"


class Contract(Protocol):
    """What the probe needs of a :class:`~megatron_lossagg.contract.MegatronContract`."""

    loss_scaling: LossScaling
    dp_size: int
    cp_size: int
    dp_cp_size: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A :class:`~megatron_lossagg.contract.StepContract` for the probe's step."""

    factor: int
    """Its K."""
    returns: Callable[[Tensor, int], tuple[Tensor, Tensor, dict[str, Tensor]]]
    """What loss_func returns for a share and the number of its microbatch."""


BeginTrial = Callable[[Sequence[int], int], Trial]
"""From this rank's counted tokens of each microbatch, and the step's, to its :class:`Trial`."""


@dataclass(frozen=True, kw_only=True)
class ProbeStep:
    """The probe's step: its sizes, its shares' factors v(d, m), and its true gradient."""

    scaling: Scaling
    num_stages: int
    dp_size: int
    dp_cp_rank: int
    begin: Callable[[], Trial]
    """Begin one run of the step."""

    @staticmethod
    def of(chunk: Any, contract: Contract, begin: BeginTrial) -> ProbeStep:
        """Make the step for a live chunk's groups."""
        from megatron.core import parallel_state

        interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        num_stages = dist.get_world_size(chunk.pp_group)
        num_microbatches = 2 * num_stages + (not interleaved)

        def counted(r: int) -> list[int]:
            return [1 + (r + contract.dp_size * m) % 13 for m in range(num_microbatches)]

        own_counts = counted(dist.get_rank(chunk.dp_group))
        active_tokens = sum(sum(counted(r)) for r in range(contract.dp_size))
        return ProbeStep(
            scaling=Scaling(
                loss_scaling=contract.loss_scaling,
                num_microbatches=num_microbatches,
                dp_cp_size=contract.dp_cp_size,
                active_tokens=active_tokens,
            ),
            num_stages=num_stages,
            dp_size=contract.dp_size,
            dp_cp_rank=dist.get_rank(chunk.dp_cp_group),
            begin=partial(begin, own_counts, active_tokens),
        )

    @property
    def k(self) -> int:
        """K as the contract computes it."""
        return self.begin().factor

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

    def factors(self, low: float, high: float) -> tuple[float, float]:
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
    chunks: Sequence[Any], step: ProbeStep, live: Mapping[str, Any]
) -> tuple[tuple[float, float] | None, dict[str, str]]:
    """Return :func:`_run`'s ratios, None if there are none, and why some parts were only read.

    ``live``: the parts by name. One that cannot run the step is replaced by Megatron-Core's.
    """
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

    stock = {DDP: DistributedDataParallel, FINALIZE: finalize_model_grads}
    parts, read = dict(live), {}
    if parts[FINALIZE] is None:
        parts[FINALIZE] = stock[FINALIZE]
        read[FINALIZE] = "config.finalize_model_grads_func is None until training sets it"
    while True:
        try:
            with untouched(chunks), torch.enable_grad():
                return _run(chunks, step, parts), read
        except NotMeasuredError as error:  # on all ranks alike
            failed, reason = error.args
        if failed == SCHEDULE and step.num_stages > 1:
            raise ContractError(
                f"the startup probe cannot run this schedule, {reason}. Messages between pipeline "
                "stages may be left over, so training cannot go on. Turn the probe off with "
                "--no-loss-aggregation-probe"
            )
        read[failed] = reason
        if parts[failed] is stock.get(failed, parts[failed]):
            return None, {name: read.get(name, "not reached") for name in parts}
        parts[failed] = stock[failed]


def _run(chunks: Sequence[Any], step: ProbeStep, parts: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and highest ``main_grad / true`` of this rank's weights."""
    finalize_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*arguments: Any, **named: Any) -> None:
        finalize_calls.append((arguments, named))

    with part(DDP):
        built = build(chunks, parts[DDP], record, step.num_stages)
    ratios: list[Tensor] = []
    for _ in range(2):
        with part(SCHEDULE):
            for chunk in built:
                chunk.zero_grad_buffer()
            _run_schedule(built, step, step.begin(), parts[SCHEDULE])
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


def _run_schedule(built: list[Any], step: ProbeStep, trial: Trial, schedule: Any) -> None:
    def forward_step(microbatches: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        m = next(microbatches)

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return trial.returns(output.sum() * step.value(step.dp_cp_rank, m), m)

        return chunk(), loss_func

    num_microbatches = step.scaling.num_microbatches
    schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(range(num_microbatches)) for _ in built],
        model=built,
        num_microbatches=num_microbatches,
        seq_length=step.scaling.dp_cp_size // step.dp_size,  # one position per CP rank
        micro_batch_size=1,
        forward_only=False,
    )


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


def check_factors(
    ratios: tuple[float, float], step: ProbeStep, contract: Contract, measured: Sequence[str]
) -> tuple[float, float]:
    """Return the lowest and highest K of the world; raise where one is not the contract's.

    ``ratios``: this rank's lowest and highest. One all-gather over the world.
    """
    ratios_by_rank = world().integers(np.array(ratios).view(np.int64)).view(np.float64)
    for rank, (low, high) in enumerate(ratios_by_rank.tolist()):
        if abs(low - 1) <= step.tolerance and abs(high - 1) <= step.tolerance:
            continue
        loss_scaling = contract.loss_scaling
        raise ContractError(
            f"rank {rank}: the startup probe measured K = {interval(step.factors(low, high))}, "
            f"expected K = {K_FORMULA[loss_scaling]} = {step.k} in the {loss_scaling} loss scaling "
            f"(at the probe's own M {step.scaling.num_microbatches}, DP {contract.dp_size}, "
            f"CP {contract.cp_size}, PP {step.num_stages}; through {', '.join(measured)}). A "
            f"step's gradient would be {interval((low, high))} times that of its loss, because "
            "this Megatron-Core scales losses differently. Remove what patches it, or turn the "
            "probe off (--no-loss-aggregation-probe) if this factor is intended"
        )
    return step.factors(float(ratios_by_rank.min()), float(ratios_by_rank.max()))


def interval(bounds: tuple[float, float]) -> str:
    """Write a lowest and a highest value: ``6``, or ``6 to 7`` where they differ."""
    low, high = (f"{bound:.6g}" for bound in bounds)
    return low if low == high else f"{low} to {high}"
