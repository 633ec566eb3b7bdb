"""Every mode as its paper defines it: float64 loops over tokens, and no code of the package.

A step is a list of sequences; a sequence is a dict with

    x           list of 0-dim float64 tensors, one per token
    counted     list of 0/1, the loss mask
    trained     list of 0/1, the loss mask after rejection
    weight      list of token weights, which multiply losses and counts; without it, all are 1
    sample, prompt    ids
    microbatch  (data-parallel rank, index on that rank)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["StepSequence", "step_loss", "weight_sum"]

StepSequence = dict[str, Any]


def step_loss(
    mode: str,
    sequences: Sequence[StepSequence],
    *,
    divisor: float | None = None,
    exponent: float | None = None,
    count_empty: bool = True,
    microbatches: Sequence[int] | None = None,
) -> Tensor:
    """Compute the step's loss under a mode; ``microbatches``: M of each data-parallel rank."""
    if mode == "token_mean":  # DAPO, arXiv 2503.14476, eq. 8
        return _over(_sum(sequences), _tokens(sequences))
    if mode == "sample_mean":  # GRPO, arXiv 2402.03300, eq. 3
        groups = _kept(_groups(sequences, "sample"), count_empty)
        return _over(_total(_over(_sum(g), _tokens(g)) for g in groups), len(groups))
    if mode == "prompt_mean":  # ScaleRL, arXiv 2510.13786, prompt average
        groups = _kept(_groups(sequences, "prompt"), count_empty)
        return _over(_total(_over(_sum(g), _tokens(g)) for g in groups), len(groups))
    if mode == "constant":  # Dr. GRPO, arXiv 2503.20783, listing of masked_mean
        groups = _kept(_groups(sequences, "sample"), count_empty)
        assert divisor is not None
        return _over(_total(_sum(g) / divisor for g in groups), len(groups))
    if mode == "sample_sum":
        groups = _kept(_groups(sequences, "sample"), count_empty)
        return _over(_total(_sum(g) for g in groups), len(groups))
    if mode == "token_sum":
        return _sum(sequences) / (1 if divisor is None else divisor)
    if mode == "length_power":  # the family of arXiv 2509.07558, all weights together 1
        groups = _kept(_groups(sequences, "sample"), count_empty=False)
        assert exponent is not None
        total = _total(_sum(g) / _tokens(g) ** exponent for g in groups)
        return _over(total, math.fsum(_tokens(g) ** (1 - exponent) for g in groups))
    if mode == "microbatch_token_mean":
        assert microbatches is not None
        ranks = []
        for rank, m in enumerate(microbatches):
            means = []
            for index in range(m):
                packed = [
                    sequence for sequence in sequences if sequence["microbatch"] == (rank, index)
                ]
                means.append(_over(_sum(packed), _tokens(packed)))
            ranks.append(_total(means) / m)
        return _total(ranks) / len(microbatches)
    raise KeyError(mode)


def weight_sum(mode: str, sequences: Sequence[StepSequence], **options: Any) -> float:
    """Compute the right weight sum: the loss, with its ``options``, of losses that are all 1."""
    ones = [
        {**sequence, "x": [torch.ones((), dtype=torch.float64)] * len(sequence["x"])}
        for sequence in sequences
    ]
    return float(step_loss(mode, ones, **options))


def _sum(sequences: Sequence[StepSequence]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        for x, m, v in zip(sequence["x"], sequence["trained"], _weights(sequence), strict=True):
            if m == 1:
                total = total + v * x
    return total


def _tokens(sequences: Sequence[StepSequence]) -> float:
    return math.fsum(
        v
        for sequence in sequences
        for m, v in zip(sequence["counted"], _weights(sequence), strict=True)
        if m == 1
    )


def _weights(sequence: StepSequence) -> list[float]:
    return list(sequence.get("weight", [1] * len(sequence["counted"])))


def _groups(sequences: Sequence[StepSequence], key: str) -> list[list[StepSequence]]:
    groups: dict[int, list[StepSequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence[key], []).append(sequence)
    return list(groups.values())


def _kept(groups: list[list[StepSequence]], count_empty: bool) -> list[list[StepSequence]]:
    return [group for group in groups if count_empty or _tokens(group) > 0]


def _over(total: Tensor, count: float) -> Tensor:
    return total / count if count else total * 0


def _total(values: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        total = total + value
    return total
