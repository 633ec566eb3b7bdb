"""The probe's step: what each microbatch's loss is, and what gradient it must give.

Symbols: d counts the data- and context-parallel ranks, r the data-parallel ones, m the
microbatches; v(d, m) is what a partial loss multiplies ``out`` by.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.contract.outputs import Outputs
from megatron_lossagg.contract.scaling import K_FORMULA, Scaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.table import StepTotals

if TYPE_CHECKING:
    from megatron_lossagg.loop.aggregator import LossAggregator


class ProbeStep:
    """The probe's step: its sizes, its values v(d, m), and its true gradient."""

    def __init__(self, aggregator: LossAggregator) -> None:
        from megatron.core import parallel_state

        interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        self.aggregator = aggregator
        self.num_stages = dist.get_world_size(aggregator.groups.pp_group)
        self.num_microbatches = 2 * self.num_stages + (not interleaved)

        def counted(r: int) -> list[int]:
            return [
                1 + (r + aggregator.groups.dp_size * m) % 13 for m in range(self.num_microbatches)
            ]

        self.counts = counted(dist.get_rank(aggregator.dp_group))
        """This rank's active tokens of each microbatch, of one sequence each."""
        self.scaling = Scaling(
            loss_scaling=aggregator.loss_scaling,
            num_microbatches=self.num_microbatches,
            dp_cp_size=aggregator.groups.dp_cp_size,
            active_tokens=sum(sum(counted(r)) for r in range(aggregator.groups.dp_size)),
        )
        self._rank = dist.get_rank(aggregator.groups.dp_cp_group)

    def value(self, d: int, m: int) -> int:
        """Return v(d, m)."""
        return 1 + (d + self.scaling.dp_cp_size * m) % 251

    def own_gradient(self, d: int) -> int:
        """Return rank d's part of the true gradient."""
        return sum(self.value(d, m) for m in range(self.num_microbatches))

    def run(self, chunks: list[Any], schedule: Any) -> None:
        """Run the schedule once: the loss of microbatch m is ``v(d, m) * output``."""
        plan = plan_step(
            Aggregation("token_sum"),
            Sequences(active_tokens=self.counts),
            totals=StepTotals(active_tokens=self.scaling.active_tokens),
        )
        step = Step(
            chunks=self.aggregator.chunks,
            groups=self.aggregator.groups,
            loss_scaling=self.aggregator.loss_scaling,
            plan=plan,
            num_microbatches=self.num_microbatches,
            guards=None,  # the live model's gradients are not the probe's
        )

        def loss_func(m: int, output: Tensor) -> Outputs:
            mask = torch.ones(self.counts[m], device="cpu")
            mb = step.microbatch([m], mask, lengths=[self.counts[m]])
            losses = torch.zeros_like(mask, dtype=output.dtype, device=output.device)
            losses[0] = output.sum() * self.value(self._rank, m)
            return mb.outputs(mb.reduce(losses))

        schedule(
            forward_step_func=lambda data, chunk: (chunk(), partial(loss_func, next(data))),
            data_iterator=[iter(range(self.num_microbatches)) for _ in chunks],
            model=chunks,
            num_microbatches=self.num_microbatches,
            seq_length=int(chunks[0].config.context_parallel_size),  # one position per CP rank
            micro_batch_size=1,
            forward_only=False,
        )
        step.end()

    def ratios(self, chunk: Any) -> Iterator[Tensor]:
        """Divide a chunk's gradients by the true ones: of dense weights, then of experts'.

        A true gradient is the sum of v(d, m) over all m, and over all d or, of an expert, over the
        ranks that hold it: one all-reduce over that group.
        """
        true = sum(map(self.own_gradient, range(self.scaling.dp_cp_size)))
        engine = engine_of(chunk)
        weights = dict(engine.parameters())
        yield engine.reduced(weights["weights.dense"])[0] / true
        if engine.has_experts:
            gradient, _ = engine.reduced(weights["weights.experts.weight"])
            of_experts = torch.full((), self.own_gradient(self._rank), device=gradient.device)
            dist.all_reduce(of_experts, group=engine.expert_group)
            yield gradient / of_experts

    def measured_k(self, ratio: float) -> float:
        """Return the K that is right if gradients are ``ratio`` times the true ones.

        Raises :class:`ContractError` if it is not the step's. The tolerance is one float32 rounding
        per addition and a few more, and one in torch's default dtype, of finalize's 1/N.
        """
        its, aggregator = self.scaling, self.aggregator
        measured = its.k / ratio if ratio else float("inf")
        additions = its.dp_cp_size + its.num_microbatches + 8
        default = torch.finfo(torch.get_default_dtype())
        if abs(ratio - 1) <= torch.finfo(torch.float32).eps * additions + default.eps:
            return measured
        raise ContractError(
            f"the startup probe measured K = {measured:.6g}, expected K = "
            f"{K_FORMULA[its.loss_scaling]} = {its.k} in the {its.loss_scaling} loss scaling (at "
            f"the probe's own M {its.num_microbatches}, DP {aggregator.groups.dp_size}, CP "
            f"{aggregator.cp_size}, PP {self.num_stages}). A step's gradient would be {ratio:.6g} "
            "times that of its loss, because this Megatron-Core scales losses differently. Remove "
            "what patches it, or turn the probe off with --no-loss-aggregation-probe if this is "
            "intended"
        )
