"""One loss aggregation on one live model, for a whole run.

How Megatron scales a loss, and why K compensates it, is in ``contract/scaling.py``.
In the per-token loss scaling num_tokens comes from the counts of the step, so that the sum over
the step is the plan's N for any loss mask. Stock Megatron's side losses (MoE, MTP) keep their 1/N.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.contract.finalize import DivisorCheck, own_finalize
from megatron_lossagg.contract.live import (
    Frozen,
    LiveGroups,
    checked_loss_scaling,
    is_megatrons_finalize,
    may_hold_back,
    megatron_version,
    note_on_side_losses,
)
from megatron_lossagg.contract.scaling import K_FORMULA, MOST_TOKENS_PER_TOKEN, LossScaling
from megatron_lossagg.errors import ContractError, message_of
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.loop.step import Step
from megatron_lossagg.record.writer import RecordFile, StepRecorder
from megatron_lossagg.reduction.aggregation import Aggregation, Count
from megatron_lossagg.reduction.exchange import Exchange, gather_counts
from megatron_lossagg.reduction.integers import IntsLike, is_integer
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.options import Options
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import FloatsLike, Ids, Sequences

if TYPE_CHECKING:
    from megatron_lossagg.loop.integration import Integration
    from megatron_lossagg.loop.probe import ProbeReport
    from megatron_lossagg.loop.schedule_hook import ScheduleHook

__all__ = ["LossAggregator"]


class LossAggregator:
    """Trains one aggregation on one model; made once per run, on every rank.

    Reads loss scaling and groups from the chunks and rejects what K cannot compensate. With
    ``options.probe`` it then measures K. Collectives: one ``all_gather_object`` over the world and
    the probe's. Make it outside the schedule.

    Args:
        model: The DDP-wrapped chunks as passed to the schedule, or one chunk.
        aggregation: An :class:`Aggregation`, or the name of a mode or an alias, whose numbers
            follow.
        divisor: As in :class:`Aggregation`.
        exponent: As in :class:`Aggregation`.
        count_empty: As in :class:`Aggregation`.
        count: As in :class:`Aggregation`.
        options: The options of the run.

    Raises:
        ContractError: On every rank, if one rank rejects its model, if the ranks disagree on the
            aggregation, if ``options.record`` cannot be written, and if Megatron needs a different
            K.
        AggregationError: For a name or a number that :class:`Aggregation` refuses.

    Examples:
        One rank; ``model`` is Megatron's. [A loop of your own](../own-loop.md) has a whole step.

        >>> aggregator = LossAggregator(model, "constant", divisor=4096)
        >>> mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0])
        >>> losses = torch.rand(8)  # of your model, one per token
        >>> with aggregator.step([3, 2], num_microbatches=1, forward_only=True) as step:
        ...     mb = step.microbatch([0, 1], mask, cu_seqlens=[0, 4, 8])
        ...     partial_loss = mb.reduce(losses)
        ...     for_megatron = mb.outputs(partial_loss)  # what loss_func returns
        >>> bool(torch.isclose(partial_loss, (losses * mask).sum() / (2 * 4096)))
        True
    """

    counts_parts = False
    """Whether each rank counts its parts of sequences, as dynamic context parallelism needs."""

    def __init__(
        self,
        model: Any,
        aggregation: Aggregation | str,
        *,
        divisor: float | None = None,
        exponent: float | None = None,
        count_empty: bool | None = None,
        count: Count | None = None,
        options: Options | None = None,
    ) -> None:
        self.aggregation = _aggregation(aggregation, divisor, exponent, count_empty, count)
        self.options = options or Options()
        self.chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        """The DDP-wrapped chunks of this rank."""
        if not dist.is_initialized():
            raise ContractError(
                "torch.distributed is not initialized: make the LossAggregator after it is"
            )
        self._read()
        self._config = self.chunks[0].config
        self._finalize = own_finalize(self._config)
        self._agreed = {self.aggregation}
        self._latest: Step | None = None
        self._hook: ScheduleHook | None = None
        self.note = note_on_side_losses(self._config, self.loss_scaling)
        """Which side losses depend on CP, for the start of a run; empty if none does."""
        self.probe: ProbeReport | None = None
        """What the startup probe measured; None if it was not asked for."""
        if self.options.probe:
            from megatron_lossagg.loop.probe import run_probe

            self.probe = run_probe(self)

    @staticmethod
    def from_args(model: Any, args: argparse.Namespace) -> LossAggregator | None:
        """Make it from the ``--loss-aggregation*`` flags; None if no flag was given.

        Every rank calls, without a flag too: one ``all_gather_object`` over the world then.

        Args:
            model: The DDP-wrapped chunks, or one chunk.
            args: The parsed flags of :func:`add_loss_aggregation_args`.

        Returns:
            The aggregator, or None.

        Raises:
            ContractError: For a shadow without a mode, which only a schedule hook has; and as
                :class:`LossAggregator`.
            AggregationError: For flags that contradict each other or configure no loss.
            ReducerPathError: For a reducer path that leads to no factory.
        """
        aggregation, options = aggregation_from_args(args), Options.from_args(args)
        if aggregation is None and options.shadow:
            raise ContractError(
                "got --loss-aggregation-shadow without --loss-aggregation in a loop that makes its "
                "own LossAggregator, expected a mode that it trains: add --loss-aggregation MODE"
            )
        if aggregation is not None:
            return LossAggregator(model, aggregation, options=options)
        if dist.is_initialized():
            _agree("", "no --loss-aggregation")
        return None

    def _read(self) -> None:
        """Read what the live model is; a refusal on one rank reaches all."""
        fault, settings = "", ""
        try:
            loss_scaling = checked_loss_scaling(self.chunks, counts_parts=self.counts_parts)
            frozen = Frozen.of(self.chunks, loss_scaling)
            groups = LiveGroups.of(self.chunks)
            mode = getattr(self.chunks[0].config, "cp_partition_mode", "zigzag")
            is_contiguous = mode == "contiguous" and groups.cp_size > 1
            settings = f"megatron-core {megatron_version()}, loss scaling {loss_scaling}, "
            settings += f"{self.options}, {_settings_of(self.aggregation)}"
            if groups.cp_group is None and self.options.record is not None:
                raise ContractError(
                    "got a record with dynamic_context_parallel, expected none: a line holds the "
                    "hash of whole sequences' weights, and each rank has parts of them; drop "
                    "--loss-aggregation-record"
                )
            self._record_group, self._record_file = self._opened_record(groups)
        except Exception as error:  # of any type: no rank may leave the others waiting
            fault = message_of(error)
        _agree(fault, settings)
        self._frozen = frozen
        self.loss_scaling: LossScaling = loss_scaling
        self.dp_group: ProcessGroup = groups.dp_group
        """The dense data-parallel group without context parallelism."""
        self.tp_group: ProcessGroup = groups.tp_group
        """The tensor-parallel group."""
        self.cp_group: ProcessGroup | None = groups.cp_group
        """The context-parallel group; None with dynamic context parallelism, where every rank
        counts and trains parts of sequences of its own."""
        self.pp_group: ProcessGroup = groups.pp_group
        """The pipeline-parallel group."""
        self.cp_size = groups.cp_size
        self.cp_rank = groups.cp_rank
        self.is_contiguous = is_contiguous
        """Whether a context-parallel rank holds one interval of a packed buffer, not two chunks of
        each sequence."""
        self.dp_size = groups.dp_size
        self.dp_cp_size = groups.dp_cp_size
        """DP * CP: the size of the group whose gradients the chunks reduce over."""
        self.is_last_stage = groups.is_last_stage
        """Whether this rank's pipeline stage calls loss_func."""

    @property
    def grad_scale_func(self) -> Callable[[Tensor], Tensor] | None:
        """What the schedule applies to a loss before its backward pass; None without loss scale."""
        scale: Callable[[Tensor], Tensor] | None = self._config.grad_scale_func
        return scale

    def _opened_record(self, groups: LiveGroups) -> tuple[ProcessGroup | None, RecordFile | None]:
        """Return the group that gathers a step's record, and on its first rank the file.

        None and None if no record was asked for, and on ranks that have no part in it: of earlier
        stages, and all but the first of tensor parallelism.
        """
        path = self.options.record
        if path is None or not groups.is_last_stage or dist.get_rank(groups.tp_group) != 0:
            return None, None
        is_first = dist.get_rank(groups.dp_cp_group) == 0
        return groups.dp_cp_group, RecordFile(path) if is_first else None

    def agree_on(self, aggregation: Aggregation) -> None:
        """Check that a further aggregation of the run is the same on every rank.

        :meth:`begin` takes plans under the run's aggregation and those that this method has seen.
        Raises :class:`ContractError` on every rank. One ``all_gather_object`` over the world, by
        every rank.
        """
        _agree("", _settings_of(aggregation))
        self._agreed.add(aggregation)

    def thd(self, cu_seqlens_padded: IntsLike) -> Layout:
        """Return the layout of packed sequences for this rank; a CUDA tensor costs one host sync.

        ``Layout.thd_contiguous`` if the model's ``cp_partition_mode`` is ``contiguous``, else
        ``Layout.thd_zigzag``.
        """
        kind = Layout.thd_contiguous if self.is_contiguous else Layout.thd_zigzag
        return kind(cu_seqlens_padded, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def local(self, sequence_lengths_here: IntsLike) -> Layout:
        """Return ``Layout.local`` for this rank: mask and losses are already its own."""
        return Layout.local(sequence_lengths_here, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def sliced(self, lengths: Sequence[int]) -> Layout:
        """Return ``Layout.local`` for packed sequences that the framework has sliced already.

        ``lengths``: of the whole, padded sequences. The part is what :meth:`thd` would take.
        """
        if not self.is_contiguous:
            return self.local([length // self.cp_size for length in lengths])
        return self.local(self.thd([0, *itertools.accumulate(lengths)]).local_lengths)

    def step(
        self,
        active_tokens: IntsLike | None = None,
        *,
        num_microbatches: int,
        sample: Ids | None = None,
        prompt: Ids | None = None,
        microbatch: IntsLike | None = None,
        token_weight_sums: FloatsLike | None = None,
        samples_per_prompt: int | None = None,
        forward_only: bool = False,
        accumulates: bool = False,
        iteration: int | None = None,
    ) -> Step:
        """Plan and begin a schedule call of ``num_microbatches``; leaving ``with`` finishes it.

        Only the last pipeline stage plans the sequences: earlier stages ignore these and may
        leave them out. On the last stage a tensor-parallel rank without data leaves them out too
        and takes those of the first rank of its group.

        Every rank calls. Collectives: on the last stage those of :func:`plan_step` over
        :attr:`dp_group`, and one ``all_gather_object`` over :attr:`tp_group` if it has several
        ranks; on every stage one all-gather over :attr:`pp_group` if it has several ranks.

        Args:
            active_tokens: Of the sequences of this data-parallel rank, as in :class:`Sequences`.
            num_microbatches: M, what the schedule gets.
            sample: As in :class:`Sequences`.
            prompt: As in :class:`Sequences`.
            microbatch: As in :class:`Sequences`.
            token_weight_sums: As in :class:`Sequences`.
            samples_per_prompt: As in :class:`Sequences`.
            forward_only: As in :meth:`begin`.
            accumulates: As in :meth:`begin`.
            iteration: As in :meth:`begin`.

        Returns:
            The step, a context manager.

        Raises:
            PlanError: As :func:`plan_step`.
            ContractError: As :meth:`begin`; and with the message of a stage that failed, on the
                other stages.
        """
        given = {
            "active_tokens": active_tokens,
            "sample": sample,
            "prompt": prompt,
            "microbatch": microbatch,
            "token_weight_sums": token_weight_sums,
            "samples_per_prompt": samples_per_prompt,
        }
        return self.begin_together(
            partial(self._plan, given, num_microbatches, forward_only),
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            accumulates=accumulates,
            iteration=iteration,
        )

    def begin_together(
        self,
        plan: Callable[[], StepPlan],
        *,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool = False,
        iteration: int | None = None,
    ) -> Step:
        """Plan and begin a schedule call on every pipeline stage, or raise on all of them.

        Also if the stages' M differ.

        ``plan``: makes the plan, and is called on the last stage only. The others: see
        :meth:`begin`. Every rank calls. One all-gather over :attr:`pp_group` if it has several
        ranks.
        """
        step, error = None, None
        try:
            step = self.begin(
                plan() if self.is_last_stage else None,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                accumulates=accumulates,
                iteration=iteration,
            )
        except Exception as found:  # of any type: no stage may leave the others waiting
            error = found
        message = "" if error is None else message_of(error)
        of_stages = Exchange(self.pp_group).messages(f"{num_microbatches}\n{message}")
        if error is not None:
            raise error
        assert step is not None
        fault = _fault_of_stages([text.split("\n", 1) for text in of_stages])
        if fault:
            step.end()
            raise ContractError(fault)
        return step

    def begin(
        self,
        plan: StepPlan | None,
        *,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool = False,
        iteration: int | None = None,
    ) -> Step:
        """Begin a schedule call over a plan of your own, such as ``StepBuffer.plan`` makes.

        Compares what construction froze with the live config once more. A module that was added or
        replaced later is not seen. What the rerun state machine repeats belongs inside the same
        step. No collective.

        Args:
            plan: Over :attr:`dp_group`; None on a pipeline stage that computes no loss.
            num_microbatches: M, what the schedule gets.
            forward_only: Nothing is trained, and the plan may be used again; the schedule runs
                under ``torch.no_grad()``.
            accumulates: Gradients of earlier schedule calls are kept on purpose; else they must be
                zero when the first loss is returned.
            iteration: The number of the step, from 1, in ``options.record``; None is one more than
                that of its last line.

        Returns:
            The step, a context manager.

        Raises:
            ContractError: If the live config changed, if it has no ``finalize_model_grads_func`` or
                a different one (except for ``forward_only``), if the previous step was not
                finished, and if the plan was counted over other ranks, has trained a step, is for a
                different number of microbatches, or is under an aggregation that the ranks have not
                agreed on; for ``accumulates`` where Megatron reduces gradients once more, and for
                ``overlap_grad_reduce`` with no ``no_sync_func`` or a different model's; for a
                finalize function other than Megatron-Core's, set after the probe; and per-token,
                while another step of the model runs.
        """
        if self._latest is not None and self._latest.is_left_open:
            raise ContractError(
                "the previous step was not finished: write `with aggregator.step(...) as step:` "
                "around the schedule call, or call step.finish() after it, before the optimizer's "
                "step; after an error, step.end()"
            )
        if self._latest is not None:
            self._latest.end()
        self._frozen.check()
        if not forward_only:
            self._check_finalize()
        if not is_integer(num_microbatches, lowest=1):
            raise ContractError(
                f"got num_microbatches {num_microbatches!r}, expected an integer from 1: pass "
                "what the schedule gets"
            )
        if iteration is not None and not is_integer(iteration, lowest=1):
            raise ContractError(
                f"got iteration {iteration!r}, expected an integer from 1: pass the number of the "
                "optimizer step that is trained"
            )
        if plan is None and self.is_last_stage:
            raise ContractError(
                "got no counts on the last pipeline stage, which computes the loss: pass "
                "active_tokens= there"
            )
        if plan is not None:
            self._check_plan(plan, num_microbatches, forward_only)
        if not forward_only:
            self._check_overlap(num_microbatches)
        if accumulates:
            self._check_accumulation()
        if plan is not None:
            plan.state.is_stepped = plan.state.is_stepped or not forward_only
        self._latest = Step(
            aggregator=self,
            plan=plan,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            accumulates=accumulates,
            shadows=self.options.shadows,
            record=None if forward_only else self._recorded(iteration),
            divisor=None if forward_only else self._divisor_check(plan, num_microbatches),
        )
        if plan is not None:
            plan.state.refuse_others()
        return self._latest

    def _divisor_check(self, plan: StepPlan | None, num_microbatches: int) -> DivisorCheck | None:
        if plan is None or self.loss_scaling == "average":
            return None
        return DivisorCheck(self._config, num_microbatches, plan.state.faults)

    def _recorded(self, iteration: int | None) -> StepRecorder | None:
        if self._record_group is None:
            return None
        return StepRecorder(Exchange(self._record_group), self._record_file, iteration)

    def wrap(self, schedule: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
        """Wrap what ``get_forward_backward_func()`` returned, if the loop reads its data inside.

        The wrapped schedule reads a step's microbatches, counts and plans them, replays them to
        the loop's ``forward_step_func`` and trains this aggregation instead of the loop's loss. See
        :class:`~megatron_lossagg.loop.schedule_hook.ScheduleHook`.

        Args:
            schedule: The function that runs a step, of ``get_forward_backward_func()``.
            integration: What the loop's microbatches and its loss look like.

        Returns:
            The function to call instead, with the same keywords.
        """
        from megatron_lossagg.loop.schedule_hook import ScheduleHook

        if self._hook is None or self._hook.integration is not integration:
            self._hook = ScheduleHook(self.aggregation, integration, options=self.options)
            self._hook.aggregator = self
        return self._hook.wrap(schedule)

    def describe(self) -> str:
        """Write a line for the start of a run: mode, formula, loss scaling, K; then the note."""
        cp = self.cp_size if self.cp_group else "dynamic"
        line = (
            f"loss aggregation {self.aggregation}; loss scaling {self.loss_scaling}, K = "
            f"{K_FORMULA[self.loss_scaling]} "
            f"(DP {self.dp_size}, CP {cp}); probe: {self.probe or 'off'}"
        )
        return f"{line}\n{self.note}" if self.note else line

    def _of_first_rank(self, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the counts of the tensor-parallel group's first rank, or what is wrong."""
        if dist.get_world_size(self.tp_group) == 1:
            return given, ""
        own, fault = {}, ""
        try:
            own = {name: _listed(value) for name, value in given.items()}
        except Exception as error:  # of any type: no rank may leave the others waiting
            fault = message_of(error)
        (first, *others), fault = gather_counts(own, fault, self.tp_group)
        other = next((n for n, each in enumerate(others, 1) if each not in ({}, first)), None)
        if not fault and other is not None:
            fault = (
                f"tensor-parallel ranks 0 and {other} pass different counts: give both the same "
                f"data, or leave the counts of rank {other} out"
            )
        return first, fault

    def _plan(
        self, arguments: dict[str, Any], num_microbatches: int, forward_only: bool
    ) -> StepPlan:
        """Plan the counts of this data-parallel rank; see :meth:`step`."""
        given, fault = self._of_first_rank(
            {name: value for name, value in arguments.items() if value is not None}
        )
        if not is_integer(num_microbatches, lowest=1) and not fault:
            fault = f"got num_microbatches {num_microbatches!r}, expected an integer from 1"
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
        config, ddps = self._config, [chunk.ddp_config for chunk in self.chunks]
        shards = self.dp_cp_size > 1 and any(ddp.use_distributed_optimizer for ddp in ddps)
        reduced_again = {
            "--calculate-per-token-loss": self.loss_scaling == "per_token",
            "the distributed optimizer": shards,
            "overlap_grad_reduce": any(ddp.overlap_grad_reduce for ddp in ddps),
            "tensor parallelism": config.tensor_model_parallel_size > 1,  # norms, biases
            "pipeline parallelism": config.pipeline_model_parallel_size > 1,  # tied embeddings
            "expert parallelism": config.expert_model_parallel_size > 1,
        }
        for what, is_used in reduced_again.items():
            if is_used:
                raise ContractError(
                    f"got accumulates=True with {what}, where Megatron may scale or reduce "
                    "gradients of earlier schedule calls once more: run all microbatches of an "
                    "optimizer step in one schedule call"
                )

    def _check_overlap(self, num_microbatches: int) -> None:
        """Refuse an overlapping reduction that nothing holds back until the last microbatch."""
        overlaps = any(
            chunk.ddp_config.overlap_grad_reduce
            and (self.dp_cp_size > 1 or chunk.expert_parallel_buffers)
            for chunk in self.chunks
        )
        found = self._config.no_sync_func
        functions = found if isinstance(found, (list, tuple)) else [found]
        holds = all(may_hold_back(function, self.chunks) for function in functions)
        if overlaps and num_microbatches > 1 and not holds:
            state = "None" if found is None else "not theirs"
            raise ContractError(
                f"got {num_microbatches} microbatches with overlap_grad_reduce, and "
                f"config.no_sync_func is {state}: gradients would be reduced before the last "
                "microbatch has added its own; set config.no_sync_func to the chunks' no_sync, as "
                "megatron.training does"
            )

    def _check_finalize(self) -> None:
        """Compare the finalize function with the one that the probe measured."""
        now = self._config.finalize_model_grads_func
        if now is None:
            raise ContractError(
                "config.finalize_model_grads_func is None: the schedule would reduce no gradient "
                "over data-parallel ranks; set it to finalize_model_grads before the first step"
            )
        if isinstance(getattr(now, "__self__", None), DivisorCheck):
            raise ContractError(
                "got a step of this model while another one runs: leave its with block first, or "
                "call its step.end(); terms of one loss belong to one step"
            )
        if self._finalize is None:  # training sets it before its first step
            if self.probe is not None and not is_megatrons_finalize(now):
                raise ContractError(
                    f"config.finalize_model_grads_func is {now!r}, and the probe measured "
                    "Megatron-Core's own, because it was None when the LossAggregator was made: "
                    "set it before that"
                )
            self._finalize = now
        if not _is_same_function(now, self._finalize):
            raise ContractError(
                f"config.finalize_model_grads_func is {now!r}, it was {self._finalize!r} when the "
                "LossAggregator was made: a different function may scale gradients differently; "
                "make the LossAggregator after replacing it"
            )

    def _check_plan(self, plan: StepPlan, num_microbatches: int, forward_only: bool) -> None:
        if not isinstance(plan, StepPlan):
            raise ContractError(f"got {plan!r}, expected what plan_step returns")
        planned = plan.sequences.num_microbatches
        if planned not in (None, num_microbatches):
            raise ContractError(
                f"the plan was made for {planned} microbatches, the schedule runs "
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
    aggregation: Aggregation | str,
    divisor: float | None,
    exponent: float | None,
    count_empty: bool | None,
    count: Count | None,
) -> Aggregation:
    given = {
        "divisor": divisor,
        "exponent": exponent,
        "count_empty": count_empty,
        "count": count,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(aggregation, Aggregation):
        return Aggregation(aggregation, **given)  # type: ignore[arg-type]
    if given:
        raise ContractError(
            f"got an Aggregation and {', '.join(given)}: set them in the Aggregation"
        )
    return aggregation


def _is_same_function(one: Any, other: Any) -> bool:
    """Whether two callables are one, or partials of one with the same arguments."""
    if isinstance(one, partial) and isinstance(other, partial):
        same = one.args == other.args and one.keywords == other.keywords
        return same and _is_same_function(one.func, other.func)
    return bool(one == other)


def _fault_of_stages(found: Sequence[Sequence[str]]) -> str:
    """Name the first pipeline stage that failed or has a different M, if one does."""
    for stage, (m, message) in enumerate(found):
        if message:
            return f"pipeline stage {stage}: {message}"
        if m != found[0][0]:
            return (
                f"pipeline stages 0 and {stage} run {found[0][0]} and {m} microbatches: pass every "
                "stage of a pipeline the same num_microbatches"
            )
    return ""


def _listed(value: Any) -> Any:
    """Return what :meth:`LossAggregator.step` was given without tensors and arrays."""
    if isinstance(value, Tensor):
        value = value.detach()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    return [one.item() if isinstance(one, Tensor) else one for one in value]


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
