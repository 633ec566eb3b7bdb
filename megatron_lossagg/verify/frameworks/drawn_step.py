"""The one drawn step of all frameworks, and its loss by the reference.

Twelve sequences: samples split into several, fully masked ones, and a prompt with no active tokens.
:class:`Step` puts them into microbatches of data-parallel ranks as ``[b, s]``, :class:`PackedStep`
into packed microbatches of logits, as slime and miles read them.

Shape suffixes: b = sequences of a microbatch, s = its width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.aliases import ALIASES
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import MASK_CASES, reference_options
from megatron_lossagg.verify.frameworks.check import Comparison, compare
from megatron_lossagg.verify.step_data import VOCABULARY

_SAMPLES, _PER_PROMPT, _SPLIT, _MASKED = 8, 2, (1, 6), (2, 4, 5)
"""Samples 4 and 5 are all of prompt 2."""
_RANKS = (((4, 5, 6), (7, 8, 9)), ((10, 11, 0), (1, 2, 3)))
"""Drawn sequences per data-parallel rank and microbatch: prompts go over both."""
_PACKED = (((0, 1, 2), (3, 4, 5, 6), (7, 8), (9, 10, 11)),)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """One sequence: a prompt and a response, whose tokens have losses."""

    tokens: Tensor
    mask: list[int]
    """Of the response."""
    sample: int
    prompt: int
    advantages: Tensor
    """Float64, as both log-probabilities, of the response."""
    old_log_probs: Tensor
    ref_log_probs: Tensor


def draw() -> list[Drawn]:
    """Draw the twelve sequences; two samples are split into three."""
    drawn: list[Drawn] = []
    lengths = random.Random(11)
    for sample in range(_SAMPLES):
        for _ in range(3 if sample in _SPLIT else 1):
            n, prompt_length = lengths.choice([4, 5, 9, 14]), lengths.randint(1, 6)
            mask = [int(lengths.random() < 0.8) for _ in range(n)]
            mask[-1] = 1
            generator = torch.Generator().manual_seed(len(drawn))
            tokens = torch.randint(0, VOCABULARY, (prompt_length + n,), generator=generator)
            advantages, old, ref = (
                torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(3)
            )
            drawn.append(
                Drawn(
                    tokens=tokens,
                    mask=[0] * n if sample in _MASKED else mask,
                    sample=sample,
                    prompt=sample // _PER_PROMPT,
                    advantages=advantages,
                    old_log_probs=-3.4 + 0.1 * old,
                    ref_log_probs=-3.4 + 0.1 * ref,
                )
            )
    return drawn


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


class PackedStep(Step):
    """The drawn step on one rank, with logits of packed sequences and samples of several."""

    def __init__(self) -> None:
        super().__init__(_PACKED, dtype=torch.float32)
        self.samples = [one.sample for one in self.drawn]
        self.num_samples = len(set(self.samples))
        generator = torch.Generator().manual_seed(7)
        self.logits: list[Tensor] = []
        for mb in self.microbatches:
            total = sum(len(self.drawn[n].tokens) for n in mb.sequences)
            logits = 0.3 * torch.randn(1, total, VOCABULARY, generator=generator)
            self.logits.append(logits.requires_grad_())

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are compared of: logits."""
        return self.logits

    def batch(self, index: int, rollout_mask_sums: Sequence[float] | Tensor) -> dict[str, Any]:
        """Return a microbatch as the loss functions of slime and miles read it.

        ``rollout_mask_sums``: of every sequence of the step.
        """
        numbers = self.microbatches[index].sequences
        own = [self.drawn[n] for n in numbers]
        of_step = torch.as_tensor(rollout_mask_sums, dtype=torch.float32)
        return {
            "unconcat_tokens": [one.tokens for one in own],
            "total_lengths": [len(one.tokens) for one in own],
            "response_lengths": [len(one.mask) for one in own],
            "loss_masks": [torch.tensor(one.mask, dtype=torch.int32) for one in own],
            "advantages": [one.advantages.float() for one in own],
            "log_probs": [one.old_log_probs.float() for one in own],
            "rollout_mask_sums": of_step[numbers.start : numbers.stop],
        }

    def log_probs(self) -> list[Tensor]:
        """Compute the log-probabilities of each microbatch from its logits."""
        made = []
        for mb, logits in zip(self.microbatches, self.logits, strict=True):
            of_responses, end = [], 0
            for number in mb.sequences:
                tokens, n = self.drawn[number].tokens, len(self.drawn[number].mask)
                end += len(tokens)
                log_p = torch.log_softmax(logits[0, end - n - 1 : end - 1].double(), -1)
                of_responses.append(log_p.gather(1, tokens[-n:, None])[:, 0])
            made.append(pad_sequence(of_responses, batch_first=True))
        return made


def ppo_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute PPO's clipped losses per token: arXiv 1707.06347 eq. 7, 1912.09729 eq. 5.

    ::

        x = -min(r A, clamp(r, 1 - clip, 1 + clip) A);  where A < 0: x = min(x, -dual_clip A)
    """
    ratio = (log_probs - old_log_probs).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


_NEED_MORE = ("microbatch_token_mean", "balanced")


def aggregations() -> dict[str, Aggregation]:
    """Name the aggregations of one term that need no microbatches and groups."""
    made = {
        str(case): case.aggregation
        for case in MASK_CASES
        if case.second is None and case.aggregation.mode not in _NEED_MORE
    }
    return {**made, "token_sum": Aggregation("token_sum", divisor=3.0)}


def aliases(framework: str, *, divisor: float) -> dict[str, Aggregation]:
    """Return the aggregation of each name of a framework, with ``divisor`` if it takes one."""
    made = {}
    for alias, name in ALIASES.items():
        system, _, own = alias.partition(":")
        if system == framework:
            needs = MODES[name.mode].divisor == "required"
            made[own] = Aggregation(alias, divisor=divisor if needs else None)
    return made
