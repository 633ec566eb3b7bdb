"""The bound of a microbatch: what it computes and checks, in one flat function without objects.

The operations are those of ``step.microbatch``, ``mb.reduce`` and ``mb.outputs`` on a CPU, for
sequences of one length that all weigh the same; what a step knows before its first microbatch is
made before. No line of the package is called. :func:`flat` returns the function and its mask.

Shape suffixes: S = sequences of the microbatch; N = places of the cumulative sum; P = positions
of the mask; T = tokens that this context-parallel rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, kept_T: Tensor, weight_T: Tensor, log: list[Any]) -> Tensor:
        ctx.save_for_backward(weight_T)
        ctx.log = log
        return (kept_T * weight_T).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight_T,) = ctx.saved_tensors
        ctx.log.append(gradient)
        return gradient * weight_T, None, None, None


def flat(
    num_sequences: int, tokens: int, *, num_microbatches: int, cp_size: int, cp_rank: int
) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Return a loss_func of ``num_sequences`` of ``tokens`` each, the last not trained.

    It returns loss, num_tokens and reports of sample_mean over M such microbatches on one
    data-parallel rank.
    """
    offsets = torch.arange(num_sequences + 1) * tokens
    mask = torch.ones(num_sequences * tokens)
    mask[tokens - 1 :: tokens] = 0
    counted_S = np.full(num_sequences, tokens - 1)
    total, k = int(counted_S.sum()), num_microbatches * cp_size
    up_to_S = np.cumsum(counted_S)
    expected_N = np.concatenate([up_to_S, [total], up_to_S])
    weight = torch.tensor(1 / (num_sequences * num_microbatches * (tokens - 1.0)))
    pair_32, num_tokens = torch.ones(3, 2), torch.ones((), dtype=torch.int32)
    log: list[Any] = []

    def loss_func(x_T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        start_S = offsets.numpy().astype(np.int64)
        size_S = start_S[1:] - start_S[:-1]
        if start_S[0] or (size_S < 0).any() or (cp_size > 1 and (size_S % (2 * cp_size)).any()):
            raise ValueError("offsets")
        num, num_places = len(size_S), 2 * len(size_S) + 2
        num_runs = 2 * num if cp_size > 1 else 0
        place_N = np.empty(num_places + 2 * num_runs, np.int64)
        place_N[: num + 1] = start_S
        place_N[num + 1] = mask.numel()
        np.subtract(start_S[1:], 1, out=place_N[num + 2 : num_places])
        keep_P = mask == 1
        nonzero = mask.count_nonzero()
        keep_T = keep_P
        if num_runs:
            chunk_S = size_S // (2 * cp_size)
            first, last = cp_rank, 2 * cp_size - 1 - cp_rank
            run_R = np.array([start_S[:-1] + first * chunk_S, start_S[:-1] + last * chunk_S])
            run_R, length_R = run_R.T.ravel(), np.repeat(chunk_S, 2)
            place_N[num_places : num_places + num_runs] = run_R
            np.add(run_R, length_R, out=place_N[num_places + num_runs :])
            shift_R = (run_R - (np.cumsum(length_R) - length_R)).astype(np.int32)
            index_T = np.repeat(shift_R, length_R)
            index_T += np.arange(len(index_T), dtype=np.int32)
            keep_T = keep_P.index_select(0, torch.from_numpy(index_T))
        at_N = keep_P.cumsum(0, dtype=torch.int32).index_select(
            0, torch.from_numpy(np.maximum(place_N - 1, 0))
        )
        if (at_N.numpy()[1:num_places] != expected_N).any() or nonzero.numpy() != total:
            raise ValueError("mask")
        weight_T = torch.mul(keep_T, weight)
        kept_T = (x_T.detach().view(torch.int32) * keep_T).view(torch.float32)
        loss: Tensor = _Sum.apply(x_T, kept_T, weight_T, log)  # type: ignore[no-untyped-call]
        if not math.isfinite(loss.item()):
            raise ValueError("losses")
        value = loss.detach()
        pairs_32 = pair_32.clone()
        torch.mul(torch.stack([value, weight_T.sum()]), k, out=pairs_32[:2, 0])
        log.append((value, at_N, place_N))
        return loss * k, num_tokens, dict(zip("abc", pairs_32.unbind(), strict=True))

    return loss_func
