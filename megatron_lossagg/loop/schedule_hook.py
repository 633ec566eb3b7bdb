"""The one hook that every Megatron framework has: what ``get_forward_backward_func()`` returns.

A framework calls its schedule with keywords, once per step. :class:`ScheduleHook` wraps it: it
reads the step's microbatches, counts and plans them, replays them to the framework's own
``forward_step_func``, and returns the configured loss to Megatron instead of the framework's.
What only the framework knows of its microbatches and its loss is its :class:`Integration`'s.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron_lossagg.contract.engine import unwrapped
from megatron_lossagg.contract.outputs import stock_report
from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.guards.framework_loss import compare_graphs, compare_with_framework
from megatron_lossagg.loop.aggregator import LossAggregator
from megatron_lossagg.loop.buffer import StepBuffer, StepMicrobatch
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.faults import Describe
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.sequences import Sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameworkLoss:
    """What a framework's loss_func computes of one microbatch, before it is summed.

    Examples:
        What :meth:`Integration.loss` returns:

        >>> losses, mask = torch.tensor([2.0, 4.0]), torch.tensor([1, 0])
        >>> total = (losses * mask).sum()
        >>> returned = (total, mask.sum(), {"actor/loss": total})
        >>> framework = FrameworkLoss(
        ...     losses=losses, mask=mask, returned=returned, masked_sum=total
        ... )
        >>> framework.report
        {'actor/loss': tensor(2.)}
    """

    losses: Tensor
    """Per-token losses in the layout's order, with every term that is trained."""
    mask: Tensor
    """The 0/1 mask that the framework would multiply them by, as the layout wants it."""
    returned: tuple[Any, ...]
    """What the framework's loss_func returned: its loss, a count if it has one, and its report."""
    token_weights: Tensor | None = None
    """v_t of each position of ``mask``, which multiply the losses; for ``count="weights"``."""
    masked_sum: Tensor | None = None
    """The framework's own loss, 0-dim, if it should be the sum of ``losses`` times ``mask``.

    It is compared with that in each training microbatch by value, and in steps 1, 2, 4, ..., 64,
    128, ... and the first with an M by the gradient at the model's output, so that no term is lost.
    None: neither is compared. In these steps a loss that reaches a parameter without the output is
    refused too.
    """
    to_check: tuple[list[Tensor], Describe] | None = None
    """0-dim results of a check of the integration's own, on the device, and what they mean.

    They are read when the step ends, in an evaluation too. None: there is none.
    """

    @property
    def report(self) -> Mapping[str, Tensor]:
        """The framework's own report; it is kept next to ours."""
        report: Mapping[str, Tensor] = self.returned[-1]
        return report


class Integration(ABC):
    """What a framework's microbatches and its loss look like.

    Subclass it with :meth:`sequences` and :meth:`loss`; the other methods have defaults. This
    package's own integrations subclass it too.

    Examples:
        Microbatches are dicts of whole packed sequences, and CP is 1:

        >>> class MyIntegration(Integration):
        ...     def sequences(self, data):
        ...         active = [int(mask.sum()) for mask in data["masks"]]
        ...         lengths = [len(mask) for mask in data["masks"]]
        ...         return Sequences(active_tokens=active, lengths=lengths)
        ...
        ...     def loss(self, loss_func, output):
        ...         returned = loss_func(output)  # what the schedule would take
        ...         mask = loss_func.args[0]  # of functools.partial(loss_func, mask)
        ...         return FrameworkLoss(losses=output, mask=mask, returned=returned)
        >>> masks = [torch.tensor([1, 1, 0, 1]), torch.tensor([1, 0])]
        >>> MyIntegration().sequences({"masks": masks}).active_tokens
        [3, 1]
    """

    loss_name = "lm loss"
    """The name under which the framework reports its loss. The configured loss takes it, and the
    framework's own number moves to ``stock/<name>``, with ``_`` for spaces."""
    gives_prompts = False
    """Whether :meth:`sequences` gives prompt ids, which ``prompt_mean`` needs."""
    gives_groups = False
    """Whether it gives group ids, which ``balanced`` needs."""
    gives_token_weights = False
    """Whether, under ``count="weights"``, :meth:`sequences` and :meth:`loss` give token weights."""
    weighs_tokens = False
    """Whether an aggregation of the run counts token weights; :meth:`prepare` sets it."""
    needs_prompts = False
    """Whether one needs prompt ids, likewise."""

    @property
    def counts_parts(self) -> bool:
        """Whether, with dynamic context parallelism, :meth:`sequences` counts parts of sequences.

        They are those that this rank holds, with one sample id for all parts of a sequence. A
        subclass that does says so as a class attribute.
        """
        return False

    @abstractmethod
    def sequences(self, data: Any) -> Sequences:
        """Count a microbatch, as the data iterator returned it; on the CPU, before slicing.

        Called once per microbatch and step, outside the schedule, on each rank that reads data.

        Args:
            data: The microbatch.

        Returns:
            Its counts, lengths and ids, one entry per sequence.
        """

    @abstractmethod
    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Take apart the framework's loss of a microbatch.

        No collective that the framework does not make itself.

        Args:
            loss_func: What the framework's forward_step returned next to its output.
            output: What the schedule passes it.

        Returns:
            The losses of the tokens that :meth:`layout` says, and their mask.
        """

    def layout(self, aggregator: LossAggregator, lengths: Sequence[int]) -> Layout:
        """Say which tokens the mask and the losses of :meth:`loss` are.

        By default mask and losses are this rank's part already, as from Megatron-LM's
        ``get_batch``.

        Args:
            aggregator: The run's aggregator, which makes layouts for this rank.
            lengths: Those of :meth:`sequences`, of whole sequences.

        Returns:
            The layout of a microbatch.
        """
        return aggregator.sliced(lengths)

    def prepare(self, aggregations: Sequence[Aggregation]) -> None:
        """Note what these aggregations need; a subclass may wrap more of its framework for it.

        Called once, by the schedule hook, with the trained one and
        the shadows.
        """
        self.weighs_tokens = any(one.count == "weights" for one in aggregations)
        self.needs_prompts = any(one.reads("prompt") for one in aggregations)

    def iteration(self) -> int | None:
        """Return the number of the step that is trained, from 1; None if it is not known.

        Called once per recorded step, before the schedule. ``Options.record`` writes
        one more than the last recorded step if it is None.
        """
        return None

    def applies(self, call: Mapping[str, Any]) -> bool:
        """Whether a call of the schedule computes the framework's loss.

        ``call``: its keywords. By default every call does, unless it collects other data. A call
        that does not is passed on unchanged.
        """
        return not call.get("collect_non_loss_data")


Schedule = Callable[..., Any]
_HOOKED = "_lossagg_flag"
"""Attribute of a wrapped schedule: what asked for its hook."""


class ScheduleHook:
    """Puts an aggregation into a framework's schedule; one for a run, for training and evaluation.

    For a framework whose model does not exist yet: the first call makes the
    :class:`LossAggregator`. With a model, :meth:`LossAggregator.wrap` makes the hook.
    ``aggregation``: what is trained; None trains the framework's own loss, and ``options.shadow``
    only reports what others would give. ``options``: of the run. Raises :class:`AggregationError`
    for ids that an aggregation or a shadow needs and the integration has not, for
    ``count="weights"`` if it has no token weights, for None without a shadow, and for None with a
    record.
    """

    adds_evaluations = True
    """Whether the framework adds both entries of a report over evaluation steps."""

    def __init__(
        self,
        aggregation: Aggregation | str | None,
        integration: Integration,
        *,
        options: Options | None = None,
    ) -> None:
        self.options = options or Options()
        if isinstance(aggregation, str):
            aggregation = Aggregation(aggregation)
        shadows = list(self.options.shadows.values())
        asked = shadows if aggregation is None else [aggregation, *shadows]
        if not asked or (aggregation is None and self.options.record is not None):
            raise AggregationError(
                "got no aggregation, expected one that is trained: pass a mode, or without "
                "Options(record=...) only Options(shadow=...)"
            )
        for mode, kind in ((one.mode, kind) for one in asked for kind in one.needs):
            if not getattr(integration, f"gives_{kind}s"):
                raise AggregationError(
                    f"{mode} needs {kind} ids, and the data that {type(integration).__name__} "
                    "reads has none: choose another --loss-aggregation, such as sample_mean"
                )
        has_weights = any(one.count == "weights" for one in asked)
        if has_weights and not integration.gives_token_weights:
            raise AggregationError(
                f"got count 'weights', and {type(integration).__name__} knows no token weights: "
                "drop --loss-aggregation-count (count=)"
            )
        self.aggregation = aggregation
        """What is trained; None if it is the framework's own loss."""
        self.flag = f"--loss-aggregation {aggregation}"
        """What asked for this hook, for messages."""
        if aggregation is None:
            self.flag = f"--loss-aggregation-shadow {','.join(self.options.shadow)}"
        self._planned = asked[0]
        self.integration = integration
        self.aggregator: LossAggregator | None = None
        """Made by the first call; None before."""
        self.num_steps = 0
        """Calls of a schedule whose loss was replaced or shadowed, training and evaluation."""
        self._num_evaluations = 0
        self.is_found = False
        """Whether the framework's loop has asked for its schedule."""
        self.k = 1
        """K of the latest step; 1 before, and on a rank that computes no loss."""
        integration.prepare(asked)

    @property
    def reported(self) -> list[str]:
        """Names of the pairs that it reports, the same on every rank."""
        shadows = [f"lossagg/shadow/{name}" for name in self.options.shadows]
        if self.aggregation is None:
            return [*shadows, "lossagg/shadow/stock"]
        name = self.integration.loss_name
        is_custom = self.aggregation.reducer_path is not None
        sums = [] if is_custom else ["lossagg/weight_sum", "lossagg/weight_expected"]
        return [name, f"stock/{name.replace(' ', '_')}", *sums, *shadows]

    def wrap(self, schedule: Schedule) -> Schedule:
        """Wrap what ``get_forward_backward_func()`` returned.

        The wrapped schedule takes the same keywords and returns what the schedule returns, with
        our report next to the framework's. Raises what ``LossAggregator``, ``plan_step`` and its
        step raise; and :class:`ContractError` for a schedule that is wrapped already, for
        positional arguments, and for a ``forward_step_func`` that does not read one microbatch per
        call.

        Collectives, outside the schedule: those of ``LossAggregator`` in the first call; on the
        last pipeline stage those of ``plan_step``, and one all-gather over
        tensor-parallel ranks; one all-gather over several pipeline stages, and one over
        context-parallel ranks.
        """
        self.is_found = True
        if hasattr(schedule, _HOOKED):
            raise ContractError(
                f"got a schedule that is wrapped already ({getattr(schedule, _HOOKED)}), expected "
                "Megatron's: install one aggregation in a process"
            )

        @functools.wraps(schedule)
        def run(*args: Any, **call: Any) -> Any:
            if args:
                raise ContractError(
                    f"got {len(args)} positional arguments for the schedule, expected keywords "
                    "only, as Megatron-LM passes them"
                )
            if not self.integration.applies(call):
                return schedule(**call)
            return self._run(schedule, call)

        setattr(run, _HOOKED, self.flag)
        return run

    def _run(self, schedule: Schedule, call: dict[str, Any]) -> Any:
        forward_only = bool(call.get("forward_only", False))
        num_microbatches = call["num_microbatches"]
        aggregator = self._of_model(call["model"], forward_only)
        self.num_steps += 1
        self._num_evaluations += forward_only
        of_kind = self._num_evaluations if forward_only else self.num_steps - self._num_evaluations
        iterators = call["data_iterator"]
        is_list = isinstance(iterators, (list, tuple))
        chunks = [*iterators] if is_list else [iterators]
        reads = chunks[-1] is not None
        buffer: StepBuffer | None = None
        records = self.options.record is not None and not forward_only
        iteration = self.integration.iteration() if records else None

        def plan() -> StepPlan:
            nonlocal buffer
            source = _InLockstep(chunks) if reads else None
            buffer = StepBuffer(source, num_microbatches, step_number=of_kind)
            return buffer.plan(
                self._planned,
                lambda data: self.integration.sequences(data[-1]),
                group=aggregator.dp_group,
                tp_group=aggregator.tp_group,
                options=self.options.of_step(forward_only),
                forward_only=forward_only,
                iteration=iteration,
            )

        trains = self.aggregation is not None
        step = aggregator.begin_together(
            plan,
            num_microbatches=num_microbatches,
            forward_only=forward_only or not trains,
            iteration=iteration,
        )
        step.evaluates = forward_only and self.adds_evaluations
        if buffer is None:  # an earlier stage, which computes no loss
            with step:
                return schedule(**call)
        self.k = step.k
        data = _OneRead() if reads else None
        replay = _Replay(
            data=data,
            integration=self.integration,
            forward_step=call["forward_step_func"],
            aggregator=aggregator,
            chunk=unwrapped(aggregator.chunks[-1]),
            microbatches=iter(buffer),
            step=step,
            trains=trains,
            compares=not forward_only,
            looks_closely=step.is_weighed,
        )
        if reads:
            chunks[:-1] = [
                None if chunk is None else iter([microbatch.data[index] for microbatch in buffer])
                for index, chunk in enumerate(chunks[:-1])
            ]
            chunks[-1] = data
        call["data_iterator"] = chunks if is_list else chunks[-1]
        call["forward_step_func"] = replay
        with step:
            return schedule(**call)

    def _of_model(self, model: Any, forward_only: bool) -> LossAggregator:
        """Make the aggregator in the first call, and of another model; probe if it trains."""
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        trains = self.aggregation is not None
        probe = self.options.probe and not forward_only and trains
        now = self.aggregator
        if now is None or now.chunks != chunks or (probe and now.probe is None):
            options = replace(self.options, probe=probe)
            counts_parts = self.integration.counts_parts
            now = self.aggregator = LossAggregator(
                chunks, self._planned, options=options, counts_parts=counts_parts
            )
            if dist.get_rank() == 0:
                stock = f"loss aggregation: the framework's own; {self.flag}"
                print(now.describe() if trains else stock, flush=True)
        return now


class _InLockstep:
    """The iterators of a rank's chunks: what each has for a microbatch, in their order.

    If chunks share one source, the first reads it and the others get what it kept.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Any, ...]:
        return tuple([chunk if chunk is None else next(chunk) for chunk in self._chunks])


class _OneRead:
    """The data iterator of a replayed step: the microbatch of the running call, once."""

    def __init__(self) -> None:
        self.unread: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.unread:
            raise ContractError(
                "forward_step_func read more than one microbatch in a call: a step of M "
                "microbatches reads M times"
            )
        return self.unread.pop()


@dataclass(kw_only=True, eq=False)
class _Replay:
    """A framework's forward_step_func over a step's microbatches, with the configured loss."""

    data: _OneRead | None
    """What the framework reads; None on a rank without data."""
    integration: Integration
    forward_step: Callable[..., Any]
    aggregator: LossAggregator
    chunk: Any
    """The one that has a loss, unwrapped."""
    microbatches: Iterator[StepMicrobatch]
    step: Step
    trains: bool
    compares: bool
    looks_closely: bool
    """Whether graph and gradient of the framework's loss are compared too."""

    def __post_init__(self) -> None:
        own = dict(vars(self))  # which no attribute of the framework's function replaces
        functools.update_wrapper(self, self.forward_step)
        vars(self).update(own)

    def __call__(self, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Of an interleaved pipeline only the last chunk has a loss. A schedule that overlaps
        # experts' communication passes chunks unwrapped.
        if unwrapped(model) is not self.chunk:
            return self.forward_step(data_iterator, model, *args, **kwargs)
        microbatch = next(self.microbatches, None)
        if microbatch is None:
            raise ContractError(
                f"the schedule ran more than its {self.step.num_microbatches} microbatches: pass "
                "it num_microbatches"
            )
        if self.data is not None:
            self.data.unread = [microbatch.data[-1]]
        output, loss_func = self.forward_step(data_iterator, model, *args, **kwargs)
        if self.data is not None and self.data.unread:
            raise ContractError(
                "forward_step_func did not read its microbatch from the data iterator that the "
                "schedule gave it: its loss would be weighted by another microbatch's sequences"
            )
        replaced = self._outputs if self.trains else self._shadowed
        return output, functools.partial(replaced, microbatch, loss_func)

    def _outputs(
        self, microbatch: StepMicrobatch, loss_func: Callable[..., Any], output: Tensor
    ) -> Any:
        """Train the configured loss; the framework's report is kept."""
        name = self.integration.loss_name
        framework, mb = self._taken_apart(microbatch, loss_func, output)
        partial_loss = mb.reduce(framework.losses)
        loss, num_tokens, ours = mb.outputs(partial_loss, report={name: partial_loss})
        if name in framework.report:  # under nothing that a search for the name finds
            ours[f"stock/{name.replace(' ', '_')}"] = framework.report[name]
        theirs = {key: pair for key, pair in framework.report.items() if key not in ours}
        return loss, num_tokens, {**ours, **theirs}

    def _shadowed(
        self, microbatch: StepMicrobatch, loss_func: Callable[..., Any], output: Tensor
    ) -> Any:
        """Return what the framework's loss_func returned, with the shadows in its report."""
        framework, mb = self._taken_apart(microbatch, loss_func, output)
        trained = framework.returned[:-1]
        stock = stock_report(*trained, self.step.scaling) if len(trained) == 2 else {}
        return *trained, {**framework.report, **mb.shadow(framework.losses), **stock}

    def _taken_apart(
        self, microbatch: StepMicrobatch, loss_func: Callable[..., Any], output: Tensor
    ) -> tuple[FrameworkLoss, Microbatch]:
        edge = None
        if self.looks_closely and output.requires_grad:
            # What looks at gradients here must not run the output's own hooks, in which
            # Megatron-FSDP reduces. Not a view, because loss_func may change it in place.
            output = torch.ops.aten._unsafe_view(output, output.shape)
            edge = get_gradient_edge(output)
        framework = self.integration.loss(loss_func, output)
        lengths = microbatch.lengths
        if lengths is None:
            raise ContractError(
                f"{type(self.integration).__name__}.sequences gave no lengths: give "
                "Sequences(lengths=...), from which the layout is made"
            )
        layout = self.integration.layout(self.aggregator, lengths)
        mb = self.step.microbatch(
            microbatch.sequences,
            framework.mask,
            layout=layout,
            token_weights=framework.token_weights,
        )
        note = functools.partial(self._note, microbatch.index)
        if framework.to_check is not None:
            note(*framework.to_check)
        if self.compares and framework.masked_sum is not None:
            given = framework.masked_sum, framework.losses, framework.mask, framework.token_weights
            note(*compare_with_framework(*given, output=edge), guard="FrameworkLoss")
        if edge is not None and isinstance(framework.returned[0], Tensor):
            found = compare_graphs(framework.returned[0], framework.losses, output=edge)
            note(*found, guard="FrameworkLoss")
        return framework, mb

    def _note(
        self, microbatch: int, values: list[Tensor], describe: Describe, *, guard: str = ""
    ) -> None:
        """Keep what is read when the step ends, and is described with microbatch and rank."""
        place = f"microbatch {microbatch} of rank {dist.get_rank()}: "

        def placed(numbers: list[float]) -> str:
            fault = describe(numbers)
            return fault and place + fault

        self.step.plan.state.faults.record(values, placed, guard=guard)
