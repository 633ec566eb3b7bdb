"""Every mode as its paper writes it: float64 loops over tokens, and nothing of the package.

A step is a list of rows; a row is a dict with

    x           list of 0-dim float64 tensors, one a token
    counted     list of 0/1, the counting mask
    trained     list of 0/1, the training mask
    sample, prompt    ids
    microbatch  (data-parallel rank, index on that rank)
"""

import math

import torch


def step_loss(mode, rows, *, divisor=None, count_empty=True, microbatches=None):
    """The step's loss under a mode; ``microbatches``: M of each data-parallel rank."""
    if mode == "token_mean":  # DAPO, arXiv 2503.14476, eq. 8
        return _over(_sum(rows), _tokens(rows))
    if mode == "sample_mean":  # GRPO, arXiv 2402.03300, eq. 3
        groups = _kept(_groups(rows, "sample"), count_empty)
        return _over(_total(_over(_sum(g), _tokens(g)) for g in groups), len(groups))
    if mode == "prompt_mean":  # ScaleRL, arXiv 2510.13786, prompt average
        groups = _kept(_groups(rows, "prompt"), count_empty)
        return _over(_total(_over(_sum(g), _tokens(g)) for g in groups), len(groups))
    if mode == "constant":  # Dr. GRPO, arXiv 2503.20783, listing of masked_mean
        groups = _kept(_groups(rows, "sample"), count_empty)
        return _over(_total(_sum(g) / divisor for g in groups), len(groups))
    if mode == "sample_sum":
        groups = _kept(_groups(rows, "sample"), count_empty)
        return _over(_total(_sum(g) for g in groups), len(groups))
    if mode == "token_sum":
        return _sum(rows) / (1 if divisor is None else divisor)
    if mode == "microbatch_token_mean":
        ranks = []
        for rank, m in enumerate(microbatches):
            means = []
            for index in range(m):
                here = [row for row in rows if row["microbatch"] == (rank, index)]
                means.append(_over(_sum(here), _tokens(here)))
            ranks.append(_total(means) / m)
        return _total(ranks) / len(microbatches)
    raise KeyError(mode)


def weight_sum(mode, rows, *, divisor=None, count_empty=True, microbatches=None):
    """The loss of per-token losses that are all 1: what the gauge should read."""
    ones = [{**row, "x": [torch.ones((), dtype=torch.float64)] * len(row["x"])} for row in rows]
    loss = step_loss(
        mode, ones, divisor=divisor, count_empty=count_empty, microbatches=microbatches
    )
    return loss.item()


def _sum(rows):
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        for x, m in zip(row["x"], row["trained"], strict=True):
            if m == 1:
                total = total + x
    return total


def _tokens(rows):
    return math.fsum(m for row in rows for m in row["counted"])


def _groups(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return list(groups.values())


def _kept(groups, count_empty):
    return [group for group in groups if count_empty or _tokens(group) > 0]


def _over(total, count):
    return total / count if count else total * 0


def _total(values):
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        total = total + value
    return total
