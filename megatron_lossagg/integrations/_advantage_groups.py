"""The groups of ``balanced``, arXiv 2605.04077: a prompt's samples by the sign of their advantage.

Samples whose advantage is 0 are neither of the paper's two subsets: they are a third group, so that
they change no weight of the other two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lossagg.errors import PlanError


def advantage_groups(
    prompts: Sequence[object],
    advantages: Tensor,
    masks: Tensor,
    samples: Sequence[object] | None = None,
) -> list[str]:
    """Name the group of each sequence; a host sync per sequence unless tensors are on the CPU.

    A sequence has the sign of all its active tokens. A fully masked one has the sign 0, or that of
    its sample's others if ``samples`` are passed. ``advantages``, ``masks``: ``[b, s]``, dense or
    jagged. Raises :class:`PlanError` for a sequence with more than one sign, or with NaN.
    """
    signs = [
        _sign(number, of_one, mask)
        for number, (of_one, mask) in enumerate(
            zip(advantages.unbind(), masks.unbind(), strict=True)
        )
    ]
    own = [*range(len(signs))] if samples is None else samples
    of_sample = {one: sign for one, sign in zip(own, signs, strict=True) if sign is not None}
    return [
        f"{of_sample.get(one, 0):+d} {prompt}" for one, prompt in zip(own, prompts, strict=True)
    ]


def _sign(number: int, advantage: Tensor, mask: Tensor) -> int | None:
    """Return 1, 0 or -1, and None of a fully masked sequence."""
    of_tokens = advantage[mask.bool()].cpu()
    signs = torch.unique(of_tokens.sign().where(~of_tokens.isnan(), torch.nan)).tolist()
    if not signs:
        return None
    if len(signs) > 1 or math.isnan(signs[0]):
        raise PlanError(
            f"got advantages of the signs {signs} in sequence {number}, expected one sign for all "
            "of a sequence's active tokens: balanced groups a prompt's samples by it. Choose an "
            "estimator with one advantage per sequence, such as GRPO, or another mode"
        )
    return int(signs[0])
