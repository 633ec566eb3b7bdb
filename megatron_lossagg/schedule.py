"""The one hook that every Megatron framework has: what ``get_forward_backward_func()`` returns.

A framework calls its schedule with keywords, once per step. :class:`ScheduleHook` wraps it: it
reads the step's microbatches, counts and plans them, replays them to the framework's own
``forward_step_func``, and returns the configured loss to Megatron instead of the framework's.
What only the framework knows is its :class:`Integration`'s.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.aggregator import LossAggregator
from megatron_lossagg.buffer import MicrobatchSequences, StepBuffer, StepMicrobatch
from megatron_lossagg.devices import moved
from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.faults import Faults
from megatron_lossagg.layout import Layout
from megatron_lossagg.options import Options
from megatron_lossagg.outputs import Outputs
from megatron_lossagg.step import Step

__all__ = ["FrameworkLoss", "Integration", "ScheduleHook"]

Schedule = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameworkLoss:
    """What a framework's loss_func computes of one microbatch, before it is summed."""

    losses: Tensor
    """Per-token losses in the layout's order, with every term that is trained."""
    mask: Tensor
    """The 0/1 mask that the framework would multiply them by, as the layout wants it."""
    report: Mapping[str, Tensor]
    """The framework's own report; it is kept next to ours."""
    masked_sum: Tensor | None = None
    """The framework's own loss, 0-dim, if it should be the sum of ``losses`` times ``mask``.

    It is compared with that in each training microbatch, so that no term is lost. None: nothing is
    compared.
    """


class Integration(ABC):
    """What a framework's microbatches and its loss look like."""

    loss_name = "lm loss"
    """The name under which the framework reports its loss. The configured loss takes it, and the
    framework's own number moves to ``stock/<name>``, with ``_`` for spaces."""
    gives_prompts = False
    """Whether :meth:`sequences` gives prompt ids, which ``prompt_mean`` needs."""

    @abstractmethod
    def sequences(self, data: Any) -> MicrobatchSequences:
        """Count a microbatch, as the data iterator returned it; on the CPU, before slicing.

        Called once per microbatch and step, outside the schedule, on each rank that reads data.
        """

    @abstractmethod
    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Take apart the framework's loss of a microbatch.

        ``loss_func``: what the framework's forward_step returned next to its output. ``output``:
        what the schedule passes it. No collective that the framework does not make itself.
        """

    def layout(self, aggregator: LossAggregator, lengths: Sequence[int]) -> Layout:
        """Say which tokens the mask and the losses of :meth:`loss` are.

        ``lengths``: those of :meth:`sequences`, of whole sequences. By default mask and losses are
        this rank's already, an equal part of each sequence, as from Megatron-LM's ``get_batch``.
        """
        return aggregator.local([length // aggregator.cp_size for length in lengths])

    def prepare(self, aggregation: Aggregation) -> None:  # noqa: B027
        """Wrap what else of the framework this aggregation needs; by default nothing.

        Called once, by :class:`ScheduleHook`.
        """

    def applies(self, call: Mapping[str, Any]) -> bool:
        """Whether a call of the schedule computes the framework's loss.

        ``call``: its keywords. Others are left alone: by default those that collect other data.
        """
        return not call.get("collect_non_loss_data")


class ScheduleHook:
    """Puts an aggregation into a framework's schedule; one for a run, for training and evaluation.

    For a framework whose model does not exist yet: the first call makes the
    :class:`LossAggregator`. With a model, :meth:`LossAggregator.wrap` makes the hook.
    Raises :class:`AggregationError` for ``prompt_mean`` if the integration has no prompt ids.
    """

    def __init__(
        self,
        aggregation: Aggregation,
        integration: Integration,
        *,
        options: Options | None = None,
    ) -> None:
        if aggregation.mode == "prompt_mean" and not integration.gives_prompts:
            raise AggregationError(
                f"prompt_mean needs prompt ids, and the data that "
                f"{type(integration).__name__} reads "
                "has none: choose another --loss-aggregation, such as sample_mean"
            )
        self.aggregation = aggregation
        self.integration = integration
        self.options = options or Options()
        self.aggregator: LossAggregator | None = None
        """Made by the first call; None before."""
        self.num_steps = 0
        """Calls of a schedule whose loss was replaced, training and evaluation."""
        self.is_found = False
        """Whether the framework's loop has asked for its schedule."""
        self.k = 1
        """K of the latest step; 1 before, and on a rank that computes no loss."""
        integration.prepare(aggregation)

    def wrap(self, schedule: Schedule) -> Schedule:
        """Wrap what ``get_forward_backward_func()`` returned.

        The wrapped schedule takes the same keywords and returns what the schedule returns, with
        our report next to the framework's. Raises what ``LossAggregator``, ``plan_step`` and its
        step raise; and :class:`ContractError` for positional arguments, and for a
        ``forward_step_func`` that does not read one microbatch per call.

        Collectives, outside the schedule: those of ``LossAggregator`` in the first call; on the
        last pipeline stage those of ``plan_step``, and one ``all_gather_object`` over
        tensor-parallel ranks.
        """
        self.is_found = True

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

        return run

    def _run(self, schedule: Schedule, call: dict[str, Any]) -> Any:
        forward_only = bool(call.get("forward_only", False))
        num_microbatches = call["num_microbatches"]
        aggregator = self._of_model(call["model"], forward_only)
        self.num_steps += 1
        if not aggregator.is_last_stage:  # only the last stage computes a loss
            with aggregator.begin(
                None, num_microbatches=num_microbatches, forward_only=forward_only
            ):
                return schedule(**call)
        iterators = call["data_iterator"]
        is_list = isinstance(iterators, (list, tuple))
        chunks = [*iterators] if is_list else [iterators]
        source = chunks[-1]
        buffer = StepBuffer(
            None if source is None else _InLockstep(chunks), num_microbatches, source=source
        )
        plan = buffer.plan(
            self.aggregation,
            lambda data: self.integration.sequences(data[-1]),
            group=aggregator.dp_group,
            tp_group=aggregator.tp_group,
            options=self.options.of_step(forward_only),
        )
        step = aggregator.begin(plan, num_microbatches=num_microbatches, forward_only=forward_only)
        self.k = step.k
        replay = _Replay(
            integration=self.integration,
            forward_step=call["forward_step_func"],
            aggregator=aggregator,
            microbatches=iter(buffer),
            step=step,
        )
        if source is not None:
            chunks[:-1] = [
                None if chunk is None else iter([microbatch.data[index] for microbatch in buffer])
                for index, chunk in enumerate(chunks[:-1])
            ]
            chunks[-1] = replay.data = _OneRead()
        call["data_iterator"] = chunks if is_list else chunks[-1]
        call["forward_step_func"] = replay
        with step:
            return schedule(**call)

    def _of_model(self, model: Any, forward_only: bool) -> LossAggregator:
        """Make the aggregator in the first call, and of another model; probe if it trains."""
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        probe = self.options.probe and not forward_only
        now = self.aggregator
        if now is None or not now.has_chunks(chunks) or (probe and now.probe is None):
            options = replace(self.options, probe=probe)
            now = self.aggregator = LossAggregator(chunks, self.aggregation, options=options)
            if dist.get_rank() == 0:
                print(now.describe(), flush=True)
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


def _unwrapped(chunk: Any) -> Any:
    """Return the model inside its wrappers (DDP, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


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
        # A framework may move its tensors to a device in place: the buffered step keeps its own.
        return copy.copy(self.unread.pop())


class _Replay:
    """A framework's forward_step_func over a step's microbatches, with the configured loss."""

    def __init__(
        self,
        *,
        integration: Integration,
        forward_step: Callable[..., Any],
        aggregator: LossAggregator,
        microbatches: Iterator[StepMicrobatch],
        step: Step,
    ) -> None:
        functools.update_wrapper(self, forward_step)
        self.data: _OneRead | None = None
        """What the framework reads; None on a rank without data."""
        self._integration = integration
        self._forward_step = forward_step
        self._aggregator = aggregator
        self._chunk = _unwrapped(aggregator.chunks[-1])
        self._microbatches = microbatches
        self._step = step

    def __call__(self, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Of an interleaved pipeline only the last chunk has a loss. A schedule that overlaps
        # experts' communication passes chunks unwrapped.
        if _unwrapped(model) is not self._chunk:
            return self._forward_step(data_iterator, model, *args, **kwargs)
        microbatch = next(self._microbatches, None)
        if microbatch is None:
            raise ContractError(
                f"the schedule ran more than its {self._step.num_microbatches} microbatches: pass "
                "it num_microbatches"
            )
        if self.data is not None:
            self.data.unread = [microbatch.data[-1]]
        output, loss_func = self._forward_step(data_iterator, model, *args, **kwargs)
        if self.data is not None and self.data.unread:
            raise ContractError(
                "forward_step_func did not read its microbatch from the data iterator that the "
                "schedule gave it: its loss would be weighted by another microbatch's sequences"
            )
        return output, functools.partial(self._outputs, microbatch, loss_func)

    def _outputs(
        self, microbatch: StepMicrobatch, loss_func: Callable[..., Any], output: Tensor
    ) -> Outputs:
        name = self._integration.loss_name
        framework = self._integration.loss(loss_func, output)
        lengths = microbatch.lengths
        if lengths is None:
            raise ContractError(
                f"{type(self._integration).__name__}.sequences gave no lengths: give "
                "MicrobatchSequences(lengths=...), from which the layout is made"
            )
        layout = self._integration.layout(self._aggregator, lengths)
        mb = self._step.microbatch(microbatch.sequences, framework.mask, layout=layout)
        partial_loss = mb.reduce(framework.losses)
        if not self._step.forward_only:
            compare(framework, self._step.plan.state.faults, microbatch.index)
        loss, num_tokens, ours = mb.outputs(partial_loss, report={name: partial_loss})
        theirs = dict(framework.report)
        if name in theirs:  # after ours, and nothing that a search for the name finds
            ours[f"stock/{name.replace(' ', '_')}"] = theirs.pop(name)
        return loss, num_tokens, {**ours, **theirs}


def compare(framework: FrameworkLoss, faults: Faults, microbatch: int) -> None:
    """Compare the framework's loss with the masked sum, on its device; ``faults`` are
    read later.
    """
    if framework.masked_sum is None:
        return
    with torch.no_grad():
        mask = moved(framework.mask, framework.losses.device)
        terms = torch.where(mask != 0, framework.losses, 0) * mask.float()
        values = [framework.masked_sum, terms.sum(), terms.abs().sum()]
    faults.record(values, functools.partial(_more_than_sum, microbatch))


def _more_than_sum(microbatch: int, values: list[float]) -> str:
    found, ours, scale = values
    # A product keeps an inf at a masked position; a loss that is not finite is found elsewhere.
    if not math.isfinite(found + scale) or abs(found - ours) <= 1e-4 * scale:
        return ""
    return (
        f"the script's loss_func gave {found:.6g} for microbatch {microbatch} of rank "
        f"{dist.get_rank()}, the masked sum of its per-token losses is {ours:.6g}: it has terms "
        "or factors that are not known here (a distillation loss, a penalty, a coefficient), and "
        "they would be lost; train it without --loss-aggregation"
    )
