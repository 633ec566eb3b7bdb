"""The segments of one microbatch: whose tokens they are, their sums, and their names in messages.

Shape suffixes: P = positions of the whole mask (P1: one more); T = tokens that this rank holds;
G = segments of the microbatch (G1, G2: and one or two more); R = runs of consecutive
positions; S = sequences of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.reduction.devices import from_numpy
from megatron_lossagg.reduction.integers import Ints, first_few
from megatron_lossagg.reduction.layout import Layout

__all__ = [
    "PADDING",
    "Segments",
    "cumulated",
    "held",
    "held_sums",
    "of_sequences",
    "segment_sums",
]

PADDING = -1
"""The entry of ``sequences`` that represents a padding sequence or padding segment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The segments of one microbatch, and how messages name them; integers on the CPU only."""

    sequences: Ints
    """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
    counted: Ints
    """int64 ``[G]``: the plan's count of each segment's sequence, 0 for a padding sequence."""
    counted_weights: npt.NDArray[np.float64] | None
    """float64 ``[G]``: the plan's sum of token weights likewise; None if it has none."""
    layout: Layout
    microbatch_of_sequence: Ints | None
    rejects_tokens: bool
    """Whether a sequence may train fewer tokens than were counted."""

    def __str__(self) -> str:
        """Name the microbatch: ``microbatch 2 with sequences 5, 6``."""
        real = self.own_sequences
        if not len(real):
            return "a microbatch without sequences"
        number = "a microbatch"
        if self.microbatch_of_sequence is not None:
            number = f"microbatch {self.microbatch_of_sequence[real[0]]}"
        return f"{number} with sequences {first_few(real)}"

    @property
    def own_sequences(self) -> Ints:
        """The sequences of the segments that are not padding."""
        own: Ints = self.sequences[self.sequences != PADDING]
        return own

    @property
    def is_sliced_by_framework(self) -> bool:
        """Whether the mask has only this rank's part of each sequence."""
        return self.layout.is_local and self.layout.cp_size > 1

    @property
    def rank_name(self) -> str:
        """Name this rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"rank {rank} (context-parallel rank {self.layout.cp_rank})"

    @property
    def mask_name(self) -> str:
        """Name this microbatch's mask on this rank."""
        return f"{self.rank_name}: the mask of {self}"

    def token(self, index: int) -> tuple[str, str]:
        """Name the sequence, and the token in it, that this rank's token ``index`` is."""
        segment, token = self.layout.place(index)
        sequence = self.sequences[segment]
        whose = "a padding sequence" if sequence == PADDING else f"sequence {sequence}"
        part = " of this rank's part" if self.is_sliced_by_framework else ""
        return f"{whose} (segment {segment} of {self})", f"{token}{part}"


def of_sequences(values_S: npt.NDArray[Any], sequences_G: Ints) -> npt.NDArray[Any]:
    """Look up a value per segment, 0 for a padding sequence."""
    value_G = np.zeros(len(sequences_G), dtype=values_S.dtype)
    is_sequence_G = sequences_G != PADDING
    value_G[is_sequence_G] = values_S[sequences_G[is_sequence_G]]
    return value_G


def held(value_P: Tensor, layout: Layout) -> Tensor:
    """Slice what is packed like the mask: the tokens that this rank holds, ``[T]``."""
    if layout.interval is not None:
        return value_P[layout.interval]
    index_T = layout.positions.numpy()
    if len(value_P) <= np.iinfo(np.int32).max:  # half the bytes to copy and to read
        index_T = index_T.astype(np.int32)
    return torch.index_select(value_P, 0, from_numpy(index_T, value_P.device))


def cumulated(value_P: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cumulative sum, ``[P1]``: entry i is the sum of the first i values."""
    sum_P1 = torch.empty(len(value_P) + 1, dtype=dtype, device=value_P.device)
    sum_P1[:1].zero_()
    torch.cumsum(value_P, dim=0, dtype=dtype, out=sum_P1[1:])
    return sum_P1


def segment_sums(sum_P1: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Take each segment's sum out of a cumulative one, ``[G1]``: the last is of what follows them.

    Also returns, ``[G2]``, the offsets between which each segment lies, and the mask's length.
    """
    end_G2 = np.empty(len(layout.offset_G1) + 1, dtype=np.int64)
    end_G2[:-1], end_G2[-1] = layout.offset_G1, len(sum_P1) - 1
    on_device_G2 = from_numpy(end_G2, sum_P1.device)
    sum_G2 = sum_P1[on_device_G2]
    return sum_G2[1:] - sum_G2[:-1], on_device_G2


def held_sums(sum_P1: Tensor, whole_G: Tensor, layout: Layout) -> Tensor:
    """Take the sums over what this rank holds of each segment out of a cumulative one, ``[G]``.

    ``whole_G``: those over whole segments, which are the same if the rank holds the whole mask.
    """
    if layout.cp_size == 1 or layout.is_local:
        return whole_G
    ends_3R = np.stack([layout.start_R, layout.start_R + layout.length_R, layout.segment_R])
    start_R, end_R, segment_R = from_numpy(ends_3R, sum_P1.device)
    held_R = sum_P1[end_R] - sum_P1[start_R]
    return torch.zeros_like(whole_G).index_add_(0, segment_R, held_R)
