"""Every mode as its paper defines it: float64 loops over tokens, and no code of the package.

A step is a list of sequences; a sequence is a dict with

    x           list of 0-dim float64 tensors, one per token
    counted     list of 0/1, the loss mask
    trained     list of 0/1, the loss mask after rejection
    weight      list of token weights, which multiply losses and counts; without it, all are 1
    sequence_weight   what multiplies the sequence's losses, and no count; without it 1
    left_out    whether it leaves every count and the loss; without it, it does not
    sample, prompt, group    ids
    columns     the caller's own numbers by name, for a weights function; without it none
    microbatch  (data-parallel rank, index on that rank)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

StepSequence = dict[str, Any]


def step_loss(
    mode: str,
    sequences: Sequence[StepSequence],
    *,
    divisor: float | None = None,
    exponent: float | None = None,
    count_empty: bool = True,
    microbatches: Sequence[int] | None = None,
    weights: Callable[[Any], Any] | None = None,
    count_left_out: bool = False,
) -> Tensor:
    """Compute the step's loss under a mode; ``microbatches``: M of each data-parallel rank.

    ``weights``: the user's function, for ``own_weights``.
    """
    if not count_left_out:
        sequences = [one for one in sequences if not one.get("left_out")]
    if mode == "token_mean":  # DAPO, arXiv 2503.14476, eq. 8
        return _over(_sum(sequences), _tokens(sequences))
    if mode == "sample_mean":  # GRPO, arXiv 2402.03300, eq. 3
        return _mean_of_means(_groups(sequences, "sample"), count_empty)
    if mode == "prompt_mean":  # ScaleRL, arXiv 2510.13786, prompt average
        return _mean_of_means(_groups(sequences, "prompt"), count_empty)
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
    if mode == "balanced":  # arXiv 2605.04077: groups' token means, weighted by their samples
        samples = _kept(_groups(sequences, "sample"), count_empty)
        of_groups = (
            len(_kept(_groups(g, "sample"), count_empty)) * _over(_sum(g), _tokens(g))
            for g in _groups(sequences, "group")
        )
        return _over(_total(of_groups), len(samples))
    if mode == "row_mean":  # the objective of verl-project/uni-agent#185
        means = []
        for sample in _kept(_groups(sequences, "sample"), count_empty):
            means.append(_mean_of_means([[sequence] for sequence in sample], count_empty))
        return _over(_total(means), len(means))
    if mode == "own_weights":
        assert weights is not None
        with np.errstate(all="ignore"):
            found = np.broadcast_to(weights(_counts(sequences, count_empty)), len(sequences))
        pairs = zip(found.tolist(), sequences, strict=True)
        return _total(w * _sum([one]) for w, one in pairs if _tokens([one]))
    if mode == "microbatch_token_mean":
        assert microbatches is not None
        ranks = []
        for rank, m in enumerate(microbatches):
            packed = [[s for s in sequences if s["microbatch"] == (rank, i)] for i in range(m)]
            ranks.append(_mean_of_means(packed, count_empty=True))
        return _total(ranks) / len(microbatches)
    raise KeyError(mode)


def _mean_of_means(groups: list[list[StepSequence]], count_empty: bool) -> Tensor:
    """Average the token means of groups of sequences; an empty one has the mean 0."""
    groups = _kept(groups, count_empty)
    return _over(_total(_over(_sum(g), _tokens(g)) for g in groups), len(groups))


def weight_sum(mode: str, sequences: Sequence[StepSequence], **options: Any) -> float:
    """Compute the right weight sum: the loss, with its ``options``, of losses that are all 1."""
    ones = [
        {**sequence, "x": [torch.ones((), dtype=torch.float64)] * len(sequence["x"])}
        for sequence in sequences
    ]
    return float(step_loss(mode, ones, **options))


class _AnyColumn(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        self[name] = np.ones(1)
        return self[name]


def counts_of_one() -> Any:
    """Count one sequence for a weights function; it has each column that is read."""
    counts = _counts([{"counted": [1, 1], "sample": 0, "prompt": 0, "group": 0}], True)
    counts.columns = _AnyColumn()
    return counts


def _counts(sequences: Sequence[StepSequence], count_empty: bool) -> SimpleNamespace:
    """Count what a weights function is given, for each sequence by loops over all."""

    def same(one: StepSequence, key: str) -> list[StepSequence]:
        return [other for other in sequences if key in one and other[key] == one[key]]

    def tokens(key: str) -> Any:
        return np.array([_tokens(same(one, key)) for one in sequences], dtype=np.float64)

    def number(key: str, of: str | None) -> Any:
        counted = []
        for one in sequences:
            found = same(one, key)
            groups = [[row] for row in found] if of is None else _groups(found, of)
            counted.append(len(_kept(groups, count_empty)))
        return np.array(counted, dtype=np.float64)

    def all_of(key: str) -> float:
        found = [one for one in sequences if key in one]
        return float(len(_kept(_groups(found, key), count_empty)))

    names = {name for one in sequences for name in one.get("columns", ())}
    return SimpleNamespace(
        columns={name: np.array([one["columns"][name] for one in sequences]) for name in names},
        R=float(len(_kept([[one] for one in sequences], count_empty))),
        N=_tokens(sequences),
        B=all_of("sample"),
        P=all_of("prompt"),
        n_s=np.array([_tokens([one]) for one in sequences], dtype=np.float64),
        n_b=tokens("sample"),
        n_p=tokens("prompt"),
        n_c=tokens("group"),
        R_b=number("sample", None),
        k_p=number("prompt", "sample"),
        k_c=number("group", "sample"),
    )


def _sum(sequences: Sequence[StepSequence]) -> Tensor:
    return _total(
        sequence.get("sequence_weight", 1.0) * v * x
        for sequence in sequences
        for x, m, v in zip(sequence["x"], sequence["trained"], _weights(sequence), strict=True)
        if m == 1
    )


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
    return sum(values, torch.zeros((), dtype=torch.float64))
