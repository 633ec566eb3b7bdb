"""The contract with Megatron-Core: shares scaled by K, what loss_func returns, the report.

How Megatron scales a loss, and why K compensates it, is in :mod:`megatron_lossagg.scaling`.
In the per-token regime num_tokens comes from the counting side, so that the sum over the
step is the plan's N for any training mask; stock Megatron's side losses (MoE, MTP)
keep their 1/N.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import Sequences, StepTotals
from megatron_lossagg.devices import moved
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integers import IntsLike, is_integer
from megatron_lossagg.layout import Layout
from megatron_lossagg.ledger import Ledger
from megatron_lossagg.live import LiveGroups, check_live, checked_regime, megatron_version
from megatron_lossagg.microbatch import FILLER
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.probe import ProbeReport, Trial, run_probe
from megatron_lossagg.reducer import Reducer
from megatron_lossagg.scaling import K_FORMULA, MOST_TOKENS_PER_TOKEN, Regime, Scaling

__all__ = ["MegatronContract", "StepContract"]


class MegatronContract:
    """How the live model's Megatron-Core scales a loss; made once per run by :meth:`read`."""

    def __init__(self, *, chunks: Sequence[Any], regime: Regime, groups: LiveGroups) -> None:
        self._chunks = list(chunks)
        self._config = chunks[0].config
        self._latest: StepContract | None = None
        self.regime: Regime = regime
        self.dp_group = groups.dp_group
        """The dense data-parallel group without context parallelism."""
        self.tp_group = groups.tp_group
        """The tensor-parallel group."""
        self.cp_size = groups.cp_size
        self.cp_rank = groups.cp_rank
        self.dp_size = groups.dp_size
        self.dp_cp_size = groups.dp_cp_size
        """DP * CP: the size of the group whose gradients the chunks reduce over."""
        self.is_last_stage = groups.is_last_stage
        """Whether this rank's pipeline stage calls loss_func."""
        self.probe: ProbeReport | None = None
        """What the startup probe measured; None where it was not asked for."""

    @staticmethod
    def read(
        model: Any, *, aggregation: Aggregation | None = None, probe: bool = True
    ) -> MegatronContract:
        """Read regime and groups from the DDP-wrapped chunks; refuse what K cannot compensate.

        ``model``: the chunks as passed to the schedule, or one chunk. ``aggregation``: checked
        to be the same on every rank of the world. ``probe``: then measure K with
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
            regime = checked_regime(chunks)
            groups = LiveGroups.of(chunks)
            settings = f"megatron-core {megatron_version()}, regime {regime}, "
            settings += f"{aggregation} ({aggregation!r})"  # a formula may not show count_empty
        except Exception as error:  # of any type: no rank may leave the others waiting
            fault = str(error) if isinstance(error, ContractError) else repr(error)
        _agree(fault, settings)
        contract = MegatronContract(chunks=chunks, regime=regime, groups=groups)
        if probe:
            contract.probe = run_probe(chunks, contract, contract._trial)
        return contract

    def thd(self, cu_seqlens_padded: IntsLike) -> Layout:
        """Return ``Layout.thd_zigzag`` for this rank; a CUDA tensor costs one host sync."""
        return Layout.thd_zigzag(cu_seqlens_padded, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def local(self, row_lengths_here: IntsLike) -> Layout:
        """Return ``Layout.local`` for this rank: mask and losses are already its own."""
        return Layout.local(row_lengths_here, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def step(
        self, plan: StepPlan, *, num_microbatches: int, forward_only: bool = False
    ) -> StepContract:
        """Begin a schedule call of ``num_microbatches`` over ``plan``; close it by ``with``.

        ``forward_only``: nothing is trained, and the plan may be used again. What the rerun
        state machine repeats belongs inside the same step.

        Compares what construction froze with the live config once more, and raises
        :class:`ContractError` where they differ, where the config has no
        ``finalize_model_grads_func`` (except for ``forward_only``), where the plan was counted
        over other ranks than ``dp_group``, has already trained a step or was made for another
        number of microbatches, and where the previous step was not closed. No collective.
        """
        if self._latest is not None and self._latest.is_left_open:
            raise ContractError(
                "the previous step was not closed: write `with contract.step(...) as step:` around "
                "the schedule call, or call step.close() after it, before the optimizer's step"
            )
        check_live(self._chunks, self.regime)
        if not forward_only and self._config.finalize_model_grads_func is None:
            raise ContractError(
                "config.finalize_model_grads_func is None: the schedule would reduce no gradient "
                "over data-parallel ranks; set it to finalize_model_grads before the first step"
            )
        if not is_integer(num_microbatches, lowest=1):
            raise ContractError(
                f"got num_microbatches {num_microbatches!r}, expected an integer from 1: pass "
                "what the schedule gets"
            )
        if plan.num_microbatches not in (None, num_microbatches):
            raise ContractError(
                f"the plan was made for {plan.num_microbatches} microbatches, the schedule runs "
                f"{num_microbatches}: pass the same number to Sequences and to step()"
            )
        self._check_plan(plan, forward_only)
        plan.state.is_stepped = plan.state.is_stepped or not forward_only
        self._latest = StepContract(contract=self, plan=plan, num_microbatches=num_microbatches)
        return self._latest

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
        n = plan.totals.active_tokens
        if self.regime == "per-token" and n is None:
            raise ContractError(
                "the per-token regime divides by the step's active tokens, which the plan does "
                "not know: give StepTotals(active_tokens=...), or let plan_step count"
            )
        if self.regime == "per-token" and n is not None and n > MOST_TOKENS_PER_TOKEN:
            raise ContractError(
                f"the step has {n} active tokens, Megatron-Core counts them in int32: take "
                "fewer per step, or train without --calculate-per-token-loss"
            )

    def _trial(self, counted: Sequence[int], active_tokens: int) -> Trial:
        """Begin the probe's step: one row per microbatch, of as many tokens as ``counted``."""
        plan = plan_step(
            Aggregation("token_sum"),
            Sequences(active_tokens=list(counted)),
            totals=StepTotals(active_tokens=active_tokens),
        )
        step = StepContract(contract=self, plan=plan, num_microbatches=len(counted))

        def returns(share: Tensor, m: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            mask = torch.ones(counted[m], device="cpu")
            return step.returns(share, plan.reducer([m], mask, self.local([counted[m]])))

        return Trial(factor=step.factor, returns=returns)

    def describe(self, aggregation: Aggregation) -> str:
        """Write one line for the start of a run: mode, formula, regime, K."""
        return (
            f"loss aggregation {aggregation}; regime {self.regime}, K = {K_FORMULA[self.regime]} "
            f"(DP {self.dp_size}, CP {self.cp_size}); probe: {self.probe or 'off'}"
        )


@dataclass(kw_only=True, eq=False)
class StepContract:
    """One schedule call: scales shares by K, makes reports, tracks the rows.

    A context manager: leaving it closes the step, before the optimizer's. An exception inside
    goes through unchanged, and nothing is checked then.
    """

    contract: MegatronContract
    plan: StepPlan
    num_microbatches: int
    """M of this schedule call."""
    is_closed: bool = False
    _ledger: Ledger = field(init=False)
    _scaling: Scaling = field(init=False)

    def __post_init__(self) -> None:
        self._ledger = Ledger(
            num_rows=len(self.plan.active_tokens), num_microbatches=self.num_microbatches
        )
        self._scaling = Scaling(
            regime=self.contract.regime,
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
        self.is_closed = True

    @property
    def is_left_open(self) -> bool:
        """Whether loss_func ran for it, on this rank, and nothing has closed it."""
        return self._ledger.num_calls > 0 and not self.is_closed

    @property
    def factor(self) -> int:
        """K: M DP CP in the average regime, N in the per-token regime."""
        return self._scaling.k

    def returns(
        self,
        share: Tensor,
        reducer: Reducer,
        report: Mapping[str, Tensor] | None = None,
        means: Mapping[str, tuple[Tensor, Tensor | float]] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Make what loss_func returns: ``(loss, num_tokens, report)``.

        ``share``: 0-dim, the sum of all terms' shares. ``reducer``: the microbatch's main
        reducer, whose rows are tracked. ``report``: 0-dim shares by name. ``means``: local sums
        with their counts by name, of what is a mean already (clip fraction, reward): Megatron
        adds both over the step and divides, so one mean over the step is logged.

        loss is ``share * K`` in fp32 or better with storage of its own (the schedule scales it
        in place); num_tokens an int32 0-dim tensor on its device; each report a detached
        ``[share * M DP CP, 1]``, each mean a detached ``[sum, count]``. Adds
        ``lossagg/weight_sum`` and ``lossagg/weight_expected``. The weight-sum check sees the
        weights as sliced and masked, not what is done to a share afterwards. No collective, no
        host sync.
        """
        _check_scalar("share", share)
        _check_names([*(report or {}), *(means or {})])
        self._track(reducer)
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

        Every row and microbatch arrived (on the last pipeline stage, which alone calls
        loss_func), and no device found a fault in a mask or loss. Raises :class:`ContractError` or
        :class:`ReducerError` on this rank. One host sync for each device that recorded
        something, no collective. ``with`` calls it.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self.plan.check()
        self._ledger.close(may_be_empty=not self.contract.is_last_stage)
        _record_first_step()

    def _report(self, name: str, share: Tensor) -> Tensor:
        _check_scalar(name, share)
        value = _widened(share.detach())
        return torch.stack([value * self._scaling.report_factor, torch.ones_like(value)])

    def _track(self, reducer: Reducer) -> None:
        own, its = self.plan.active_tokens, reducer.plan.active_tokens
        if its is not own:  # under() keeps the very array
            raise ContractError(
                f"got a reducer of another plan ({len(its)} rows), expected one of this plan "
                f"({len(own)} rows): make it with plan.reducer(...) or under(...)"
            )
        layout, contract = reducer.layout, self.contract
        if (layout.cp_size, layout.cp_rank) != (contract.cp_size, contract.cp_rank):
            raise ContractError(
                f"got a reducer of CP rank {layout.cp_rank} of {layout.cp_size}, this rank is "
                f"{contract.cp_rank} of {contract.cp_size}: make the layout with contract.thd(...) "
                "or contract.local(...), or pass it the contract's cp_size and cp_rank"
            )
        self._ledger.add(reducer.rows[reducer.rows != FILLER])


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
