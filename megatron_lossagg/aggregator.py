"""One loss aggregation on one live model, for a whole run.

How Megatron scales a loss, and why K compensates it, is in :mod:`megatron_lossagg.scaling`.
In the per-token loss scaling num_tokens comes from the counts of the step, so that the sum over
the step is the plan's N for any loss mask. Stock Megatron's side losses (MoE, MTP) keep their 1/N.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.errors import ContractError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.flags import aggregation_from_args
from megatron_lossagg.integers import IntsLike, is_integer
from megatron_lossagg.layout import Layout
from megatron_lossagg.live import (
    Frozen,
    LiveGroups,
    checked_loss_scaling,
    megatron_version,
    note_on_side_losses,
)
from megatron_lossagg.options import Options
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.scaling import K_FORMULA, MOST_TOKENS_PER_TOKEN, LossScaling
from megatron_lossagg.sequences import Ids, Sequences
from megatron_lossagg.step import Step

if TYPE_CHECKING:
    from megatron_lossagg.probe import ProbeReport
    from megatron_lossagg.schedule import Integration, ScheduleHook

__all__ = ["LossAggregator"]


class LossAggregator:
    """Trains one aggregation on one model; made once per run, on every rank.

    ``model``: the DDP-wrapped chunks as passed to the schedule, or one chunk. ``aggregation``: an
    :class:`Aggregation`, or the name of a mode or an alias, with ``divisor`` and ``count_empty``.

    Reads loss scaling and groups from the chunks and rejects what K cannot compensate. With
    ``options.probe`` it then measures K, once per process and kind of model. Raises
    :class:`ContractError` on every rank if one rank rejects its model, if the ranks disagree on
    the aggregation, and if Megatron needs a different K. Collectives: one ``all_gather_object``
    over the world and the probe's. Make it outside the schedule.
    """

    def __init__(
        self,
        model: Any,
        aggregation: Aggregation | str,
        *,
        divisor: float | None = None,
        count_empty: bool | None = None,
        options: Options | None = None,
    ) -> None:
        self.aggregation = _aggregation(aggregation, divisor, count_empty)
        self.options = options or Options()
        self._chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        if not dist.is_initialized():
            raise ContractError(
                "torch.distributed is not initialized: make the LossAggregator after it is"
            )
        self._read()
        self._config = self._chunks[0].config
        self._finalize = self._config.finalize_model_grads_func
        self._agreed = {self.aggregation}
        self._latest: Step | None = None
        self._hook: ScheduleHook | None = None
        self.note = note_on_side_losses(self._config, self.loss_scaling)
        """Which side losses depend on CP, for the start of a run; empty if none does."""
        self.has_slices = False
        """Whether a step's masks were slices of context-parallel ranks (layout ``local``)."""
        self.probe: ProbeReport | None = None
        """What the startup probe measured; None if it was not asked for."""
        if self.options.probe:
            from megatron_lossagg.probe import run_probe

            self.probe = run_probe(self)

    @staticmethod
    def from_args(model: Any, args: argparse.Namespace) -> LossAggregator | None:
        """Make it from the ``--loss-aggregation*`` flags; None if no flag was given."""
        aggregation = aggregation_from_args(args)
        if aggregation is None:
            return None
        return LossAggregator(model, aggregation, options=Options.from_args(args))

    def _read(self) -> None:
        """Read what the live model is; a refusal on one rank reaches all."""
        fault, settings = "", ""
        try:
            loss_scaling = checked_loss_scaling(self._chunks)
            frozen = Frozen.of(self._chunks, loss_scaling)
            groups = LiveGroups.of(self._chunks)
            settings = f"megatron-core {megatron_version()}, loss scaling {loss_scaling}, "
            settings += f"{self.options}, {_settings_of(self.aggregation)}"
        except Exception as error:  # of any type: no rank may leave the others waiting
            fault = str(error) if isinstance(error, ContractError) else repr(error)
        _agree(fault, settings)
        self._frozen = frozen
        self.loss_scaling: LossScaling = loss_scaling
        self.dp_group: ProcessGroup = groups.dp_group
        """The dense data-parallel group without context parallelism."""
        self.tp_group: ProcessGroup = groups.tp_group
        """The tensor-parallel group."""
        self.cp_group: ProcessGroup = groups.cp_group
        """The context-parallel group."""
        self.pp_group: ProcessGroup = groups.pp_group
        """The pipeline-parallel group."""
        self.cp_size = groups.cp_size
        self.cp_rank = groups.cp_rank
        self.dp_size = groups.dp_size
        self.dp_cp_size = groups.dp_cp_size
        """DP * CP: the size of the group whose gradients the chunks reduce over."""
        self.is_last_stage = groups.is_last_stage
        """Whether this rank's pipeline stage calls loss_func."""

    def agree_on(self, aggregation: Aggregation) -> None:
        """Check that a further aggregation of the run is the same on every rank.

        :meth:`begin` takes plans under the run's aggregation and those that this method has seen.
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

    def step(
        self,
        active_tokens: IntsLike | None = None,
        *,
        num_microbatches: int,
        sample: Ids | None = None,
        prompt: Ids | None = None,
        microbatch: IntsLike | None = None,
        samples_per_prompt: int | None = None,
        forward_only: bool = False,
        accumulates: bool = False,
        also: Sequence[StepPlan] = (),
    ) -> Step:
        """Plan and begin a schedule call of ``num_microbatches``; leaving ``with`` finishes it.

        ``active_tokens``, ``sample``, ``prompt``, ``microbatch``, ``samples_per_prompt``: the
        sequences of this data-parallel rank, as in :class:`Sequences`. Only the last pipeline stage
        plans them: earlier stages ignore these and ``also``, and may leave them out. On the last
        stage a tensor-parallel rank without data leaves them out too and takes those of the first
        rank of its group. The others: see :meth:`begin`.

        Every rank calls. Collectives: on the last stage those of :func:`plan_step` over
        :attr:`dp_group`, and one ``all_gather_object`` over :attr:`tp_group` if it has several
        ranks; on every stage one all-gather over :attr:`pp_group` if it has several ranks. Raises
        what :func:`plan_step` and :meth:`begin` raise, and :class:`ContractError` with that message
        on the other stages.
        """
        given = {
            "active_tokens": active_tokens,
            "sample": sample,
            "prompt": prompt,
            "microbatch": microbatch,
            "samples_per_prompt": samples_per_prompt,
        }

        def begin() -> Step:
            is_last = self.is_last_stage
            return self.begin(
                self._plan(given, num_microbatches, forward_only) if is_last else None,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                accumulates=accumulates,
                also=also if is_last else (),
            )

        return self._alike_on_stages(begin)

    def begin(
        self,
        plan: StepPlan | None,
        *,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool = False,
        also: Sequence[StepPlan] = (),
    ) -> Step:
        """Begin a schedule call over a plan of your own, such as ``StepBuffer.plan`` makes.

        ``plan``: over :attr:`dp_group`; None on a pipeline stage that computes no loss.
        ``forward_only``: nothing is trained, and the plan may be used again; the schedule runs
        under ``torch.no_grad()``. ``accumulates``: gradients of earlier schedule calls are kept
        on purpose; else they must be zero when the first loss is returned. ``also``: plans over
        the same sequences with other counts, for further terms of the loss. What the rerun state
        machine repeats belongs inside the same step.

        Compares what construction froze with the live config once more. A module that was added or
        replaced later is not seen. Raises :class:`ContractError` if they differ, if the config has
        no ``finalize_model_grads_func`` or a different one (except for ``forward_only``), if the
        previous step was not finished, and if the plan was counted over other ranks, has trained a
        step, is for another number of microbatches, or is under an aggregation that the ranks have
        not agreed on. No collective.
        """
        if self._latest is not None and self._latest.is_left_open:
            raise ContractError(
                "the previous step was not finished: write `with aggregator.step(...) as step:` "
                "around the schedule call, or call step.finish() after it, before the optimizer's "
                "step"
            )
        self._frozen.check()
        if not forward_only:
            self._check_finalize()
        if not is_integer(num_microbatches, lowest=1):
            raise ContractError(
                f"got num_microbatches {num_microbatches!r}, expected an integer from 1: pass "
                "what the schedule gets"
            )
        if plan is None and (self.is_last_stage or also):
            raise ContractError(
                "got no counts on the last pipeline stage, which computes the loss: pass "
                "active_tokens= there"
            )
        plans = (*([] if plan is None else [plan]), *also)
        for one in plans:
            self._check_plan(one, num_microbatches, forward_only)
            if len(one.active_tokens) != len(plans[0].active_tokens):
                raise ContractError(
                    f"also= has a plan of {len(one.active_tokens)} sequences, the step's plan has "
                    f"{len(plans[0].active_tokens)}: plan the same sequences, with 0 if one has no "
                    "tokens"
                )
        if accumulates:
            self._check_accumulation()
        if self._latest is not None:
            self._latest.end()
        for one in plans:
            one.state.is_stepped = one.state.is_stepped or not forward_only
        self._latest = Step(
            aggregator=self,
            plan=plan,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            accumulates=accumulates,
            also=tuple(also),
        )
        for one in plans:
            one.state.refuse_others()
        return self._latest

    def wrap(self, schedule: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
        """Wrap what ``get_forward_backward_func()`` returned, if the loop reads its data inside.

        The wrapped schedule reads a step's microbatches, counts and plans them, replays them to
        the loop's ``forward_step_func`` and trains this aggregation instead of the loop's loss. See
        :class:`~megatron_lossagg.schedule.ScheduleHook`.
        """
        from megatron_lossagg.schedule import ScheduleHook

        if self._hook is None or self._hook.integration is not integration:
            self._hook = ScheduleHook(self.aggregation, integration, options=self.options)
            self._hook.aggregator = self
        return self._hook.wrap(schedule)

    def describe(self) -> str:
        """Write a line for the start of a run: mode, formula, loss scaling, K; then the note."""
        line = (
            f"loss aggregation {self.aggregation}; loss scaling {self.loss_scaling}, K = "
            f"{K_FORMULA[self.loss_scaling]} "
            f"(DP {self.dp_size}, CP {self.cp_size}); probe: {self.probe or 'off'}"
        )
        return f"{line}\n{self.note}" if self.note else line

    def has_chunks(self, chunks: Sequence[Any]) -> bool:
        """Whether it was made of these very chunks."""
        return [id(chunk) for chunk in chunks] == [id(chunk) for chunk in self._chunks]

    @property
    def chunks(self) -> list[Any]:
        """The DDP-wrapped chunks of this rank."""
        return self._chunks

    def _alike_on_stages(self, begin: Callable[[], Step]) -> Step:
        """Begin a step on every pipeline stage, or raise on all of them."""
        exchange = Exchange(self.pp_group)
        if exchange.size == 1:
            return begin()
        step, error = None, None
        try:
            step = begin()
        except Exception as found:  # of any type: no stage may leave the others waiting
            error = found
        messages = exchange.messages("" if error is None else str(error) or repr(error))
        if error is not None:
            raise error
        assert step is not None
        for stage, message in enumerate(messages):
            if message:
                step.end()
                raise ContractError(f"pipeline stage {stage}: {message}")
        return step

    def _of_first_rank(self, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the counts of the tensor-parallel group's first rank, or what is wrong."""
        size = dist.get_world_size(self.tp_group)
        if size == 1:
            return given, ""
        own, fault = {}, ""
        try:
            own = {name: np.asarray(value).tolist() for name, value in given.items()}
        except Exception as error:  # of any type: no rank may leave the others waiting
            fault = repr(error)
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, (own, fault), group=self.tp_group)
        first = gathered[0][0]
        for rank, (of_rank, fault_of_rank) in enumerate(gathered):
            if fault_of_rank:
                return first, f"tensor-parallel rank {rank}: {fault_of_rank}"
            if of_rank not in ({}, first):
                return first, (
                    f"tensor-parallel ranks 0 and {rank} pass different counts: give both the same "
                    f"data, or leave the counts of rank {rank} out"
                )
        return first, ""

    def _plan(
        self, arguments: dict[str, Any], num_microbatches: int, forward_only: bool
    ) -> StepPlan:
        """Plan the counts of this data-parallel rank; see :meth:`step`."""
        given, fault = self._of_first_rank(
            {name: value for name, value in arguments.items() if value is not None}
        )
        if "active_tokens" not in given and not fault:
            fault = "got no counts: pass active_tokens=, at least on the first tensor-parallel rank"
        sequences = Sequences(active_tokens=[])
        if not fault:
            sequences = Sequences(**given, num_microbatches=num_microbatches)
        return plan_step(
            self.aggregation,
            sequences,
            group=self.dp_group,
            options=self.options.of_step(forward_only),
            fault=fault,
        )

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
        if now is None:
            raise ContractError(
                "config.finalize_model_grads_func is None: the schedule would reduce no gradient "
                "over data-parallel ranks; set it to finalize_model_grads before the first step"
            )
        if self._finalize is None:  # training sets it before its first step
            self._finalize = now
        if not _is_same_function(now, self._finalize):
            raise ContractError(
                f"config.finalize_model_grads_func is {now!r}, it was {self._finalize!r} when the "
                "LossAggregator was made: a different function may scale gradients differently; "
                "make the LossAggregator after replacing it"
            )

    def _check_plan(self, plan: StepPlan, num_microbatches: int, forward_only: bool) -> None:
        if plan.num_microbatches not in (None, num_microbatches):
            raise ContractError(
                f"the plan was made for {plan.num_microbatches} microbatches, the schedule runs "
                f"{num_microbatches}: pass the same number to Sequences and to the step"
            )
        own = tuple(dist.get_process_group_ranks(self.dp_group))
        if plan.group_ranks not in (None, own):
            raise ContractError(
                f"the plan was counted over ranks {list(plan.group_ranks or ())}, the model's "
                f"data-parallel group without context parallelism is {list(own)}: pass "
                "group=aggregator.dp_group to plan_step"
            )
        if plan.state.is_stepped and not forward_only:
            raise ContractError(
                "the plan has already begun to train a step: a plan is for one optimizer step; "
                "call plan_step for each, and again after a step that failed, or pass "
                "forward_only=True if nothing is trained"
            )
        if plan.aggregation not in self._agreed:
            raise ContractError(
                f"the plan is under {plan.aggregation}, which the ranks have not agreed on: call "
                "aggregator.agree_on(...) on every rank"
            )
        n = plan.totals.active_tokens
        if self.loss_scaling == "per_token" and n is None:
            raise ContractError(
                "the per-token loss scaling divides by the step's active tokens, which the plan "
                "does not know: give StepTotals(active_tokens=...), or let plan_step count"
            )
        if self.loss_scaling == "per_token" and n is not None and n > MOST_TOKENS_PER_TOKEN:
            raise ContractError(
                f"the step has {n} active tokens, Megatron-Core counts them in int32: take "
                "fewer per step, or train without --calculate-per-token-loss"
            )


def _aggregation(
    aggregation: Aggregation | str, divisor: float | None, count_empty: bool | None
) -> Aggregation:
    if not isinstance(aggregation, Aggregation):
        return Aggregation(aggregation, divisor=divisor, count_empty=count_empty)
    if (divisor, count_empty) != (None, None):
        raise ContractError(
            "got an Aggregation and a divisor or count_empty: set them in the Aggregation"
        )
    return aggregation


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
