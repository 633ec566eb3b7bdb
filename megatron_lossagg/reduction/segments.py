"""The segments of one microbatch: whose tokens they are, their sums, and their names in messages.

Shape suffixes: P = positions of the whole mask (P1: one more); T = tokens that this rank holds;
G = segments of the microbatch (G1, G2: and one or two more); R = runs of consecutive
positions; S = sequences of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from megatron_lossagg.reduction.sequences import Checked

PADDING = -1
"""The entry of ``sequences`` that represents a padding sequence or padding segment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The segments of one microbatch, and how messages name them; integers on the CPU only."""

    sequences: Ints
    """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
    counted: Ints
    """int64 ``[G]``: the plan's count of each segment's sequence, 0 for a padding sequence."""
    planned: Checked
    """Those of the step."""
    layout: Layout
    rejects_tokens: bool
    """Whether a sequence may train fewer tokens than were counted."""

    def __str__(self) -> str:
        """Name the microbatch: ``microbatch 2 with sequences 5, 6``."""
        real = self.own_sequences
        if not len(real):
            return "a microbatch without sequences"
        number = "a microbatch"
        if self.planned.microbatch is not None:
            number = f"microbatch {self.planned.microbatch[real[0]]}"
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


def held(value_P: Tensor, layout: Layout) -> Tensor:
    """Slice what is packed like the mask: the tokens that this rank holds, ``[T]``."""
    if layout.interval is not None:
        return value_P[layout.interval]
    index_T = layout.positions.numpy()
    if value_P.numel() <= np.iinfo(np.int32).max:  # half the bytes to copy and to read
        index_T = index_T.astype(np.int32)
    return torch.index_select(value_P, 0, from_numpy(index_T, value_P.device))


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentSums:
    """What a cumulative sum over a mask's positions is at the ends of its segments and runs.

    One look-up in a microbatch; differences are taken when a step ends, or on the CPU.
    """

    at_N: Tensor
    """Sums up to these places; to a place of 0, whose sum is 0, anything."""
    place_N: Ints
    """The start of each segment, and the end of the last, ``[G1]``; the mask's end; the last
    position of each segment, ``[G]``; the starts and the ends of runs, ``[2R]``."""
    layout: Layout

    @staticmethod
    def of(value_P: Tensor, layout: Layout, dtype: torch.dtype) -> SegmentSums:
        """Sum what is packed like the mask, in ``dtype``; no host sync."""
        offset_G1, size = layout.offset_G1, value_P.shape[0]
        # An empty first segment has no last position: -1 is a place of 0 too.
        places = [offset_G1, np.array([size]), offset_G1[1:] - 1]
        if not layout.holds_whole_mask:
            places += [layout.start_R, layout.start_R + layout.length_R]
        place_N = np.concatenate(places)
        if size:
            last_N = from_numpy(np.maximum(place_N - 1, 0), value_P.device)
            at_N = torch.cumsum(value_P, dim=0, dtype=dtype).index_select(0, last_N)
        else:
            at_N = torch.zeros(len(place_N), dtype=dtype, device=value_P.device)
        return SegmentSums(at_N=at_N, place_N=place_N, layout=layout)

    def read(self, at_N: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return each segment's sum, and that of what follows them, ``[G1]``; ``at_N`` as read.

        And the value at each segment's last position, ``[G]``; of an empty one, that before it.
        """
        at_N, num_segments = np.where(self.place_N > 0, at_N, 0), self.layout.num_segments
        sum_G1 = at_N[1 : num_segments + 2] - at_N[: num_segments + 1]
        last_G = at_N[1 : num_segments + 1] - at_N[num_segments + 2 : 2 * num_segments + 2]
        return sum_G1, last_G


def held_sums(sums: Sequence[SegmentSums]) -> Tensor:
    """Return the sums over what this rank holds of the segments of microbatches, one by one.

    Of one device. The number of operations does not depend on that of the microbatches.
    """
    starts, ends, rows, at, row = [], [], [], 0, 0
    for one in sums:
        num_segments = one.layout.num_segments
        if one.layout.holds_whole_mask:
            starts.append(at + np.arange(num_segments))
            ends.append(starts[-1] + 1)
            rows.append(row + np.arange(num_segments))
        else:
            starts.append(at + 2 * num_segments + 2 + np.arange(len(one.layout.segment_R)))
            ends.append(starts[-1] + len(one.layout.segment_R))
            rows.append(row + one.layout.segment_R)
        at, row = at + len(one.at_N), row + num_segments
    found = torch.cat([one.at_N for one in sums])
    is_after_N = np.concatenate([one.place_N for one in sums]) > 0
    found = torch.where(from_numpy(is_after_N, found.device), found, 0)
    index_3 = np.stack([np.concatenate(one) for one in (starts, ends, rows)])
    start, end, of_row = from_numpy(index_3, found.device)
    zeros = torch.zeros(row, dtype=found.dtype, device=found.device)
    return zeros.index_add_(0, of_row, found[end] - found[start])
