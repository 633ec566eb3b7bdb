"""The step of every verification: uneven sequences with each degenerate case, and their assignment.

Nothing of the package is used here: Megatron and the reference take the same sequences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

VOCABULARY = 32
"""Token ids are below it."""

LENGTHS = (9, 4, 17, 1, 12, 3, 8, 25, 6, 7, 2, 11, 5, 10)
"""Tokens of each sequence: longer and shorter than 2 CP, and one of a single token."""

# Sample 2 is split into sequences 2 and 3, sample 9 into sequences 9 and 13 (far apart); prompts 0
# and 1 are spread over ranks and microbatches.
_SAMPLE = (0, 1, 2, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 9)
_PROMPT_OF_SAMPLE = {0: 0, 1: 1, 2: 0, 4: 1, 5: 2, 6: 0, 7: 1, 8: 2, 9: 3, 10: 3, 11: 0, 12: 1}
_MASKED_ALONE = (4, 6)  # fully masked: one alone in its sample, in a live prompt
_MASKED_PROMPT = (5, 8)  # a prompt with no active tokens
_NOTHING_TRAINED = (11,)  # counted, but nothing is left to train
_WEIGHS_NOTHING = (7,)  # counted and trained, but every token weight is 0
_POSITIVE = (0, 1, 4, 5, 9, 11)  # samples of a positive advantage: their prompt's first group
_LEFT_OUT = (3, 5, 9, 10, 13)  # a row of a sample, an empty one, and a whole prompt
_ONE_WEIGHT = (0, 2, 9)  # a weight of the whole sequence, as of its data set


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """One training sequence; token t predicts ``labels[t]``."""

    tokens: list[int]
    labels: list[int]
    coefficient: list[float]
    """A factor of each token's loss, as an advantage or an importance ratio."""
    counted: list[int]
    """The loss mask."""
    trained: list[int]
    """The loss mask after rejection: it selects fewer tokens."""
    sample: int
    prompt: int
    group: int
    """Of prompt and sign of the advantage."""
    sequence_weight: float
    """Of the whole sequence, for the cases that weigh sequences."""
    left_out: bool
    """Whether it leaves the counts, for the cases that leave sequences out."""
    weight: list[float]
    """v_t of each token, for the cases that count weights; 0 outside of the loss mask."""

    def __len__(self) -> int:
        return len(self.tokens)


def make_sequences(copies: int = 1) -> list[TrainingSequence]:
    """Make 14 sequences with every degenerate case, ``copies`` times with other tokens and ids."""
    rng = random.Random(7)
    return [_sequence(rng, index, copy) for copy in range(copies) for index in range(len(LENGTHS))]


def _sequence(rng: random.Random, index: int, copy: int) -> TrainingSequence:
    length = LENGTHS[index]
    counted = [int(rng.random() < 0.8) for _ in range(length)]
    counted[rng.randrange(length)] = 1
    if index in _MASKED_ALONE + _MASKED_PROMPT:
        counted = [0] * length
    trained = [m if rng.random() < 0.8 else 0 for m in counted]
    if index in _NOTHING_TRAINED:
        trained = [0] * length
    tokens = [rng.randrange(VOCABULARY) for _ in range(length + 1)]
    prompt = _PROMPT_OF_SAMPLE[_SAMPLE[index]] - 20 + 10 * copy  # ids may be negative
    return TrainingSequence(
        tokens=tokens[:-1],
        labels=tokens[1:],
        coefficient=[rng.uniform(-1.5, 1.5) for _ in range(length)],
        counted=counted,
        trained=trained,
        sample=_SAMPLE[index] + 100 * (copy + 1),
        prompt=prompt,
        group=2 * prompt + (_SAMPLE[index] in _POSITIVE),
        sequence_weight=(0.5, 3.0, 0.0, 1.0)[index % 4],
        left_out=index in _LEFT_OUT,
        weight=[v * m for v, m in zip(_weights(index, copy, length), counted, strict=True)],
    )


def _weights(index: int, copy: int, length: int) -> list[float]:
    """Return token weights: fractions and zeros, one for a whole sequence, or all 0."""
    rng = random.Random(1000 * copy + index)
    if index in _WEIGHS_NOTHING:
        return [0.0] * length
    if index in _ONE_WEIGHT:
        return [2.5] * length
    return [rng.choice([0.0, 0.25, rng.uniform(0.1, 3.0)]) for _ in range(length)]


def padding_sequence(length: int) -> TrainingSequence:
    """Return a sequence that only fills a shape: its mask is 0, its losses must not be seen."""
    tokens = [(5 * index + 1) % VOCABULARY for index in range(length + 1)]
    return TrainingSequence(
        tokens=tokens[:-1],
        labels=tokens[1:],
        coefficient=[2.0] * length,
        counted=[0] * length,
        trained=[0] * length,
        sample=0,
        prompt=0,
        group=0,
        sequence_weight=1.0,
        left_out=False,
        weight=[0.0] * length,
    )


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which data-parallel rank and microbatch each sequence of a step goes to."""

    microbatches: list[int]
    """M of each data-parallel rank."""
    keys: list[tuple[int, int]] = field(repr=False)
    """(rank, microbatch) of each sequence."""

    def of_rank(self, rank: int) -> list[int]:
        """Return the sequences of a rank, by position in the step."""
        return [sequence for sequence, key in enumerate(self.keys) if key[0] == rank]


def assign_sequences(sequences: list[TrainingSequence], microbatches: list[int]) -> Assignment:
    """Assign sequences to ranks and, unevenly, to each rank's microbatches; some get no sequences.

    ``microbatches``: M of each rank. With M = 3 everywhere and more than one rank, the last
    rank gets only sequences with no active tokens.
    """
    dp = len(microbatches)
    live = [index for index, sequence in enumerate(sequences) if any(sequence.counted)]
    idle = [index for index, sequence in enumerate(sequences) if not any(sequence.counted)]
    keys = [(0, 0)] * len(sequences)
    for rank, m in enumerate(microbatches):
        if dp > 1 and set(microbatches) == {3}:
            of_rank = idle if rank == dp - 1 else live[rank :: dp - 1]
        else:
            of_rank = list(range(rank, len(sequences), dp))
        for position, index in zip(count(), of_rank):
            keys[index] = (rank, position * position % m)
    return Assignment(microbatches=microbatches, keys=keys)


def zigzag(offsets: Sequence[int], cp_size: int, cp_rank: int) -> list[int]:
    """List the token positions of a context-parallel rank; shares no code with the package."""
    if cp_size == 1:
        return list(range(offsets[-1]))
    positions: list[int] = []
    for begin, end in pairwise(offsets):
        size = (end - begin) // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions += range(begin + chunk * size, begin + (chunk + 1) * size)
    return positions


def contiguous(offsets: Sequence[int], cp_size: int, cp_rank: int) -> list[int]:
    """List the positions that a rank holds if each sequence is split into one interval per rank."""
    positions: list[int] = []
    for begin, end in pairwise(offsets):
        size = (end - begin) // cp_size
        positions += range(begin + cp_rank * size, begin + (cp_rank + 1) * size)
    return positions
