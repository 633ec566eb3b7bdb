"""The step's integers, and the one weight a row that follows from them.

A step is described by counts that are known before its first forward: n_s active tokens
a row, and which sample, prompt and microbatch the row belongs to. :func:`plan_step`
counts over the data-parallel group and decides every weight; nothing after it branches
on the mode. Counting makes the step's only collectives.

Shape suffix: S = rows of this data-parallel rank in the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import CUSTOM, Aggregation
from megatron_lossagg.counts import Counts, Rows, Sequences, StepTotals, count_step
from megatron_lossagg.errors import PlanError, ReducerError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.layout import Ints, Layout
from megatron_lossagg.plugins import load_reducer_factory
from megatron_lossagg.reducer import Reducer, ReducerFactory, loss_faults, mask_faults

Floats = npt.NDArray[np.float64]
EmptyStep = Literal["zero", "error"]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step under one aggregation: the weights, and what they came from."""

    aggregation: Aggregation
    totals: StepTotals
    active_tokens: Ints
    """n_s, int64 ``[S]``."""
    num_microbatches: int | None
    """M of this rank, where ``Sequences`` gave it."""
    data_parallel_size: int | None
    """DP; None where totals were given without a group in a job of several processes."""
    sample_tokens: Ints | None
    """n_b of each row's sample, int64 ``[S]``."""
    prompt_tokens: Ints | None
    """n_p of each row's prompt, int64 ``[S]``."""
    microbatch_tokens: Ints | None
    """n_mb of each row's microbatch, int64 ``[S]``."""
    microbatch: Ints | None = None
    """Index of each row's microbatch, int64 ``[S]``; a reducer's error names it."""

    @cached_property
    def weights(self) -> Tensor:
        """w_s, float64 ``[S]`` on the CPU; 0 for a row without active token, never NaN.

        Raises :class:`PlanError` where the mode lacks a total or an id.
        """
        denominator_S = np.broadcast_to(self._denominator(), self.active_tokens.shape)
        weight_S = np.zeros(len(self.active_tokens))
        # Where n_s = 0 the denominator may be 0 too (n_b, n_mb): there is nothing to weigh.
        np.divide(1.0, denominator_S, out=weight_S, where=self.active_tokens > 0)
        return torch.from_numpy(weight_S)

    @property
    def expected_weight(self) -> float | None:
        """The sum over all active tokens of w m by the plan's integers; None if not known.

        1 for a mean (V/B or Q/P of it where empty ones count), N/(B L), N/B or N/C for a
        sum over a constant.
        """
        totals, empty = self.totals, self.aggregation.count_empty
        n, divisor = totals.active_tokens, self.aggregation.divisor or 1.0
        samples = totals.samples if empty else totals.active_samples
        prompts = totals.prompts if empty else totals.active_prompts
        match self.aggregation.mode:
            case "token_mean":
                return _ratio(n, n)
            case "sample_mean":
                return _ratio(totals.active_samples, samples)
            case "prompt_mean":
                return _ratio(totals.active_prompts, prompts)
            case "microbatch_token_mean":
                return _ratio(totals.microbatch_means, self.data_parallel_size)
            case "constant" | "sample_sum":
                return _ratio(n, None if samples is None else samples * divisor)
            case "token_sum":
                return _ratio(n, divisor)
        return None

    def under(self, aggregation: Aggregation | str) -> StepPlan:
        """Return the same step under another aggregation, without a collective."""
        if isinstance(aggregation, str):
            aggregation = Aggregation.named(aggregation)
        return replace(self, aggregation=aggregation)

    def reducer(
        self,
        rows: Sequence[int] | Ints | Tensor,
        mask: Tensor,
        layout: Layout,
        *,
        factory: ReducerFactory | None = None,
        arguments: object = None,
    ) -> Reducer:
        """Make the reducer of one microbatch: check its mask, slice it, look up its weights.

        ``rows``: for each segment its position in ``Sequences``, -1 for a filler. ``mask``:
        the microbatch's whole 0/1 training mask, packed like its tokens, before slicing for
        context parallelism (already this rank's for ``Layout.local``). ``factory``: a custom
        reducer's; by default the one that the aggregation's reducer path names.
        Raises :class:`ReducerError`. No collective; no host sync for a CUDA mask.
        """
        if factory is None and self.aggregation.reducer_path is not None:
            factory = load_reducer_factory(self.aggregation.reducer_path)
        return Reducer.build(self, rows, mask, layout, factory=factory, arguments=arguments)

    def check(self) -> None:
        """Raise what CUDA masks and losses noted since the last :func:`plan_step`, if anything.

        The next ``plan_step`` raises it on every rank of its group. Call this where none
        follows, after the last step, or to learn it before the optimizer's step. Raises
        :class:`ReducerError` on this rank alone. One host sync for each device that noted
        something, no collective.
        """
        if fault := _noted():
            raise ReducerError(fault)

    def _count(self, name: str) -> int:
        counted = name if self.aggregation.count_empty else f"active_{name}"
        return self.totals.need(counted, self.aggregation)

    def _denominator(self) -> Floats:
        """1 / w_s, float64 ``[S]`` or 0-dim: the only place that branches on the mode."""
        divisor = self.aggregation.divisor or 1.0
        denominator: float | Floats
        match self.aggregation.mode:
            case "token_mean":
                denominator = self.totals.need("active_tokens", self.aggregation)
            case "sample_mean":
                denominator = self._count("samples") * self._need("sample_tokens")
            case "prompt_mean":
                prompt_tokens = self._need("prompt_tokens")
                denominator = self._count("prompts") * prompt_tokens
            case "constant":
                denominator = self._count("samples") * divisor
            case "sample_sum":
                denominator = self._count("samples")
            case "token_sum":
                denominator = divisor
            case "microbatch_token_mean":
                microbatch_tokens = self._need("microbatch_tokens")
                if self.data_parallel_size is None:
                    raise PlanError(
                        f"{self.aggregation} needs the data-parallel size: give "
                        "group= beside totals="
                    )
                means = (self.num_microbatches or 1) * self.data_parallel_size
                denominator = means * microbatch_tokens
            case _:
                raise PlanError(
                    f"{self.aggregation}: only the custom reducer knows its weights; for those of "
                    "a mode use plan.under(mode).weights"
                )
        return np.asarray(denominator, dtype=np.float64)

    def _need(self, name: str) -> Floats:
        counts_S: Ints | None = getattr(self, name)
        if counts_S is None:
            source = {
                "sample_tokens": "Sequences(sample_tokens=...)",
                "prompt_tokens": "Sequences(prompt=...), or prompt_tokens= beside totals=",
                "microbatch_tokens": "Sequences(microbatch=...)",
            }[name]
            raise PlanError(f"{self.aggregation} needs {source}, which was not given")
        return counts_S.astype(np.float64)  # exact up to 2^53; a product with B could wrap int64


def plan_step(
    aggregation: Aggregation,
    sequences: Sequences,
    *,
    group: ProcessGroup | None = None,
    totals: StepTotals | None = None,
    empty_step: EmptyStep = "zero",
    fault: str = "",
) -> StepPlan:
    """Count the step over ``group`` and decide the weight of every row.

    ``group``: the dense data-parallel group *without* context parallelism, as
    ``MegatronContract.dp_group``; every rank of it calls. ``totals``: the step's counts
    where the caller knows them; then no collective is made, and ids need
    ``sample_tokens`` or ``prompt_tokens`` beside them. ``empty_step``: what a step without
    any active token does, ``"zero"`` (zero weights and one warning) or ``"error"``.
    ``fault``: why this rank has no counts to give, where it has none: the others of the group
    do not wait for it but raise the same message.

    Without totals: one all-gather of eleven integers a rank, a second one of
    (sample, prompt, tokens) rows where ids are given, each with one host sync; a third one
    only to bring an error's message to every rank. Wrong counts or ids, ranks that disagree
    on the aggregation, and (here, a step late) CUDA masks that were not 0/1 and CUDA losses
    that were not finite raise :class:`PlanError` with the same message on every rank of the
    group. With totals an error is this rank's alone, and names it.
    """
    if not isinstance(aggregation, Aggregation):
        raise PlanError(f"got {aggregation!r}, wanted an Aggregation: Aggregation.named(...)")
    if empty_step not in ("zero", "error"):
        raise PlanError(f"empty_step is 'zero' or 'error', got {empty_step!r}")
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if totals is None and group is None and not is_alone:
        raise PlanError(
            f"this process is one of {dist.get_world_size()} and no group was given: pass "
            "group=contract.dp_group, or totals= where the step's counts are known"
        )
    exchange = Exchange(group)
    noted = _noted()
    fault = fault or (f"in the step before, {noted}" if noted else "")
    try:
        rows = Rows.checked(sequences)
    except (ValueError, TypeError, OverflowError) as error:  # never one rank alone
        rows, fault = Rows.checked(Sequences(active_tokens=[])), fault or str(error)
    try:
        counts = _counts(aggregation, rows, fault, totals, exchange)
        plan = StepPlan(
            aggregation=aggregation,
            totals=counts.totals,
            active_tokens=rows.active_tokens,
            num_microbatches=rows.num_microbatches,
            data_parallel_size=exchange.size if group is not None or is_alone else None,
            sample_tokens=counts.sample_tokens,
            prompt_tokens=counts.prompt_tokens,
            microbatch_tokens=rows.microbatch_tokens,
            microbatch=rows.microbatch,
        )
        if aggregation.mode != CUSTOM:
            plan.weights  # noqa: B018  a mode that lacks something raises here, before any forward
    except PlanError as error:
        if totals is None:
            raise
        raise PlanError(f"{exchange.name()}: {error}") from None
    if counts.totals.active_tokens == 0:
        _empty_step(empty_step)
    return plan


def _counts(
    aggregation: Aggregation,
    rows: Rows,
    fault: str,
    totals: StepTotals | None,
    exchange: Exchange,
) -> Counts:
    if totals is None:
        return count_step(aggregation, rows, fault, exchange)
    if fault:
        raise PlanError(fault)
    return rows.with_totals(totals)


def _noted() -> str:
    """Read and clear what devices noted; one host sync for each that noted something."""
    return "; ".join(text for text in (mask_faults.take(), loss_faults.take()) if text)


def _ratio(part: float | None, whole: float | None) -> float | None:
    if part is None or whole is None:
        return None
    return part / whole if part else 0.0


def _empty_step(empty_step: EmptyStep) -> None:
    message = "the step has no active token: its loss and gradient are zero"
    if empty_step == "error":
        raise PlanError(
            f"{message}; --loss-aggregation-empty-step error (empty_step=) was set, zero goes on"
        )
    warnings.warn(message, RuntimeWarning, stacklevel=3)
