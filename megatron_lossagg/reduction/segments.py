"""The segments of one microbatch: which of their tokens this rank holds, and sums over them.

Shape suffixes: P = positions of the whole mask (P1: one more); T = tokens that this rank holds;
G = segments of the microbatch (G1, G2: and one or two more); R = runs of consecutive
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.reduction.devices import from_numpy
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.layout import Layout

PADDING = -1
"""The entry of ``sequences`` that represents a padding sequence or padding segment."""

_MOST_INT32 = 2**31 - 1


def held(value_P: Tensor, layout: Layout) -> Tensor:
    """Slice what is packed like the mask: the tokens that this rank holds, ``[T]``."""
    if layout.holds_whole_mask and len(value_P) == layout.num_tokens:
        return value_P
    if layout.interval is not None:
        return value_P[layout.interval]
    # half the bytes to copy and to read, if there are not too many
    index_T = layout.indices(np.int32 if len(value_P) <= _MOST_INT32 else np.int64)
    return value_P.index_select(0, from_numpy(index_T, value_P.device))


@dataclass(kw_only=True, eq=False)
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
        size, num_segments = value_P.shape[0], layout.num_segments
        head, num_runs = 2 * num_segments + 2, 0
        if not layout.holds_whole_mask:
            num_runs = len(layout.start_R)
        place_N = np.empty(head + 2 * num_runs, dtype=np.int64)
        place_N[: num_segments + 1] = layout.offset_G1
        place_N[num_segments + 1] = size
        # An empty first segment has no last position: -1 is a place of 0 too.
        np.subtract(layout.offset_G1[1:], 1, out=place_N[num_segments + 2 : head])
        if num_runs:
            place_N[head : head + num_runs] = layout.start_R
            np.add(layout.start_R, layout.length_R, out=place_N[head + num_runs :])
        if size:
            last_N = from_numpy(np.maximum(place_N - 1, 0), value_P.device)
            at_N = value_P.cumsum(0, dtype=dtype).index_select(0, last_N)
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
