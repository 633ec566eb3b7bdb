"""The drawn batch as microbatches of functions that are called by themselves.

:class:`Step` puts the twelve sequences into microbatches of data-parallel ranks as ``[b, s]``.

Shape suffixes: b = sequences of a microbatch, s = its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from function_checks import Comparison, compare
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.modes import ALIASES, MODES
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options
from megatron_lossagg.verify.drivers.driver import draw, ppo_losses

_RANKS = (((4, 5, 6), (7, 8, 9)), ((10, 11, 0), (1, 2, 3)))
"""Drawn sequences per data-parallel rank and microbatch: prompts go over both."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """Sequences of one microbatch, each tensor ``[b, s]``."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    """Boolean."""
    sequences: range
    """Position of each sequence in the step."""
    place: tuple[int, int]
    """Data-parallel rank, and index on that rank."""


class Step:
    """The microbatches of one optimizer step, whose log-probabilities are the leaves.

    ``ranks``: drawn sequences per data-parallel rank and microbatch. Every sequence is a sample.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Sequence[int]]] = _RANKS,
        *,
        dtype: torch.dtype = torch.float64,
    ):
        whole = draw()
        self.drawn = [whole[n] for rank in ranks for numbers in rank for n in numbers]
        self.lengths = [sum(one.mask) for one in self.drawn]
        self.prompts = [one.prompt for one in self.drawn]
        self.samples = list(range(len(self.drawn)))
        self.groups = [one.sample % 3 for one in self.drawn]
        self.dp_size, self.num_microbatches = len(ranks), len(ranks[0])
        self.microbatches: list[Microbatch] = []
        first = 0
        for rank, of_rank in enumerate(ranks):
            for index, numbers in enumerate(of_rank):
                own = [whole[n] for n in numbers]
                old, ref, advantages = (
                    pad_sequence([getattr(one, name) for one in own], batch_first=True).to(dtype)
                    for name in ("old_log_probs", "ref_log_probs", "advantages")
                )
                masks = [torch.tensor(one.mask, dtype=torch.bool) for one in own]
                self.microbatches.append(
                    Microbatch(
                        log_probs=(old + 3 * (ref - old)).requires_grad_(),
                        old_log_probs=old,
                        advantages=advantages,
                        mask=pad_sequence(masks, batch_first=True),
                        sequences=range(first, first + len(numbers)),
                        place=(rank, index),
                    )
                )
                first += len(numbers)

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are compared of: log-probabilities, which are per-token losses too."""
        return self.log_probs()

    def ppo_losses(self, *, clip: float, dual_clip: float | None = None) -> list[Tensor]:
        """Compute PPO's losses of each microbatch, ``[b, s]``."""
        return [
            ppo_losses(log_probs, mb.old_log_probs, mb.advantages, clip=clip, dual_clip=dual_clip)
            for log_probs, mb in zip(self.log_probs(), self.microbatches, strict=True)
        ]

    def log_probs(self) -> list[Tensor]:
        """Return the log-probabilities of each microbatch, ``[b, s]``."""
        return [mb.log_probs for mb in self.microbatches]

    def compared(
        self,
        got: Tensor,
        aggregation: Aggregation,
        losses: Sequence[Tensor],
        *,
        num_excluded: int = 0,
    ) -> Comparison:
        """Compare a framework's loss of the step with :meth:`wanted`, and their gradients."""
        wanted = self.wanted(aggregation, losses, num_excluded=num_excluded)
        return compare(got, wanted, self.leaves)

    def wanted(
        self, aggregation: Aggregation, losses: Sequence[Tensor], *, num_excluded: int = 0
    ) -> Tensor:
        """Compute the step's loss by the reference, 0-dim float64.

        ``losses``: per-token losses of each microbatch, ``[b, s]``. ``num_excluded``: how many of
        the step's last sequences are in no count.
        """
        sequences = []
        for mb, loss in zip(self.microbatches, losses, strict=True):
            for number, x in zip(mb.sequences, loss, strict=True):
                mask = self.drawn[number].mask
                sequences.append(
                    {
                        "x": list(x.double().unbind())[: len(mask)],
                        "counted": mask,
                        "trained": mask,
                        "sample": self.samples[number],
                        "prompt": self.prompts[number],
                        "group": self.groups[number],
                        "microbatch": mb.place,
                    }
                )
        options = reference_options(aggregation, [self.num_microbatches] * self.dp_size)
        counted = sequences[: len(sequences) - num_excluded]
        return reference_loss.step_loss(aggregation.mode, counted, **options)


def aliases(framework: str, *, divisor: float) -> dict[str, Aggregation]:
    """Return the aggregation of each name of a framework, with ``divisor`` if it takes one."""
    made = {}
    for alias, name in ALIASES.items():
        system, _, own = alias.partition(":")
        if system == framework:
            needs = MODES[name.mode].divisor == "required"
            made[own] = Aggregation(alias, divisor=divisor if needs else None)
    return made
