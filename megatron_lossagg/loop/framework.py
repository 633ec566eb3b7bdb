"""What only a framework knows of its microbatches and its loss.

:class:`~megatron_lossagg.loop.schedule_hook.ScheduleHook` asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import Describe
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.sequences import Sequences

if TYPE_CHECKING:
    from megatron_lossagg.loop.aggregator import LossAggregator


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
