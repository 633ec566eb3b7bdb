"""The step's integers, and the one weight per sequence that follows from them.

A step is described by counts that are known before its first forward: n_s active tokens
per sequence, and which sample, prompt and microbatch the sequence belongs to. :func:`plan_step`
counts over the data-parallel group and decides every weight; nothing after it branches
on the mode. Counting makes the step's only collectives.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import CUSTOM, MODES, Aggregation
from megatron_lossagg.counts import StepTotals, count_microbatches, count_step, known_step
from megatron_lossagg.errors import LossAggregationError, PlanError, ReducerError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.faults import warn_once
from megatron_lossagg.integers import Ints, IntsLike
from megatron_lossagg.layout import Layout
from megatron_lossagg.microbatch import Microbatch
from megatron_lossagg.options import Options
from megatron_lossagg.reducer import Reducer, ReducerFactory, load_reducer_factory
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.state import StepState

__all__ = ["StepCounts", "StepPlan", "plan_step", "warn_of_divisor"]

_Floats = npt.NDArray[np.float64]

_DEFAULTS = Options()
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """One optimizer step under one aggregation: the weights, and what they came from."""

    aggregation: Aggregation
    sequences: Sequences
    """What was planned, checked: int64 ``[S]`` each."""
    totals: StepTotals
    data_parallel_size: int | None
    """DP; None where totals were passed without a group in a job of several processes."""
    group_ranks: tuple[int, ...] | None
    """Global ranks that were counted over; None where no group was passed."""
    state: StepState = field(repr=False)
    _under: dict[Aggregation, StepPlan] = field(default_factory=dict, init=False, repr=False)

    @property
    def active_tokens(self) -> Ints:
        """n_s, int64 ``[S]``."""
        return cast(Ints, self.sequences.active_tokens)

    @property
    def num_microbatches(self) -> int | None:
        """M of this rank, if ``Sequences`` gave it."""
        return self.sequences.num_microbatches

    @property
    def microbatch(self) -> Ints | None:
        """Index of each sequence's microbatch, int64 ``[S]``; a reducer's error names it."""
        return cast("Ints | None", self.sequences.microbatch)

    @cached_property
    def microbatch_tokens(self) -> Ints | None:
        """n_mb of each sequence's microbatch, int64 ``[S]``."""
        counted = count_microbatches(self.sequences)
        return counted and counted[0]

    @property
    def sample_tokens(self) -> Ints:
        """n_b of each sequence's sample, int64 ``[S]``."""
        return cast(Ints, self.totals.sample_tokens)

    @property
    def prompt_tokens(self) -> Ints | None:
        """n_p of each sequence's prompt, int64 ``[S]``."""
        return self.totals.prompt_tokens

    @property
    def weights(self) -> Tensor:
        """w_s, float64 ``[S]`` on the CPU; 0 for a sequence with no active tokens, never NaN.

        A copy: changing it changes nothing that is trained. Raises :class:`PlanError` if the
        mode lacks a total or an id.
        """
        return torch.from_numpy(self.weight_S.copy())

    @cached_property
    def weight_S(self) -> _Floats:
        """:attr:`weights` as a read-only array, computed once."""
        denominator = MODES[self.aggregation.mode].denominator
        if denominator is None:
            raise PlanError(
                f"{self.aggregation}: only the custom reducer knows its weights; for those of "
                "a mode use plan.under(mode).weights"
            )
        value = np.asarray(denominator(StepCounts(self)), dtype=np.float64)
        denominator_S = np.broadcast_to(value, self.active_tokens.shape)
        weight_S = np.zeros(len(self.active_tokens))
        # Where n_s = 0 the denominator may be 0 too (n_b, n_mb): there is nothing to weigh.
        is_active_S = self.active_tokens > 0
        with np.errstate(all="ignore"):
            np.divide(1.0, denominator_S, out=weight_S, where=is_active_S)
        beyond = np.flatnonzero(is_active_S & ~((weight_S >= _LEAST) & (weight_S <= _MOST)))
        if len(beyond):
            raise PlanError(
                f"{self.aggregation} gives sequence {beyond[0]} a weight of {weight_S[beyond[0]]}, "
                "beyond what float32 holds: change --loss-aggregation-divisor (divisor=)"
            )
        weight_S.flags.writeable = False
        return weight_S

    @cached_property
    def expected_weight(self) -> float | None:
        """The sum over all active tokens of w m by the plan's integers; None if not known.

        1 for a mean (V/B or Q/P of it if empty ones count), N/(B L), N/B or N/C for a
        sum over a constant.
        """
        expected = MODES[self.aggregation.mode].expected
        if expected is None:
            return None
        if self.totals.active_tokens == 0:
            return 0.0
        try:
            return float(expected(StepCounts(self)))
        except PlanError:  # a total that is not needed for a weight
            return None

    def under(self, aggregation: Aggregation | str) -> StepPlan:
        """Return the same step under another aggregation, without a collective; made once."""
        if isinstance(aggregation, str):
            aggregation = Aggregation(aggregation)
        if aggregation not in self._under:
            plan = replace(self, aggregation=aggregation)
            _check_divisor(plan)
            self._under[aggregation] = plan
        return self._under[aggregation]

    def reducer(
        self,
        sequences: IntsLike,
        mask: Tensor,
        layout: Layout,
        *,
        factory: ReducerFactory | None = None,
        arguments: object = None,
    ) -> Reducer:
        """Make the reducer of one microbatch: check its mask, slice it, look up its weights.

        ``sequences``: for each segment its position in ``Sequences``, -1 for a padding sequence.
        ``mask``: the microbatch's whole 0/1 loss mask (after rejection, if tokens are rejected),
        packed like its tokens, before slicing for context parallelism (already this rank's for
        ``Layout.local``). ``mask[i]`` belongs to the loss at logit i, the prediction of token
        i + 1: shift it before packing, never after slicing; it is 0 at padding.
        ``factory``: a custom reducer's; by default the one that the aggregation's reducer path
        names.

        Raises :class:`ReducerError`; a CUDA mask's faults are raised when the step finishes. No
        collective; no host sync for a CUDA mask.
        """
        if factory is None and self.aggregation.reducer_path is not None:
            factory = load_reducer_factory(self.aggregation.reducer_path)
        microbatch = Microbatch.checked(
            sequences,
            mask,
            layout,
            active_tokens=self.active_tokens,
            microbatch_of_sequence=self.microbatch,
            state=self.state,
        )
        return Reducer.of(self, microbatch, factory, arguments)

    def check(self) -> None:
        """Raise the first fault that devices found in this step's masks and losses, if any.

        Finishing a step calls it; call it yourself without a :class:`LossAggregator`.
        Raises :class:`ReducerError` on this rank only. One host sync for each device that
        recorded something, no collective.
        """
        if fault := self.state.faults.take():
            raise ReducerError(fault)


class StepCounts:
    """A plan's counts as the table of modes reads them; one that is not known raises.

    If empty samples and prompts do not count, ``samples`` is V and ``prompts`` is Q.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.divisor = plan.aggregation.divisor or 1.0
        self.num_microbatches = plan.sequences.num_microbatches or 1

    def __getattr__(self, name: str) -> Any:
        plan = self._plan
        if name in ("samples", "prompts") and not plan.aggregation.count_empty:
            name = f"active_{name}"
        value = getattr(plan.totals if hasattr(plan.totals, name) else plan, name)
        if value is None:
            missing = _PASSED_AS.get(name, f"StepTotals({name}=...) of the whole step")
            raise PlanError(f"{plan.aggregation} needs {missing}, which was not passed")
        # Exact up to 2^53; a product with B could wrap int64.
        return value.astype(np.float64) if isinstance(value, np.ndarray) else value


_PASSED_AS = {
    "prompt_tokens": "Sequences(prompt=...) without totals=",
    "prompts": "Sequences(prompt=...) without totals=",
    "active_prompts": "Sequences(prompt=...) without totals=",
    "microbatch_tokens": "Sequences(microbatch=...)",
    "data_parallel_size": "group=, also with totals=",
}


def plan_step(
    aggregation: Aggregation,
    sequences: Sequences,
    *,
    group: ProcessGroup | None = None,
    totals: StepTotals | None = None,
    options: Options = _DEFAULTS,
    fault: str = "",
) -> StepPlan:
    """Count the step over ``group`` and decide the weight of every sequence.

    ``group``: the dense data-parallel group *without* context parallelism, as
    ``LossAggregator.dp_group``; every rank of it calls. ``totals``: the step's counts
    if the caller knows them; then no collective is made, and ids are refused. With a group as
    well, its first step is counted all the same, and totals that differ from the counts are
    refused. ``fault``: why this rank has no counts, if so: the others of the group do not wait
    for it but raise the same message.

    Without totals: one all-gather of ten integers per rank, a second one of two or three integers
    per sequence if ids are passed, each with one host sync; a third one only to bring an error's
    message to every rank. Wrong counts or ids, and ranks that disagree on the aggregation or on
    an option, raise :class:`PlanError` with the same message on every rank of the group. With
    totals an error is this rank's alone, and names it. A sample with more active tokens than the
    divisor of ``constant``, and ids that look as if they were not global, give one warning per
    process, on all ranks alike.
    """
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if totals is None and group is None and not is_alone:
        raise PlanError(
            f"this process is one of {dist.get_world_size()} and no group was passed: pass "
            "group=aggregator.dp_group, or totals= if the step's counts are known"
        )
    exchange = Exchange(group)
    checked = Sequences(active_tokens=[]).checked()
    if not fault:
        try:
            _check_arguments(aggregation, options)
            checked = sequences.checked()
        except Exception as error:  # whatever it is, no rank may leave the others waiting
            fault = str(error) if isinstance(error, LossAggregationError) else repr(error)
    verifies = totals is not None and group is not None and exchange.ranks not in _verified
    if totals is None or verifies:
        settings = [*(f"{name} {value!r}" for name, value in vars(options).items()), f"{totals}"]
        counted = count_step(aggregation, checked, fault, exchange, settings)
    if totals is not None and verifies:
        _check_given(totals, counted)
        _verified.add(exchange.ranks)
    try:
        if totals is not None:
            if fault:
                raise PlanError(fault)
            counted = known_step(checked, totals)
        plan = StepPlan(
            aggregation=aggregation,
            sequences=checked,
            totals=counted,
            data_parallel_size=exchange.size if group is not None or is_alone else None,
            group_ranks=exchange.ranks,
            state=StepState(rejects_tokens=options.rejects_tokens),
        )
        if aggregation.mode != CUSTOM:
            plan.weight_S  # noqa: B018  a mode that lacks something raises here, before any forward
    except PlanError as error:
        if totals is None:
            raise
        raise PlanError(f"{exchange.name()}: {error}") from None
    if counted.active_tokens == 0:
        _empty_step(options)
    _check_divisor(plan)
    return plan


_verified: set[tuple[int, ...] | None] = set()
"""Groups whose first step with passed totals was counted."""


def _check_given(given: StepTotals, counted: StepTotals) -> None:
    for name, value in vars(given).items():
        found = getattr(counted, name)
        # A sum of fractions may differ in its last bit.
        if value is not None and found is not None and not math.isclose(value, found, rel_tol=1e-9):
            raise PlanError(
                f"got StepTotals({name}={value!r}), the group's sequences have {found}: pass the "
                "totals of the whole step over the data-parallel group, or drop totals="
            )


def _check_arguments(aggregation: Aggregation, options: Options) -> None:
    if not isinstance(aggregation, Aggregation):
        raise PlanError(f"got {aggregation!r}, expected an Aggregation")
    if aggregation.reducer_path is not None:
        load_reducer_factory(aggregation.reducer_path)
    if not isinstance(options, Options):
        raise PlanError(f"got {options!r}, expected Options")


def _check_divisor(plan: StepPlan) -> None:
    """Warn once if ``constant`` divides by less than the longest sample."""
    if plan.aggregation.mode == "constant":
        warn_of_divisor(plan.aggregation.divisor or 1.0, [plan.totals.longest_sample or 0])


def warn_of_divisor(divisor: float, tokens: IntsLike) -> None:
    """Warn, once per process, if L is below the longest of some responses."""
    longest = int(np.max(tokens, initial=0))
    if longest > divisor:
        warn_once(
            "divisor",
            f"constant divides by {divisor:g}, and a sample has {longest} tokens: the divisor L is "
            "the longest response that generation allows, and the gradient grows with its inverse; "
            "check --loss-aggregation-divisor (divisor=)",
        )


def _empty_step(options: Options) -> None:
    message = "the step has no active tokens: its loss and gradient are zero"
    if options.empty_step == "error":
        raise PlanError(
            f"{message}; --loss-aggregation-empty-step error (Options.empty_step) was set: "
            "set zero to continue"
        )
    warnings.warn(message, RuntimeWarning, stacklevel=3)
