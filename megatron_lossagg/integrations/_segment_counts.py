"""Count the segments of a flat mask: sequences, padding sequences and padding."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.reduction.sequences import Sequences


def count_segments(
    start_G: npt.ArrayLike, is_padding_G: npt.ArrayLike, mask_P: npt.NDArray[Any]
) -> Sequences:
    """Count the segments of a flat mask, each up to the next one's start."""
    offset_G1 = np.append(np.asarray(start_G, dtype=np.int64), len(mask_P))
    total_P1 = np.concatenate([[0], np.cumsum(mask_P != 0)])
    return Sequences(
        active_tokens=np.diff(total_P1[offset_G1]),
        lengths=np.diff(offset_G1),
        is_padding=np.asarray(is_padding_G, dtype=np.int64),
    )


def with_weights(counted: Sequences, weight_P: npt.NDArray[Any]) -> Sequences:
    """Add the sum of each segment's token weights, rounded once, so that padding changes no bit."""
    ends = np.cumsum(np.asarray(counted.lengths)).tolist()
    weights = weight_P.astype(np.float64).tolist()
    sums = [math.fsum(weights[begin:end]) for begin, end in pairwise([0, *ends])]
    return replace(counted, token_weight_sums=sums)


def to_numpy(values: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's numbers on the CPU; NumPy has no bfloat16."""
    tensor = torch.as_tensor(values).detach().cpu()
    array: npt.NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
