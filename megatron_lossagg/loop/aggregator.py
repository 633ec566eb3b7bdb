"""One loss aggregation on one live model, for a whole run.

How Megatron scales a loss, and why K compensates it, is in ``contract/scaling.py``. In the
per-token loss scaling num_tokens is what the step counted, so that its sum is the plan's N for any
loss mask. Side losses (MoE, MTP) keep their 1/N.

What a run reads of its live model, it reads once and on all ranks together. A step begins on every
rank of a model, or on none: the counts that a loop passes are those of the tensor-parallel group's
first rank; pipeline stages and context-parallel ranks begin together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.contract.finalize import own_finalize
from megatron_lossagg.contract.megatron_options import megatron_version
from megatron_lossagg.contract.model import LiveGroups, checked_loss_scaling
from megatron_lossagg.contract.scaling import K_FORMULA, LossScaling
from megatron_lossagg.contract.side_losses import check_follow, note_on_side_losses
from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.guards.before import BEFORE_A_STEP, Asked, RunFacts, check_microbatches
from megatron_lossagg.guards.each_step import check_parts
from megatron_lossagg.guards.frozen import Frozen, agreed
from megatron_lossagg.guards.guard import ScheduleCalls
from megatron_lossagg.guards.outcome import WeighedSteps
from megatron_lossagg.guards.refilled import begin_run
from megatron_lossagg.loop.deferred import Deferred
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.loop.step import Step, say_counted
from megatron_lossagg.record.writer import RecordFile, StepRecorder, opened_record
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.exchange import TP_RANK, to_begin, together
from megatron_lossagg.reduction.integers import IntsLike, is_integer
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.modes import Count
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Sequences, check_constant, columns_of

if TYPE_CHECKING:
    from megatron_lossagg.loop.probe import ProbeReport
    from megatron_lossagg.loop.schedule_hook import Integration, ScheduleHook


def read_run(
    chunks: Sequence[Any], aggregation: Aggregation, options: Options, *, counts_parts: bool
) -> tuple[RunFacts, ProcessGroup | None, RecordFile | None]:
    """Read what the live model is, and open the record; a refusal on one rank reaches all.

    Returns the run, and what :func:`opened_record` returns. ``counts_parts``: as in
    :func:`check_options`. Raises :class:`ContractError`, also if ranks run different settings. One
    all-gather over the world.
    """
    with agreed() as ranks:
        loss_scaling = checked_loss_scaling(chunks, counts_parts=counts_parts)
        if options.side_losses == "follow":
            check_follow(chunks[0].config, aggregation)
        frozen = Frozen(chunks, loss_scaling)
        groups = LiveGroups.of(chunks)
        for one in (aggregation, *options.shadows.values()):
            check_parts(groups, one)
        record_group, record_file = opened_record(options.record, groups)
        ranks.own = (
            f"megatron-core {megatron_version()}, loss scaling {loss_scaling}, {options}, "
            f"{_settings_of(aggregation)}"
        )
    begin_run()
    run = RunFacts(
        chunks=chunks,
        groups=groups,
        loss_scaling=loss_scaling,
        frozen=frozen,
        agreed={aggregation},
        finalize=own_finalize(chunks[0].config),
    )
    return run, record_group, record_file


def _settings_of(aggregation: Aggregation) -> str:
    """Write what must be the same on all ranks of an aggregation."""
    return f"{aggregation} ({aggregation!r})"  # a formula may not show count_empty


def aggregation_of(aggregation: Aggregation | str, numbers: dict[str, Any]) -> Aggregation:
    """Return what is trained: an aggregation, or a mode's name with its numbers."""
    given = {name: value for name, value in numbers.items() if value is not None}
    if not isinstance(aggregation, Aggregation):
        return Aggregation(aggregation, **given)
    if given:
        raise ContractError(
            f"got an Aggregation and {', '.join(given)}: set them in the Aggregation"
        )
    return aggregation


def plan_of_rank(
    run: LossAggregator,
    sequences: Sequences,
    num_microbatches: int,
    forward_only: bool,
    iteration: int | None,
) -> StepPlan:
    """Plan a step of the run from what this rank passes to :meth:`LossAggregator.step`.

    On all ranks of a tensor-parallel group it is its first rank's: one all-gather if it
    has several. ``forward_only``: must be the same on them.
    """
    names = columns_of(type(sequences))
    given = {n: getattr(sequences, n) for n in names if getattr(sequences, n) is not None}

    def of_first_rank() -> Sequences:
        columns = _of_first_rank(given, run.tp_group, forward_only=forward_only)
        return type(sequences)(**_checked(columns, num_microbatches))

    return plan_step(
        run.aggregation,
        of_first_rank,
        group=run.dp_group,
        options=run.options.of_step(forward_only),
        forward_only=forward_only,
        iteration=iteration,
    )


def _checked(given: dict[str, Any], num_microbatches: int) -> dict[str, Any]:
    """Return the columns of a step with its M; raises :class:`PlanError`."""
    check_microbatches(num_microbatches, PlanError)
    own_m = given.get("num_microbatches", num_microbatches)
    if not (is_integer(own_m) and own_m == num_microbatches):
        raise PlanError(
            f"got num_microbatches {num_microbatches} and Sequences(num_microbatches={own_m!r}): "
            "leave that of the sequences out"
        )
    if "active_tokens" not in given:
        raise PlanError(
            "got no counts: pass active_tokens=, at least on the first tensor-parallel rank"
        )
    return given | {"num_microbatches": num_microbatches}


def _of_first_rank(
    given: dict[str, Any], tp_group: ProcessGroup, *, forward_only: bool
) -> dict[str, Any]:
    if tp_group.size() == 1:
        return given
    kind = "an evaluation" if forward_only else "a training step"
    with together(tp_group, to_begin(forward_only), named=TP_RANK, raises=PlanError) as ranks:
        ranks.own = kind, {name: _listed(name, value) for name, value in given.items()}
    kinds, (first, *others) = zip(*ranks.of_ranks, strict=True)
    rank = next((rank for rank, each in enumerate(kinds) if each != kinds[0]), None)
    if rank is not None:
        raise PlanError(
            f"tensor-parallel rank 0 begins {kinds[0]}, rank {rank} {kinds[rank]}: begin the same "
            "steps on all of them, in the same order"
        )
    other = next((n for n, each in enumerate(others, 1) if each not in ({}, first)), None)
    if other is not None:
        raise PlanError(
            f"tensor-parallel ranks 0 and {other} pass different counts: give both the same "
            f"data, or leave the counts of rank {other} out"
        )
    return dict(first)


def _listed(name: str, value: Any) -> Any:
    """Return an argument without tensors and arrays."""
    if name != "active_tokens":  # of a mask, which may be any tensor
        check_constant(name, value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _listed(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    return [one.item() if isinstance(one, Tensor) else one for one in value]


def begun_together(
    begin: Callable[[], Step], num_microbatches: int, groups: LiveGroups, *, forward_only: bool
) -> Step:
    """Return what ``begin`` returns, or raise on all ranks if one raises or has another M or kind.

    Tells each stage the last one's sum of weights if side losses follow it. One all-gather over the
    pipeline-parallel group and one over the context-parallel group, if they have several ranks.
    """
    doing = to_begin(forward_only)
    what = f"{'evaluate' if forward_only else 'train'} {num_microbatches}"
    step: Step | None = None
    fault: Exception | None = None
    try:
        with together(groups.cp_group, doing, named="context-parallel rank {}") as ranks:
            with together(groups.pp_group, doing, named="pipeline stage {}") as stages:
                step = begin()
                scale = step.side_losses
                stages.own = what, None if scale is None else scale.weight_sum
            _check_same("pipeline stage", [what for what, _ in stages.of_ranks])
            ranks.own = what, step.own_numbers
        _check_same("context-parallel rank", [what for what, _ in ranks.of_ranks])
        _check_numbers([own for _, own in ranks.of_ranks])
    except ContractError as error:
        fault = stages.error or error  # of the type that begin() raised, on its own rank
    if fault is not None:
        if step is not None:
            step.end()
        raise fault
    assert step is not None
    if scale is not None and stages.of_ranks[-1][1] is not None:
        scale.weight_sum = stages.of_ranks[-1][1]
    return step


def _check_numbers(of_ranks: Sequence[str]) -> None:
    """Name the first context-parallel rank that passes other numbers than the first, if any."""
    other = next((rank for rank, own in enumerate(of_ranks) if own != of_ranks[0]), None)
    if other is None:
        return
    differing = set(of_ranks[0].split()) ^ set(of_ranks[other].split())
    names = " and ".join(sorted({one.partition("=")[0] for one in differing}))
    raise ContractError(
        f"context-parallel ranks 0 and {other} pass different {names} of the same sequences: pass "
        "equal ones on every rank of a context-parallel group"
    )


def _check_same(kind: str, begun: Sequence[str]) -> None:
    """Name the first one that begins another step than the first, if one does."""
    for number, what in enumerate(begun):
        if what != begun[0]:
            raise ContractError(
                f"{kind}s 0 and {number} {begun[0]} and {what} microbatches: pass all of them the "
                "same num_microbatches and forward_only"
            )


class LossAggregator:
    """Trains one aggregation on one model; made once per run, on every rank.

    Reads loss scaling and groups from the chunks and rejects what K cannot compensate. With
    ``options.probe`` it then measures K. Collectives: one all-gather over the world and
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
        counts_parts: Whether each rank counts its parts of sequences, as dynamic context
            parallelism needs; the schedule hook sets it.

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
        counts_parts: bool = False,
    ) -> None:
        numbers = {"divisor": divisor, "exponent": exponent, "count_empty": count_empty}
        self.aggregation = aggregation_of(aggregation, {**numbers, "count": count})
        self.options = options or Options()
        self.chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        """The DDP-wrapped chunks of this rank."""
        if not dist.is_initialized():
            raise ContractError(
                "torch.distributed is not initialized: make the LossAggregator after it is"
            )
        self._run, self._record_group, self._record_file = read_run(
            self.chunks, self.aggregation, self.options, counts_parts=counts_parts
        )
        self.groups: LiveGroups = self._run.groups
        """The groups of the live chunks, and this rank's place in them."""
        self.loss_scaling: LossScaling = self._run.loss_scaling
        self._latest: Step | None = None
        self._calls = ScheduleCalls()
        self._weighed_steps = WeighedSteps()
        self._hook: ScheduleHook | None = None
        follows = self.options.side_losses == "follow"
        self._deferred = Deferred(self._run, follows=follows)
        self.note = note_on_side_losses(self._run.config, self.loss_scaling, follows=follows)
        """Which side losses depend on CP, for the start of a run; empty if none does."""
        self.probe: ProbeReport | None = None
        """What the startup probe measured; None if it was not asked for."""
        if self.options.probe:
            from megatron_lossagg.loop.probe import run_probe

            self.probe = run_probe(self)
            self._run.is_probed = True

    @staticmethod
    def from_args(model: Any, args: argparse.Namespace) -> LossAggregator | None:
        """Make it from the ``--loss-aggregation*`` flags; None if no flag was given.

        Every rank calls, without a flag too: one all-gather over the world then.

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
            with agreed() as ranks:
                ranks.own = "no --loss-aggregation"
        return None

    @property
    def dp_group(self) -> ProcessGroup:
        """The dense data-parallel group without context parallelism."""
        return self.groups.dp_group

    @property
    def tp_group(self) -> ProcessGroup:
        """The tensor-parallel group."""
        return self.groups.tp_group

    @property
    def cp_size(self) -> int:
        """CP; 1 with dynamic context parallelism, where each rank counts and trains its parts."""
        return self.groups.cp_size

    @property
    def cp_rank(self) -> int:
        """This rank's place in its context-parallel group."""
        return self.groups.cp_rank

    def agree_on(self, aggregation: Aggregation) -> None:
        """Check that a further aggregation of the run is one it can train, the same on every rank.

        :meth:`begin` takes plans under the run's aggregation and those that this method has seen.
        Raises :class:`ContractError` on every rank. One all-gather over the world, by
        every rank.
        """
        with agreed() as ranks:
            check_parts(self.groups, aggregation)
            ranks.own = _settings_of(aggregation)
        self._run.agreed.add(aggregation)

    def thd(self, cu_seqlens_padded: IntsLike) -> Layout:
        """Return the layout of packed sequences for this rank; see :meth:`LiveGroups.thd`."""
        return self.groups.thd(cu_seqlens_padded)

    def sliced(self, lengths: Sequence[int]) -> Layout:
        """Return ``Layout.local`` for sequences that the framework has sliced already."""
        return self.groups.sliced(lengths)

    def step(
        self,
        active_tokens: IntsLike | Sequences | None = None,
        *,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool | int = False,
        iteration: int | None = None,
        **columns: Any,
    ) -> Step:
        """Plan and begin a schedule call of ``num_microbatches``; leaving ``with`` finishes it.

        Only the last pipeline stage plans the sequences: earlier stages ignore these and may
        leave them out. On the last stage a tensor-parallel rank without data leaves them out too
        and takes those of the first rank of its group.

        Every rank calls. Collectives: on the last stage those of :func:`plan_step` over
        :attr:`dp_group`, and one all-gather over :attr:`tp_group` if it has several
        ranks; on every stage those of :meth:`begin_together`.

        Args:
            active_tokens: Of the sequences of this data-parallel rank; or all of them as a
                :class:`Sequences`.
            num_microbatches: M, what the schedule gets.
            forward_only: As in :meth:`begin`.
            accumulates: As in :meth:`begin`.
            iteration: As in :meth:`begin`.
            columns: The other arguments of :class:`Sequences`, such as ``sample=``.

        Returns:
            The step, a context manager.

        Raises:
            PlanError: As :func:`plan_step`.
            ContractError: As :meth:`begin`; and with the message of a stage that failed, on the
                other stages.
        """
        given: Any = active_tokens
        if isinstance(given, Sequences):
            given = replace(given, **columns)
        else:
            given = Sequences(active_tokens=given, **columns)
        return self.begin_together(
            partial(plan_of_rank, self, given, num_microbatches, forward_only, iteration),
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
        accumulates: bool | int = False,
        iteration: int | None = None,
    ) -> Step:
        """Plan and begin a schedule call on every pipeline stage and context-parallel rank.

        Or raise on all of them. ``plan``: makes the plan, and is called on the last stage only. The
        others: see :meth:`begin`. Every rank calls. One all-gather over the pipeline- and one over
        the context-parallel group, if they have several ranks.
        """
        return begun_together(
            lambda: self.begin(
                plan() if self.groups.is_last_stage else None,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                accumulates=accumulates,
                iteration=iteration,
            ),
            num_microbatches,
            self.groups,
            forward_only=forward_only,
        )

    def begin(
        self,
        plan: StepPlan | None,
        *,
        num_microbatches: int,
        forward_only: bool = False,
        accumulates: bool | int = False,
        iteration: int | None = None,
    ) -> Step:
        """Begin a schedule call over a plan of your own, such as ``StepBuffer.plan`` makes.

        What the rerun state machine repeats belongs inside the same step. No collective.

        Args:
            plan: Over :attr:`dp_group`; None on a pipeline stage that computes no loss.
            num_microbatches: M, what the schedule gets.
            forward_only: Nothing is trained, and the plan may be used again.
            accumulates: How many schedule calls the optimizer step has, passed to each: it trains
                their mean. True trains their sum, with ``token_sum`` and custom reducers only.
                Gradients are zero when the first loss of the first of them is returned.
            iteration: The number of the step, from 1, in ``options.record``; None is one more than
                that of its last line. Ranks that pass one pass the same.

        Returns:
            The step, a context manager.

        Raises:
            ContractError: For each of :data:`megatron_lossagg.guards.before.BEFORE_A_STEP`, such
                as a config that changed, or a plan that has trained.
        """
        previous = self._latest
        deferred = self._deferred if self._deferred.is_open and not forward_only else None
        asked = Asked(
            plan=plan,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            accumulates=not is_integer(accumulates, lowest=1, highest=1) and accumulates,
            iteration=iteration,
            is_previous_open=previous is not None and previous.is_left_open,
            deferred=deferred,
            shadows=self.options.shadows.values(),
        )
        if previous is not None and not asked.is_previous_open:
            previous.end()
        for check in BEFORE_A_STEP:
            check(self._run, asked)
        recorder = StepRecorder.of(self._record_group, self._record_file, iteration)
        if deferred is not None:
            recorder = deferred.recorder = deferred.recorder or recorder
        self._latest = Step(
            chunks=self.chunks,
            groups=self.groups,
            loss_scaling=self.loss_scaling,
            plan=asked.plan_of_call,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            accumulates=asked.accumulates,
            calls=self._calls if deferred is None else deferred.calls,
            shadows=self.options.shadows,
            follows=self.options.side_losses == "follow",
            recorder=None if forward_only else recorder,
            guards=self.options.guards,
            is_weighed=not forward_only and self._weighed_steps.has_next(plan, num_microbatches),
        )
        if deferred is not None:
            deferred.add(self._latest, asked.plan_of_call)
        if plan is not None:
            if not forward_only and deferred is None:
                say_counted(plan, is_first=self.groups.is_first)
            plan.state.is_stepped |= not forward_only
            plan.state.refuse_others()
        return self._latest

    def deferred(self) -> Deferred:
        """Make an optimizer step of several schedule calls, divided after the last of them."""
        if self._latest is not None and not self._latest.is_left_open:
            self._latest.end()
        if not self._deferred.is_open:
            self._deferred = Deferred(self._run, follows=self.options.side_losses == "follow")
        return self._deferred

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
        groups, scaling = self.groups, self.loss_scaling
        cp = "dynamic" if groups.is_dynamic else groups.cp_size
        line = (
            f"loss aggregation {self.aggregation}; loss scaling {scaling}, K = "
            f"{K_FORMULA[scaling]} (DP {groups.dp_size}, CP {cp}); probe: {self.probe or 'off'}"
        )
        return f"{line}\n{self.note}" if self.note else line
