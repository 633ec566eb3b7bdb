"""One layout in one loss scaling on the installed Megatron-Core: its steps, and their gradients.

Called on every rank. A step runs in a loop of our own, or as a framework's under the schedule hook.
Shape suffixes: Y = tokens of all sequences and a padding sequence, padded; H = hypotheses, each a
gradient; P = parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

import megatron_lossagg.cpu as cpu
from megatron_lossagg.errors import ContractError, ProofError, ReducerError
from megatron_lossagg.loop.aggregator import LossAggregator
from megatron_lossagg.loop.schedule_hook import FrameworkLoss, Integration, ScheduleHook
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.layout import PADDING, Layout
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.verify.cases import BETA, CASES, Case, columns_of
from megatron_lossagg.verify.causes import Facts
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import Reference, relative
from megatron_lossagg.verify.small_gpt import (
    Batch,
    all_reported,
    config_of,
    forward,
    gather_gradients,
    pack,
    run_schedule,
    token_losses,
    whole_gradient,
    wrapped_chunks,
)
from megatron_lossagg.verify.step_data import TrainingSequence, assign_sequences, padding_sequence
from megatron_lossagg.verify.world import device
from megatron_lossagg.weigh.compare import RankWeights, WeighedSequence, whole
from megatron_lossagg.weigh.weighing import Weighing

WEIGHT_SUM, WEIGHT_EXPECTED = "lossagg/weight_sum", "lossagg/weight_expected"
_REPORTED = ("loss", WEIGHT_SUM, WEIGHT_EXPECTED)


@dataclass(kw_only=True, eq=False)
class Measured:
    """One step's outcome on this rank."""

    gradients: list[tuple[Any, Tensor]]
    """(shard, gradient), of the main loss only."""
    values: list[dict[str, float]]
    """K and the reported values of every rank of the last stage; NaN and inf are kept."""
    weighed: list[WeighedSequence] | None
    """Each sequence's weight, measured at y; None under the hook, on Megatron-FSDP and
    forward-only."""
    fault: str
    """The first rank's error message for a mask or a loss; empty if there was none."""

    def worst(self, name: str, wanted: float) -> float:
        """Return the reported value that is furthest from ``wanted``; NaN is the furthest."""
        return max((values[name] for values in self.values), key=lambda v: relative(v, wanted))


class Run:
    """Model, aggregator and data of one layout in one loss scaling, ready to step."""

    def __init__(self, parallelism: Parallelism, reference: Reference, *, per_token: bool) -> None:
        self.parallelism = parallelism
        self.reference = reference
        config = config_of(parallelism, per_token=per_token)
        self.chunks = wrapped_chunks(parallelism, config)
        self._shards = list(cpu.named_shards(self.chunks))
        self._aggregators: dict[Aggregation, LossAggregator] = {}
        self.aggregator = self.aggregator_of(CASES[0])
        self._reads = parallel_state.get_tensor_model_parallel_rank() == 0
        self.facts = Facts(
            reference=reference,
            assignment=assign_sequences(reference.sequences, parallelism.m_of_ranks),
            parallelism=parallelism,
            loss_scaling="per_token" if per_token else "average",
        )
        rank = dist.get_rank(self.aggregator.dp_group)
        self.num_microbatches = parallelism.m_of_ranks[rank]
        assignment, sequences_of_rank = self.facts.assignment, self.facts.assignment.of_rank(rank)
        self.sequences = [reference.sequences[index] for index in sequences_of_rank]
        self._numbers = [assignment.keys[index][1] for index in sequences_of_rank]
        self.batches = [
            pack(
                self.sequences,
                [place for place, number in enumerate(self._numbers) if number == microbatch],
                parallelism,
            )
            for microbatch in range(self.num_microbatches)
        ]
        self._side: list[Tensor] | None = None

    def train(self, case: Case, *, poison: bool = True) -> Measured:
        """Run one step; return the gradient of the main loss and the reported values."""
        measured = self._step(case, poison=poison)
        measured.gradients = self._main_gradients(case)
        return measured

    def evaluate(self, case: Case) -> Measured:
        """Run a forward-only step; return the reported values, without gradients."""
        with torch.no_grad():
            return self._step(case, forward_only=True)

    def _main_gradients(self, case: Case) -> list[tuple[Any, Tensor]]:
        totals = self._gradients()
        if not (self.parallelism.moe or self.parallelism.mtp):
            return totals
        if self._side is None:  # the same for every case: it depends on sequences and M only
            self._step(case, main=0.0, poison=False)
            self._side = [gradient for _, gradient in self._gradients()]
        pairs = zip(totals, self._side, strict=True)
        return [(shard, total - side) for (shard, total), side in pairs]

    def _gradients(self) -> list[tuple[Any, Tensor]]:
        if self.parallelism.distributed_optimizer:
            gather_gradients(self.chunks)
        gradients = []
        for shard in self._shards:
            if self.parallelism.megatron_fsdp != "off":
                (chunk,) = self.chunks
                main_grad = whole_gradient(chunk, shard.parameter)
            else:
                main_grad = shard.parameter.main_grad  # type: ignore[attr-defined]
            # A copy: the next schedule call zeroes the buffer.
            gradients.append((shard, main_grad.to("cpu", torch.float64, copy=True)))
        return gradients

    def _step(
        self, case: Case, *, poison: bool = True, main: float = 1.0, forward_only: bool = False
    ) -> Measured:
        run = self._hooked if self.parallelism.hooked else self._looped
        ran = run(case, poison=poison, main=main, forward_only=forward_only)
        reports, k, faults, weights = ran
        values = None
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            names = _REPORTED[:1] if case.is_custom else _REPORTED
            values = {**all_reported(reports, names), "k": k}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (values, faults, weights))
        of_ranks = [weights for _, _, weights in gathered if weights is not None]
        return Measured(
            gradients=[],
            values=[values for values, _, _ in gathered if values is not None],
            weighed=whole(of_ranks) if len(of_ranks) == len(gathered) else None,
            fault=next((faults[0] for _, faults, _ in gathered if faults), ""),
        )

    def aggregator_of(self, case: Case) -> LossAggregator:
        """Return the aggregator of a case's aggregation; every rank calls."""
        if case.aggregation not in self._aggregators:
            self._aggregators[case.aggregation] = LossAggregator(
                self.chunks,
                case.aggregation,
                # The steps measure what the probe would, and then find which case fails and why.
                options=Options(probe=False, rejects_tokens=True),
            )
        return self._aggregators[case.aggregation]

    def begin(self, case: Case, *, forward_only: bool = False) -> Step:
        """Plan and begin a step; ranks that compute no loss or read no data pass no counts."""
        counts: dict[str, Any] = {}
        if self._reads and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            counts = {**_counts(self.sequences, case), "microbatch": self._numbers}
        return self.aggregator_of(case).step(
            **counts, num_microbatches=self.num_microbatches, forward_only=forward_only
        )

    def _looped(self, case: Case, *, poison: bool, main: float, forward_only: bool) -> _Ran:
        """Run a step in a loop of our own: an aggregator and its step."""
        faults: list[str] = []
        step = self.begin(case, forward_only=forward_only)
        is_weighed = not forward_only and self.parallelism.megatron_fsdp == "off"
        weighing = (
            Weighing(self.chunks, num_microbatches=self.num_microbatches) if is_weighed else None
        )

        def forward_step(iterator: Any, chunk: Any) -> Any:
            batch = next(iterator)
            output = forward(chunk, batch, self.parallelism)

            def loss_func(output: Tensor) -> Any:
                layout = self._layout(batch.offsets)
                lengths = batch.offsets.diff() if layout.is_gathered else layout.local_lengths
                y = token_losses(output, batch, self.parallelism)
                if weighing is not None:
                    y = weighing.losses(y, lengths=lengths.tolist())
                y = self._poisoned(y, batch, poison)
                mb = step.microbatch(
                    batch.sequences,
                    batch.mask,
                    layout=layout,
                    token_weights=_weights(batch, case.aggregation),
                )
                try:
                    loss = mb.reduce(y * batch.coefficient)
                    if case.second is not None:
                        loss = loss + BETA * mb.reduce(y.square(), case.second)
                except (
                    ReducerError,
                    ContractError,
                ) as error:  # a failed case does not end the others
                    if case.is_custom and mb.counted_tokens:  # nothing stands in for its loss
                        raise ProofError(str(error)) from None
                    faults.append(str(error))
                    mode = "token_mean" if case.is_custom else None  # which cannot raise again
                    loss = mb.reduce(y.nan_to_num() * 0, mode) + (y * torch.nan).sum()
                return mb.outputs(loss * main, report={"loss": loss})

            return output, loss_func

        with weighing or nullcontext():
            reports = run_schedule(
                forward_step, self.chunks, self.batches, forward_only=forward_only
            )
        try:
            step.finish()  # raises what a device found
        except (ReducerError, ContractError) as error:
            faults.append(str(error))
        weights = None if weighing is None else weighing.of_this_rank()
        return _Ran(reports, step.k, faults, weights)

    def _hooked(self, case: Case, *, poison: bool, main: float, forward_only: bool) -> _Ran:
        """Run a step as a framework does that knows nothing of this package, under the hook."""
        faults: list[str] = []
        hook = ScheduleHook(
            case.aggregation,
            _Integration(self, case, poison, main),
            options=Options(probe=False, rejects_tokens=True),
        )
        # A tensor-parallel rank without data gets each microbatch from the rank that has it.
        sent = [iter(self.batches) for _ in self.chunks]

        def loss_func(batch: Batch, output: Tensor) -> Any:
            mask = batch.mask_here.to(output.device)
            y = token_losses(output, batch, self.parallelism)
            loss, num_tokens = (y * batch.coefficient * mask).sum(), mask.sum()
            report = torch.stack([loss.detach(), num_tokens.to(loss.dtype)])
            return loss, num_tokens.int(), {"loss": report}

        def forward_step(iterator: Any, chunk: Any) -> Any:
            batch = next(iterator if self._reads else sent[self.chunks.index(chunk)])
            output = forward(chunk, batch, self.parallelism)
            return output, partial(loss_func, batch)

        reports: list[dict[str, Tensor]] = []
        try:
            reports = run_schedule(
                forward_step,
                self.chunks,
                self.batches,
                forward_only=forward_only,
                wrap=hook.wrap,
                reads=self._reads,
            )
        except (ReducerError, ContractError) as error:
            faults.append(str(error))
        return _Ran(reports, hook.k, faults, None)

    def _poisoned(self, y: Tensor, batch: Batch, poison: bool) -> Tensor:
        if poison:  # the value at a masked position must not matter
            y = y.masked_fill(batch.mask_here.to(y.device) == 0, torch.inf)
        return y

    def _layout(self, offsets: Tensor) -> Layout:
        aggregator = self.aggregator
        if self.parallelism.packing == "bshd":
            is_contiguous = self.parallelism.cp_partition == "contiguous"
            bshd = Layout.bshd_contiguous if is_contiguous else Layout.bshd_zigzag
            place = {"cp_size": aggregator.cp_size, "cp_rank": aggregator.cp_rank}
            return bshd(len(offsets) - 1, int(offsets[1]), **place)
        if self.parallelism.packing == "local":
            return aggregator.sliced(offsets.diff().tolist())
        layout = aggregator.thd(offsets)
        return layout.gathered() if self.parallelism.packing == "gathered" else layout

    def compared(
        self, measured: Measured, slopes_HY: Tensor, hypotheses_HP: Tensor
    ) -> tuple[list[float], float]:
        """Compare the step's gradient with hypotheses, of which the first is the right one.

        ``slopes_HY``: d loss / d y of each. Returns each hypothesis's largest relative error over
        all parameters and ranks, and the gradient's multiple of the right one, by projection. One
        all-gather.
        """
        whole_H = hypotheses_HP.norm(dim=1)
        errors_H = torch.zeros(len(whole_H), dtype=torch.float64)
        products = torch.zeros(2, dtype=torch.float64)
        for shard, gradient in measured.gradients:
            if shard.name in self.reference.parameters:
                wanted = self.reference.of_parameter(hypotheses_HP, shard.name)
                terms_H = self.reference.size_of_terms(slopes_HY, shard.name)
                norms_H = torch.maximum(wanted.flatten(1).norm(dim=1), terms_H)
                cut = torch.stack([shard.cut(one) for one in wanted])
                products += torch.stack([(gradient * cut[0]).sum(), cut[0].square().sum()])
            else:  # a multi-token-prediction layer: the main loss does not reach it
                norms_H, cut = whole_H, torch.zeros(len(whole_H), *gradient.shape).double()
            # A parameter that no trained token reaches has only rounding, of the whole gradient.
            floor_H = 1e-3 * self.parallelism.tolerance * whole_H
            error_H = (gradient - cut).flatten(1).norm(dim=1) / torch.maximum(norms_H, floor_H)
            errors_H = torch.maximum(errors_H, error_H.nan_to_num(nan=math.inf))
        own = torch.cat([errors_H, products]).to(device())
        of_ranks = own.new_empty(dist.get_world_size(), len(own))
        dist.all_gather(list(of_ranks.unbind()), own)
        along, squared = of_ranks[:, -2:].sum(0)
        return of_ranks[:, :-2].amax(0).tolist(), float(along / squared)

    def check_every_parameter_is_compared(self) -> None:
        """Raise :class:`ProofError` if no rank has a parameter of the reference."""
        names = [shard.name for shard in self._shards]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, names)
        missing = set(self.reference.parameters) - set(chain(*gathered))
        if missing:
            raise ProofError(
                f"no rank has the parameters {sorted(missing)} of the reference, so that their "
                "gradients cannot be compared"
            )


def _counts(sequences: Sequence[TrainingSequence], case: Case) -> dict[str, Any]:
    """Count sequences as a step takes them, and a microbatch of the hook."""
    counts: dict[str, Any] = {
        "active_tokens": [sum(one.counted) for one in sequences],
        "sample": [one.sample for one in sequences],
        "prompt": [one.prompt for one in sequences],
        "group": [one.group for one in sequences],
    }
    if columns := columns_of(sequences, case.aggregation):
        counts["columns"] = columns
    if case.aggregation.count == "weights":
        counts["token_weight_sums"] = [math.fsum(one.weight) for one in sequences]
    if case.leaves_out:
        counts["left_out"] = [one.left_out for one in sequences]
    if case.weighs_sequences:
        counts["sequence_weight"] = [one.sequence_weight for one in sequences]
    return counts


def _weights(batch: Batch, aggregation: Aggregation) -> Tensor | None:
    return batch.weights if aggregation.count == "weights" else None


class _Ran(NamedTuple):
    """What a step left on this rank: Megatron's reports, K, what was raised, and its weights."""

    reports: list[dict[str, Tensor]]
    k: int
    faults: list[str]
    weights: RankWeights | None


class _Integration(Integration):
    """What :meth:`Run._hooked` says of its microbatches to the hook."""

    loss_name = "loss"
    gives_prompts = True
    gives_groups = True
    gives_token_weights = True

    def __init__(self, run: Run, case: Case, poison: bool, main: float) -> None:
        self._run = run
        self._case = case
        self._poison = poison
        self._main = main

    def sequences(self, data: Batch) -> Sequences:
        own = [*self._run.sequences, padding_sequence(0)]  # at PADDING, -1
        return Sequences(
            **_counts([own[index] for index in data.sequences], self._case),
            lengths=data.offsets.diff(),
            is_padding=[int(index == PADDING) for index in data.sequences],
        )

    def loss(self, loss_func: Any, output: Tensor) -> FrameworkLoss:
        (batch,) = loss_func.args
        y = token_losses(output, batch, self._run.parallelism)
        return FrameworkLoss(
            losses=self._run._poisoned(y, batch, self._poison) * batch.coefficient * self._main,
            mask=batch.mask,
            token_weights=_weights(batch, self._case.aggregation),
            returned=loss_func(output),
        )

    def layout(self, aggregator: LossAggregator, lengths: Sequence[int]) -> Layout:
        if self._run.parallelism.packing == "local":
            return super().layout(aggregator, lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return self._run._layout(offsets)
