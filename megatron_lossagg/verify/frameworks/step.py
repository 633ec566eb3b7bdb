"""One drawn step of ragged sequences, and what a framework's function makes of it, against the
oracle.

The step has two data-parallel ranks of two microbatches of three sequences: sequences with holes,
fully
masked sequences, a prompt with no active tokens, prompts over microbatches and ranks, and
microbatches
of different widths.

Shape suffixes: b = sequences of a microbatch, s = its width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options

__all__ = [
    "LENGTHS",
    "PROMPTS",
    "Check",
    "Comparison",
    "FrameworkError",
    "Microbatch",
    "NotRunError",
    "Step",
    "compare",
    "over",
    "ppo_losses",
    "relative_error",
]

LENGTHS = (((5, 0, 3), (2, 0, 4)), ((6, 6, 0), (0, 0, 5)))
"""Active tokens per data-parallel rank, microbatch and sequence."""
PROMPTS = (0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4)
"""Prompt of each sequence: 2 is on both ranks, 3 has no active tokens."""


class NotRunError(LossAggregationError):
    """A check that cannot run here; the message has the reason and what to change."""


class FrameworkError(LossAggregationError):
    """A framework's code under an integration of this package ended with an error of the
    integration.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """Sequences of one microbatch, each tensor ``[b, s]``."""

    log_probs: Tensor
    """A leaf."""
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    """Boolean."""
    sequences: range
    """Position of each sequence in the step."""
    place: tuple[int, int]
    """Data-parallel rank, and index on that rank."""


class Step:
    """The microbatches of one optimizer step; ``lengths`` as :data:`LENGTHS`.

    ``samples``: sample of each sequence; None: each sequence is its own.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[Sequence[int]]] = LENGTHS,
        *,
        prompts: Sequence[int] = PROMPTS,
        samples: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        generator = torch.Generator().manual_seed(5)
        self.lengths = [length for rank in lengths for sequences in rank for length in sequences]
        self.prompts = list(prompts[: len(self.lengths)])
        self.samples = list(range(len(self.lengths)) if samples is None else samples)
        self.dp_size, self.num_microbatches = len(lengths), len(lengths[0])
        self.microbatches: list[Microbatch] = []
        first = 0
        for rank, of_rank in enumerate(lengths):
            for index, sequences in enumerate(of_rank):
                width = max(sequences) + 1 + len(self.microbatches)
                mask = torch.zeros(len(sequences), width, dtype=torch.bool)
                for sequence, length in enumerate(sequences):
                    mask[sequence, torch.randperm(width, generator=generator)[:length]] = True
                drawn = torch.randn(3, len(sequences), width, generator=generator, dtype=dtype)
                self.microbatches.append(
                    Microbatch(
                        log_probs=drawn[0].requires_grad_(),
                        old_log_probs=drawn[0].detach() + 0.3 * drawn[1],
                        advantages=drawn[2],
                        mask=mask,
                        sequences=range(first, first + len(sequences)),
                        place=(rank, index),
                    )
                )
                first += len(sequences)

    @property
    def leaves(self) -> list[Tensor]:
        """The log-probabilities of each microbatch, which are per-token losses too."""
        return [mb.log_probs for mb in self.microbatches]

    @cached_property
    def _masks(self) -> list[list[int]]:
        return [sequence.int().tolist() for mb in self.microbatches for sequence in mb.mask]

    def wanted(self, aggregation: Aggregation, losses: Sequence[Tensor]) -> Tensor:
        """Compute the step's loss by the oracle, 0-dim float64.

        ``losses``: per-token losses of each microbatch, ``[b, s]``.
        """
        sequences = [
            {
                "x": list(x.double().unbind()),
                "counted": self._masks[sequence],
                "trained": self._masks[sequence],
                "sample": self.samples[sequence],
                "prompt": self.prompts[sequence],
                "microbatch": mb.place,
            }
            for mb, loss in zip(self.microbatches, losses, strict=True)
            for sequence, x in zip(mb.sequences, loss, strict=True)
        ]
        options = reference_options(aggregation, [self.num_microbatches] * self.dp_size)
        return reference_loss.step_loss(aggregation.mode, sequences, **options)


def ppo_losses(mb: Microbatch, *, clip: float, dual_clip: float | None = None) -> Tensor:
    """Compute PPO's clipped losses, ``[b, s]``: arXiv 1707.06347 eq. 7, 1912.09729 eq. 5.

    ::

        x = -min(r A, clamp(r, 1 - clip, 1 + clip) A);  where A < 0: x = min(x, -dual_clip A)
    """
    ratio, advantages = (mb.log_probs - mb.old_log_probs).exp(), mb.advantages
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A framework's loss and gradient against the wanted ones."""

    got: float
    wanted: float
    loss_error: float
    """Relative."""
    gradient_error: float
    """The largest norm(g - g_wanted) / norm(g_wanted) of all leaves."""
    factor: float
    """The gradient as a multiple of the wanted one, by projection."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One named comparison of a framework's function."""

    name: str
    function: str
    """The framework's function, by its dotted path."""
    compare: Callable[[], Comparison | None]
    """Runs it; None where there are no numbers and what it did not raise is the result."""
    gradient: str = "gradient"
    """What of the gradient is compared."""
    tolerance: float = 1e-6
    """Frameworks count in float32 and add small numbers to divisors."""


def compare(got: Tensor, wanted: Tensor, leaves: Sequence[Tensor]) -> Comparison:
    """Compare two 0-dim losses of the same leaves, and their gradients."""
    gradients: list[list[Tensor]] = []
    for loss in (got, wanted):
        of_leaves = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        gradients.append(
            [
                torch.zeros_like(leaf).double() if g is None else g.double()
                for leaf, g in zip(leaves, of_leaves, strict=True)
            ]
        )
    ours, theirs = (torch.cat([g.flatten() for g in of_loss]) for of_loss in gradients)
    pairs = zip(*gradients, strict=True)
    return Comparison(
        got=got.item(),
        wanted=wanted.item(),
        loss_error=relative_error(got.item(), wanted.item()),
        gradient_error=max(over((g - w).norm().item(), w.norm().item()) for g, w in pairs),
        factor=over((ours @ theirs).item(), (theirs @ theirs).item()),
    )


def relative_error(got: float, wanted: float) -> float:
    """Return abs(got - wanted) / abs(wanted)."""
    return over(abs(got - wanted), abs(wanted))


def over(difference: float, size: float) -> float:
    """Divide; 0 / 0 is 0, for leaves that take no part. What is not finite is inf, never NaN."""
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    quotient = difference / size
    return quotient if math.isfinite(quotient) else math.inf
