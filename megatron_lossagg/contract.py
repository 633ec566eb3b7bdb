"""The contract with Megatron-Core: shares scaled by K, what loss_func returns, the report.

How Megatron scales a loss, and why K compensates it, is in :mod:`megatron_lossagg.scaling`.
In the per-token loss scaling num_tokens comes from the counting side, so that the sum over the
step is the plan's N for any training mask; stock Megatron's side losses (MoE, MTP)
keep their 1/N.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.devices import moved
from megatron_lossagg.errors import ContractError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.integers import IntsLike, first_few, is_integer
from megatron_lossagg.layout import Layout
from megatron_lossagg.ledger import Ledger
from megatron_lossagg.live import (
    Frozen,
    LiveGroups,
    checked_loss_scaling,
    is_rerunning,
    megatron_version,
    note_on_side_losses,
)
from megatron_lossagg.ownership import check_ownership
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.probe import ProbeReport, Trial, run_probe
from megatron_lossagg.reducer import Reducer
from megatron_lossagg.scaling import K_FORMULA, MOST_TOKENS_PER_TOKEN, LossScaling, Scaling
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.state import ReducerCall

__all__ = ["MegatronContract", "StepContract"]


class MegatronContract:
    """How the live model's Megatron-Core scales a loss; made once per run by :meth:`read`."""

    def __init__(
        self,
        *,
        chunks: Sequence[Any],
        loss_scaling: LossScaling,
        frozen: Frozen,
        groups: LiveGroups,
    ) -> None:
        self._chunks = list(chunks)
        self._frozen = frozen
        self._config = chunks[0].config
        self._latest: StepContract | None = None
        self.loss_scaling: LossScaling = loss_scaling
        self.dp_group = groups.dp_group
        """The dense data-parallel group without context parallelism."""
        self.tp_group = groups.tp_group
        """The tensor-parallel group."""
        self.cp_group = groups.cp_group
        """The context-parallel group."""
        self.cp_size = groups.cp_size
        self.cp_rank = groups.cp_rank
        self.dp_size = groups.dp_size
        self.dp_cp_size = groups.dp_cp_size
        """DP * CP: the size of the group whose gradients the chunks reduce over."""
        self.is_last_stage = groups.is_last_stage
        """Whether this rank's pipeline stage calls loss_func."""
        self.note = note_on_side_losses(self._config, loss_scaling)
        """Which side losses depend on CP, for the start of a run; empty where none does."""
        self.probe: ProbeReport | None = None
        """What the startup probe measured; None where it was not asked for."""
        self.has_slices = False
        """Whether a step's masks were slices of context-parallel ranks (layout ``local``)."""
        self._agreed: set[Aggregation] = set()
        self._finalize = self._config.finalize_model_grads_func

    @staticmethod
    def read(model: Any, *, aggregation: Aggregation, probe: bool = True) -> MegatronContract:
        """Read loss scaling and groups from the DDP-wrapped chunks; refuse what K cannot
        compensate.

        ``model``: the chunks as passed to the schedule, or one chunk. ``aggregation``: checked
        to be the same on every rank of the world, as is ``probe``; of a later change of mode call
        :meth:`agree_on`. ``probe``: then measure K with
        :func:`~megatron_lossagg.probe.run_probe`, once per process and kind of model, and
        raise :class:`ContractError` where Megatron applies another factor. Collectives: one
        ``all_gather_object`` over the world, which brings a refusal on one rank to all, and
        the probe's. Call it outside the schedule, on every rank.
        """
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        if not dist.is_initialized():
            raise ContractError(
                "torch.distributed is not initialized: read the contract after it is"
            )
        fault, settings = "", ""
        try:
            loss_scaling = checked_loss_scaling(chunks)
            frozen = Frozen.of(chunks, loss_scaling)
            groups = LiveGroups.of(chunks)
            settings = (
                f"megatron-core {megatron_version()}, loss scaling {loss_scaling}, probe {probe}, "
            )
            settings += _settings_of(aggregation)
        except Exception as error:  # of any type: no rank may leave the others waiting
            fault = str(error) if isinstance(error, ContractError) else repr(error)
        _agree(fault, settings)
        contract = MegatronContract(
            chunks=chunks, loss_scaling=loss_scaling, frozen=frozen, groups=groups
        )
        contract._agreed.add(aggregation)
        if probe:
            contract.probe = run_probe(chunks, contract, contract._trial)
        return contract

    def agree_on(self, aggregation: Aggregation) -> None:
        """Check that a further aggregation of the run is the same on every rank.

        :meth:`step` takes plans of the aggregations that :meth:`read` and this method have seen.
        Raises :class:`ContractError` on every rank. One ``all_gather_object`` over the world, by
        every rank.
        """
        _agree("", _settings_of(aggregation))
        self._agreed.add(aggregation)

    def thd(self, cu_seqlens_padded: IntsLike) -> Layout:
        """Return ``Layout.thd_zigzag`` for this rank; a CUDA tensor costs one host sync."""
        return Layout.thd_zigzag(cu_seqlens_padded, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def local(self, sequence_lengths_here: IntsLike) -> Layout:
        """Return ``Layout.local`` for this rank: mask and losses are already its own."""
        return Layout.local(sequence_lengths_here, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def check(self) -> None:
        """Compare what construction froze with the live model, as :meth:`step` does.

        For the ranks that make no step: earlier pipeline stages fail with the last one. No
        collective. Raises :class:`ContractError`. A module that was added or replaced after
        :meth:`read` is not seen.
        """
        self._frozen.check()

    def step(
        self,
        plan: StepPlan,
        *,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool = False,
        also: Sequence[StepPlan] = (),
    ) -> StepContract:
        """Begin a schedule call of ``num_microbatches`` over ``plan``; close it by ``with``.

        ``forward_only``: nothing is trained, and the plan may be used again; the schedule runs
        under ``torch.no_grad()``. ``accumulates``: gradients of earlier schedule calls are kept
        on purpose; else they must be zero when the first loss is returned. ``also``: plans over
        the same sequences with other counts, whose reducers make further terms of the loss. What
        the
        rerun state machine repeats belongs inside the same step.

        Compares what construction froze with the live config once more, and raises
        :class:`ContractError` where they differ, where the config has no
        ``finalize_model_grads_func`` or another than :meth:`read` saw (except for
        ``forward_only``), where the plan was counted over other ranks than ``dp_group``, has
        already trained a step, was made for another number of microbatches or under an
        aggregation that the ranks have not agreed on, and where the previous step was not closed.
        No collective.
        """
        if self._latest is not None and self._latest.is_left_open:
            raise ContractError(
                "the previous step was not closed: write `with contract.step(...) as step:` around "
                "the schedule call, or call step.close() after it, before the optimizer's step"
            )
        self.check()
        if not forward_only and self._config.finalize_model_grads_func is None:
            raise ContractError(
                "config.finalize_model_grads_func is None: the schedule would reduce no gradient "
                "over data-parallel ranks; set it to finalize_model_grads before the first step"
            )
        if not forward_only:
            self._check_finalize()
        if not is_integer(num_microbatches, lowest=1):
            raise ContractError(
                f"got num_microbatches {num_microbatches!r}, expected an integer from 1: pass "
                "what the schedule gets"
            )
        if any(one.num_microbatches not in (None, num_microbatches) for one in (plan, *also)):
            raise ContractError(
                f"the plan was made for {plan.num_microbatches} microbatches, the schedule runs "
                f"{num_microbatches}: pass the same number to Sequences and to step()"
            )
        for one in (plan, *also):
            self._check_plan(one, forward_only)
            if len(one.active_tokens) != len(plan.active_tokens):
                raise ContractError(
                    f"also= has a plan of {len(one.active_tokens)} sequences, the step's plan has "
                    f"{len(plan.active_tokens)}: plan the same sequences, with 0 where one "
                    f"has no tokens"
                )
        if accumulates:
            self._check_accumulation()
        if self._latest is not None:
            self._latest._end()
        for one in (plan, *also):
            one.state.is_stepped = one.state.is_stepped or not forward_only
        self._latest = StepContract(
            contract=self,
            plan=plan,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            accumulates=accumulates,
            also=tuple(also),
        )
        for one in (plan, *also):
            one.state.refuse_others()
        return self._latest

    def _check_accumulation(self) -> None:
        """Refuse what scales or reduces the gradients of earlier schedule calls once more."""
        shards = any(chunk.ddp_config.use_distributed_optimizer for chunk in self._chunks)
        if self.loss_scaling == "per_token" or (shards and self.dp_cp_size > 1):
            raise ContractError(
                "got accumulates=True with "
                + ("--calculate-per-token-loss" if self.loss_scaling == "per_token" else "")
                + ("the distributed optimizer" if self.loss_scaling == "average" else "")
                + ", where Megatron scales or reduces the gradients of earlier schedule calls once "
                "more: run all microbatches of an optimizer step in one schedule call"
            )

    def _check_finalize(self) -> None:
        """Compare the finalize function with the one that the probe measured."""
        now = self._config.finalize_model_grads_func
        if self._finalize is None:  # training sets it before its first step
            self._finalize = now
        if not _is_same_function(now, self._finalize):
            raise ContractError(
                f"config.finalize_model_grads_func is {now!r}, it was {self._finalize!r} when the "
                "contract was read: another function may scale gradients differently; read the "
                "contract again after replacing it"
            )

    def _check_plan(self, plan: StepPlan, forward_only: bool) -> None:
        own = tuple(dist.get_process_group_ranks(self.dp_group))
        if plan.group_ranks not in (None, own):
            raise ContractError(
                f"the plan was counted over ranks {list(plan.group_ranks or ())}, the model's "
                f"data-parallel group without context parallelism is {list(own)}: pass "
                "group=contract.dp_group to plan_step"
            )
        if plan.state.is_stepped and not forward_only:
            raise ContractError(
                "the plan has already begun to train a step: a plan is for one optimizer step; "
                "call plan_step for each, and again after a step that was given up, or pass "
                "forward_only=True where nothing is trained"
            )
        if plan.aggregation not in self._agreed:
            raise ContractError(
                f"the plan is under {plan.aggregation}, which the ranks have not agreed on: pass "
                "it to MegatronContract.read, or call contract.agree_on(...) on every rank"
            )
        n = plan.totals.active_tokens
        if self.loss_scaling == "per_token" and n is None:
            raise ContractError(
                "the per-token loss scaling divides by the step's active tokens, which the "
                "plan does "
                "not know: give StepTotals(active_tokens=...), or let plan_step count"
            )
        if self.loss_scaling == "per_token" and n is not None and n > MOST_TOKENS_PER_TOKEN:
            raise ContractError(
                f"the step has {n} active tokens, Megatron-Core counts them in int32: take "
                "fewer per step, or train without --calculate-per-token-loss"
            )

    def _trial(self, counted: Sequence[int], active_tokens: int) -> Trial:
        """Begin the probe's step: one sequence per microbatch, of as many tokens as ``counted``."""
        plan = plan_step(
            Aggregation("token_sum"),
            Sequences(active_tokens=list(counted)),
            totals=StepTotals(active_tokens=active_tokens),
        )
        step = StepContract(contract=self, plan=plan, num_microbatches=len(counted))

        def returns(share: Tensor, m: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            mask = torch.ones(counted[m], device="cpu")
            # Shares of the probe come from no reducer.
            return step._outputs(share, plan.reducer([m], mask, self.local([counted[m]])))

        return Trial(factor=step.factor, returns=returns)

    def describe(self, aggregation: Aggregation) -> str:
        """Write a line for the start of a run: mode, formula, loss scaling, K; then
        :attr:`note`.
        """
        line = (
            f"loss aggregation {aggregation}; loss scaling {self.loss_scaling}, K = "
            f"{K_FORMULA[self.loss_scaling]} "
            f"(DP {self.dp_size}, CP {self.cp_size}); probe: {self.probe or 'off'}"
        )
        return f"{line}\n{self.note}" if self.note else line


@dataclass(kw_only=True, eq=False)
class StepContract:
    """One schedule call: scales shares by K, makes reports, tracks the sequences.

    A context manager: leaving it closes the step, before the optimizer's. An exception inside
    goes through unchanged, and nothing is checked then.
    """

    contract: MegatronContract
    plan: StepPlan
    num_microbatches: int
    """M of this schedule call."""
    forward_only: bool = False
    accumulates: bool = False
    also: tuple[StepPlan, ...] = ()
    is_closed: bool = False
    _ledger: Ledger = field(init=False)
    _scaling: Scaling = field(init=False)
    _trained: list[tuple[int, object]] = field(default_factory=list)
    """Of each call of loss_func whose loss requires a gradient: its number, its microbatch."""

    def __post_init__(self) -> None:
        self._ledger = Ledger(
            num_sequences=len(self.plan.active_tokens),
            num_microbatches=self.num_microbatches,
            is_rerunning=is_rerunning,
        )
        for plan in self._plans:
            plan.state.begin()
        self._scaling = Scaling(
            loss_scaling=self.contract.loss_scaling,
            num_microbatches=self.num_microbatches,
            dp_cp_size=self.contract.dp_cp_size,
            active_tokens=self.plan.totals.active_tokens,
        )

    def __enter__(self) -> StepContract:
        """Return the step."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the step, unless an exception ends it."""
        if kind is None:
            self.close()
        self._end()

    def _end(self) -> None:
        self.is_closed = True
        for plan in self._plans:
            plan.state.end()

    @property
    def _plans(self) -> tuple[StepPlan, ...]:
        return (self.plan, *self.also)

    @property
    def is_left_open(self) -> bool:
        """Whether loss_func ran for it, on this rank, and nothing has closed it."""
        return self._ledger.num_calls > 0 and not self.is_closed

    @property
    def factor(self) -> int:
        """K: M DP CP in the average loss scaling, N in the per-token loss scaling."""
        return self._scaling.k

    def returns(
        self,
        share: Tensor,
        reducer: Reducer,
        report: Mapping[str, Tensor] | None = None,
        means: Mapping[str, tuple[Tensor, Tensor | float]] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Make what loss_func returns: ``(loss, num_tokens, report)``.

        ``share``: 0-dim, the sum of all terms' shares, made by calling reducers of this
        microbatch. ``reducer``: the microbatch's main reducer, whose sequences are tracked.
        ``report``: 0-dim shares by name. ``means``: local sums with their counts by name, of what
        is a mean already (clip fraction, reward): Megatron adds both over the step and divides,
        so one mean over the step is logged.

        loss is ``share * K`` in fp32 or better with storage of its own (the schedule scales it
        in place); num_tokens an int32 0-dim tensor on its device; each report a detached
        ``[share * M DP CP, 1]``, each mean a detached ``[sum, count]``. Adds
        ``lossagg/weight_sum`` and ``lossagg/weight_expected``. The weight-sum check sees the
        weights as sliced and masked, not what is done to a share afterwards. No collective, no
        host sync.

        Raises :class:`ContractError` where the reducer was not called, belongs to another plan,
        aggregation, microbatch or context-parallel rank, and where the share needs no gradient in
        a training step or one in a ``forward_only`` step.
        """
        _check_scalar("share", share)
        _check_names([*(report or {}), *(means or {})])
        self._check_source(share, reducer)
        if not (self._ledger.num_calls or self.forward_only or self.accumulates):
            self._look_at_gradients()
        return self._outputs(share, reducer, report, means)

    def _outputs(
        self,
        share: Tensor,
        reducer: Reducer,
        report: Mapping[str, Tensor] | None = None,
        means: Mapping[str, tuple[Tensor, Tensor | float]] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        self._ledger.add(reducer.microbatch.segments.own_sequences)
        loss = _widened(share) * self.factor
        num_tokens = torch.full(
            (),
            self._scaling.num_tokens(reducer.counted_tokens, self.contract.cp_rank),
            dtype=torch.int32,
            device=loss.device,
        )
        reports = {name: self._report(name, value) for name, value in (report or {}).items()}
        for name, (total, count) in (means or {}).items():
            reports[name] = _mean(name, total, count)
        weight_sum, expected = reducer.weight_sum(), reducer.plan.expected_weight
        if weight_sum is not None:
            weight_sum = moved(weight_sum, loss.device)
            reports["lossagg/weight_sum"] = self._report("lossagg/weight_sum", weight_sum)
            if expected is not None:
                one = torch.ones_like(weight_sum)
                reports["lossagg/weight_expected"] = torch.stack([one * expected, one])
        return loss, num_tokens, reports

    def close(self) -> None:
        """Check, after the schedule and before the optimizer, that the step is complete.

        Every sequence and microbatch arrived (on the last pipeline stage, which alone calls
        loss_func), every loss was trained through its reducer, gradients were zero before, and no
        device found a fault in a mask or loss. With context parallelism and the layout ``local``,
        each sequence's tokens were trained once over the context-parallel ranks. Raises
        :class:`ContractError` or :class:`ReducerError` on this rank. One host sync for each device
        that recorded something; one all-gather over the context-parallel group if the layout is
        ``local``. ``with`` calls it.
        """
        if self.is_closed:
            return
        fault = self._incomplete()
        self._end()
        self._check_ownership(has_failed=bool(fault))
        if fault:
            raise ContractError(fault)
        for plan in self._plans:
            plan.check()
        _record_first_step()

    def _check_ownership(self, *, has_failed: bool) -> None:
        """Compare the context-parallel ranks' tokens, if this run's masks are slices."""
        contract = self.contract
        for plan in self._plans:
            trained_S = plan.state.trained.of_sequences()
            contract.has_slices = contract.has_slices or trained_S is not None
            if trained_S is None:
                if not contract.has_slices or self._ledger.num_calls or plan is not self.plan:
                    continue
                # loss_func never ran here, and the other ranks compare
                trained_S = torch.zeros(len(plan.active_tokens), dtype=torch.int64, device="cpu")
            check_ownership(
                Exchange(contract.cp_group),
                plan.state.faults,
                trained_S,
                plan.active_tokens,
                settings=f"{plan.aggregation!r} {plan.state.rejects_tokens}",
                rejects_tokens=plan.state.rejects_tokens,
                has_failed=has_failed,
            )

    def _incomplete(self) -> str:
        """Say what is missing of the step, empty if nothing is."""
        try:
            self._ledger.close(may_be_empty=not self.contract.is_last_stage)
        except ContractError as error:
            return str(error)
        calls = self._calls
        trained = {
            call.microbatch
            for call in calls
            if call.has_gradient and call.aggregation == self.plan.aggregation
        }
        for number, microbatch in self._trained:
            if microbatch not in trained:
                return (
                    f"no gradient reached the main reducer's share in call {number} of loss_func: "
                    "return the share that the reducer made, alone or added to others', and let "
                    "the schedule run its backward pass"
                )
        for call in calls:
            if call.is_late and call.has_gradient:
                return (
                    f"a reducer of sequences {first_few(call.sequences)} was called after "
                    f"loss_func had "
                    "returned for them, and trained: make every reducer of a loss for its own "
                    "microbatch"
                )
        return ""

    @property
    def _calls(self) -> list[ReducerCall]:
        return [call for plan in self._plans for call in plan.state.calls or ()]

    def _report(self, name: str, share: Tensor) -> Tensor:
        _check_scalar(name, share)
        value = _widened(share.detach())
        return torch.stack([value * self._scaling.report_factor, torch.ones_like(value)])

    def _check_source(self, share: Tensor, reducer: Reducer) -> None:
        """Check which reducers made a share, and whether it is trained as the step declares."""
        own, its = self.plan.active_tokens, reducer.plan.active_tokens
        if its is not own:  # under() keeps the very array
            raise ContractError(
                f"got a reducer of another plan ({len(its)} sequences), expected one of this plan "
                f"({len(own)} sequences): make it with plan.reducer(...) or under(...)"
            )
        if reducer.plan.aggregation != self.plan.aggregation:
            raise ContractError(
                f"got a main reducer under {reducer.plan.aggregation}, the step's plan is under "
                f"{self.plan.aggregation}: pass the reducer of the step's own aggregation; others "
                "are for further terms"
            )
        layout, contract = reducer.layout, self.contract
        if (layout.cp_size, layout.cp_rank) != (contract.cp_size, contract.cp_rank):
            raise ContractError(
                f"got a reducer of CP rank {layout.cp_rank} of {layout.cp_size}, this rank is "
                f"{contract.cp_rank} of {contract.cp_size}: make the layout with contract.thd(...) "
                "or contract.local(...), or pass it the contract's cp_size and cp_rank"
            )
        pending = [call for plan in self._plans for call in plan.state.pending]
        calls = [call for call in pending if np.array_equal(call.sequences, reducer.sequences)]
        identity = reducer.microbatch.identity
        main = [call for call in calls if call.microbatch is identity]
        if not any(call.aggregation == self.plan.aggregation for call in main):
            raise ContractError(
                "got a reducer that was not called in this microbatch: make the reducer anew for "
                "each microbatch, and the loss by calling it"
            )
        self._check_gradient(share, main)
        if share.requires_grad:
            self._trained.append((self._ledger.num_calls, identity))
        for plan in self._plans:
            plan.state.returned.update(call.microbatch for call in calls)
            plan.state.pending = [call for call in plan.state.pending if call not in calls]

    def _check_gradient(self, share: Tensor, calls: Sequence[ReducerCall]) -> None:
        if self.forward_only and share.requires_grad:
            raise ContractError(
                "got a loss that requires a gradient in a step with forward_only=True: run an "
                "evaluation under torch.no_grad(), or begin a training step"
            )
        if self.forward_only or share.requires_grad:
            return
        if self.plan.active_tokens.any() or any(call.requires_grad for call in calls):
            raise ContractError(
                "got a loss that requires no gradient in a training step, so that nothing would "
                "be trained: do not detach it, call the reducer outside no_grad and "
                "inference_mode, let a custom reducer keep its graph, or pass forward_only=True"
            )

    def _look_at_gradients(self) -> None:
        """Look at some values of each gradient buffer, which are zero before the first loss."""
        for index, chunk in enumerate(self.contract._chunks):
            # Then parameters are gathered into the gradient buffers.
            if getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
                continue
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                data = buffer.grad_data
                if data.numel() and data.untyped_storage().size():
                    some = data[:: -(-data.numel() // _GRADIENTS_LOOKED_AT)]
                    describe = partial(_describe_gradients, index)
                    self.plan.state.faults.record([some.count_nonzero()], describe)


_GRADIENTS_LOOKED_AT = 4096


def _describe_gradients(chunk: int, values: list[float]) -> str:
    if not values[0]:
        return ""
    return (
        f"the gradients of chunk {chunk} were not zero when the step's first loss was returned: "
        "call zero_grad_buffer() on every chunk before the schedule, also after a step that "
        "failed; if gradients of several schedule calls are added on purpose, pass "
        "contract.step(accumulates=True)"
    )


def _is_same_function(one: Any, other: Any) -> bool:
    """Whether two callables are one, or partials of one with the same arguments."""
    if isinstance(one, partial) and isinstance(other, partial):
        same = one.args == other.args and one.keywords == other.keywords
        return same and _is_same_function(one.func, other.func)
    return bool(one == other)


def _settings_of(aggregation: Aggregation) -> str:
    return f"{aggregation} ({aggregation!r})"  # a formula may not show count_empty


def _agree(fault: str, settings: str) -> None:
    """Raise one :class:`ContractError` on every rank of the world, or on none."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (fault, settings))
    for rank, (fault_of_rank, _) in enumerate(gathered):
        if fault_of_rank:
            raise ContractError(f"rank {rank}: {fault_of_rank}")
    first = gathered[0][1]
    for rank, (_, settings_of_rank) in enumerate(gathered):
        if settings_of_rank != first:
            raise ContractError(
                f"ranks disagree: rank 0 has {first}, rank {rank} has {settings_of_rank}: start "
                "all ranks with the same flags and versions"
            )


def _record_first_step() -> None:
    """Write the file that a launcher named: a failure before it exists would only be repeated."""
    if path := os.environ.pop("LOSSAGG_FIRST_STEP_FILE", None):
        with suppress(OSError):  # the launcher's loss, not the run's
            Path(path).touch()


def _check_names(names: Sequence[str]) -> None:
    taken = {name for name in names if names.count(name) > 1 or name.startswith("lossagg/")}
    if taken:
        raise ContractError(
            f"got the reported names {sorted(taken)}, expected each once and none that starts with "
            "lossagg/: rename them"
        )


def _mean(name: str, total: Tensor, count: Tensor | float) -> Tensor:
    _check_scalar(f"the sum of {name}", total)
    total = _widened(total.detach())
    if isinstance(count, Tensor):
        return torch.stack([total, moved(count.detach(), total.device).to(total.dtype)])
    return torch.stack([total, torch.full_like(total, count)])


def _widened(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _check_scalar(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        raise ContractError(
            f"{name} is {value!r}: expected a 0-dim floating-point tensor, as a reducer returns"
        )
