"""Which tokens of a microbatch this context-parallel rank holds, and in which order.

A layout is index arithmetic on integers on the CPU: no tensor, no rank lookup, no collective.
It splits a microbatch's mask into *segments* (one packed sequence each). It lists, as *runs* of
consecutive mask positions, the tokens that this rank's per-token losses belong to. Zigzag: a
sequence padded to a multiple of 2 CP is split into 2 CP chunks; CP rank r holds the chunks r and
2 CP - 1 - r, in that order. Contiguous: CP rank r holds the r-th of CP equal intervals of what is
split, which is the packed buffer (thd) or each sequence (bshd).

:func:`held` takes this rank's tokens of a mask, :class:`SegmentSums` sums over each segment.

Shape suffixes: P = positions of the whole mask (P1: one more); T = tokens that this rank holds; R =
runs of consecutive positions; G = segments of the microbatch (G1, G2: and one or two more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.errors import LayoutError
from megatron_lossagg.reduction.devices import from_numpy
from megatron_lossagg.reduction.integers import (
    Ints,
    IntsLike,
    checked_integers,
    first_few,
    is_integer,
)

_USUAL = (torch.int32, torch.int64)


def checked_offsets(cu_seqlens_padded: IntsLike) -> tuple[Ints, Ints]:
    """Return ``cu_seqlens``, int64 ``[G1]``: from 0, never falling; and the lengths, ``[G]``."""
    if (
        type(cu_seqlens_padded) is torch.Tensor
        and cu_seqlens_padded.dtype in _USUAL
        and cu_seqlens_padded.dim() == 1
        and cu_seqlens_padded.device.type == "cpu"
    ):
        offset_G1 = cu_seqlens_padded.numpy().astype(np.int64)
        length_G = offset_G1[1:] - offset_G1[:-1]
        if len(offset_G1) and offset_G1[0] == 0 and np.minimum.reduce(length_G, initial=0) == 0:
            return offset_G1, length_G
    offset_G1 = checked_integers("cu_seqlens", cu_seqlens_padded, LayoutError, squeeze=True)
    if len(offset_G1) == 0 or offset_G1[0] != 0:
        raise LayoutError(
            f"got cu_seqlens [{first_few(offset_G1, 4)}], expected offsets from 0, one more "
            "than segments"
        )
    length_G = offset_G1[1:] - offset_G1[:-1]
    check_lengths("cu_seqlens", length_G)
    return offset_G1, length_G


def batch_offsets(batch_size: int, seq_length: int) -> Ints:
    """Return the offsets of a batch's sequences, int64 ``[G1]``."""
    if not is_integer(batch_size) or not is_integer(seq_length):
        raise LayoutError(f"got sizes [{batch_size!r}, {seq_length!r}], expected integers from 0")
    offset_G1: Ints = np.arange(batch_size + 1) * seq_length
    return offset_G1


def check_responses(total_G: Ints, response_G: Ints) -> None:
    """Refuse responses that do not fit their sequences."""
    if total_G.shape != response_G.shape:
        raise LayoutError(
            f"got {len(total_G)} total_lengths and {len(response_G)} response_lengths, "
            "expected one of each per sequence"
        )
    check_lengths("response_lengths", response_G)
    promptless = np.flatnonzero(response_G >= total_G)
    if len(promptless):
        sequence = promptless[0]
        raise LayoutError(
            f"sequence {sequence} has {total_G[sequence]} tokens of which {response_G[sequence]} "
            "are the response: a response follows at least one prompt token, whose logit "
            "predicts its first"
        )


def check_cp(cp_size: int, cp_rank: int) -> None:
    """Refuse a context-parallel rank that is out of range."""
    if type(cp_size) is int and type(cp_rank) is int and 0 <= cp_rank < cp_size:
        return
    if not is_integer(cp_size, lowest=1) or not is_integer(cp_rank, highest=cp_size - 1):
        raise LayoutError(f"got CP rank {cp_rank} of {cp_size}, expected 0 to cp_size - 1")


def check_lengths(name: str, length_G: Ints) -> None:
    """Refuse negative lengths."""
    if len(length_G) and length_G.min() < 0:
        raise LayoutError(
            f"{name} gives segment {length_G.argmin()} a length of {length_G.min()}: "
            "lengths are not negative and offsets never fall"
        )


Split = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The tokens of one microbatch that one context-parallel rank holds.

    Build it with one of the named constructors. Lengths are read on the CPU: a CUDA
    ``cu_seqlens`` costs one host sync.

    Examples:
        Two packed sequences of 8 and 4 tokens, of which the first of two context-parallel ranks
        holds the first and the last quarter each:

        >>> layout = Layout.thd_zigzag([0, 8, 12], cp_size=2, cp_rank=0)
        >>> layout.positions.tolist()
        [0, 1, 6, 7, 8, 11]
        >>> layout.place(5)  # its token 5: in which sequence, and where in it
        (1, 3)
    """

    name: str
    offset_G1: Ints
    """Segment i is at ``offset_G1[i]:offset_G1[i + 1]`` of the mask."""
    start_R: Ints
    """First mask position of a run."""
    length_R: Ints
    """Number of tokens of a run."""
    segment_R: Ints
    """Segment that a run belongs to."""
    cp_size: int
    cp_rank: int
    is_local: bool = False
    """Whether the mask is already this rank's, not the whole one."""
    is_gathered: bool = False
    """Whether losses are of the whole mask, as every context-parallel rank gathered them."""
    allows_tail: bool = False
    """Whether positions may follow the last segment, which weigh 0."""
    batch_shape: tuple[int, int] | None = None
    """``[b, s]`` of the whole mask if sequences are not packed."""
    is_whole: bool = False
    """Whether the segments of the mask are whole sequences, not responses or slices."""
    split: Split | None = None
    """What the model's ``cp_partition_mode`` must be; None if any is right."""

    num_segments: int = field(init=False, repr=False)
    """Number of segments, padding sequences included."""
    num_tokens: int = field(init=False, repr=False)
    """Number of mask positions that the segments cover."""
    num_local_tokens: int = field(init=False, repr=False)
    """Number of tokens this rank holds."""
    holds_whole_mask: bool = field(init=False, repr=False)
    """Whether all positions of the mask are this rank's."""

    def __post_init__(self) -> None:
        offset_G1 = self.offset_G1
        for array in (offset_G1, self.start_R, self.length_R, self.segment_R):
            array.setflags(write=False)  # all holders share it
        num_tokens, holds_whole = int(offset_G1[-1]), self.cp_size == 1 or self.is_local
        self.__dict__.update(
            num_segments=len(offset_G1) - 1,
            num_tokens=num_tokens,
            num_local_tokens=num_tokens if holds_whole else int(np.add.reduce(self.length_R)),
            holds_whole_mask=holds_whole,
        )

    @property
    def local_lengths(self) -> Ints:
        """Number of tokens of each segment that this rank holds: int64 ``[num_segments]``."""
        length_G = np.bincount(self.segment_R, self.length_R, minlength=self.num_segments)
        return length_G.astype(np.int64)

    @cached_property
    def interval(self) -> slice | None:
        """This rank's tokens as one slice of the mask; None if they are not one interval."""
        if self.holds_whole_mask:
            return slice(0, self.num_tokens)
        shift_R = self._shift_R
        if len(shift_R) and (shift_R != shift_R[0]).any():
            return None
        first = int(shift_R[0]) if len(shift_R) else 0
        return slice(first, first + self.num_local_tokens)

    @property
    def positions(self) -> torch.Tensor:
        """Mask positions of this rank's tokens, in order: int64 ``[num_local_tokens]``, CPU.

        ``tokens[layout.positions]`` slices anything that is packed like the mask.
        """
        return torch.from_numpy(self.indices(np.int64))

    def indices(self, dtype: type[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        """Return :attr:`positions` as an array of a dtype that holds them."""
        index_T = np.repeat(self._shift_R.astype(dtype), self.length_R)
        index_T += np.arange(self.num_local_tokens, dtype=dtype)
        return index_T

    def is_in_rows(self, shape: Sequence[int], *, is_local: bool) -> bool:
        """Whether a tensor can hold the tokens in their order, but for dimensions of 1.

        Unpacked sequences: it is ``[b, s]``, and ``[b, s / CP]`` of what this rank holds. Packed
        sequences: it has two dimensions, and each of its rows begins with a segment.
        """
        if len(shape) < 2:
            return True
        sizes = [size for size in shape if size != 1]
        if len(sizes) < 2 or 0 in sizes:
            return True
        if self.batch_shape is not None:
            b, s = self.batch_shape
            return list(sizes) == [n for n in (b, s // self.cp_size if is_local else s) if n != 1]
        offset_G1 = _offsets(self.local_lengths) if is_local else self.offset_G1
        starts = np.arange(0, offset_G1[-1], sizes[-1])
        return len(sizes) == 2 and bool(np.isin(starts, offset_G1).all())

    @cached_property
    def _shift_R(self) -> Ints:
        """Offset between a run's mask positions and its indices among this rank's tokens."""
        shift_R: Ints = self.start_R - (np.cumsum(self.length_R) - self.length_R)
        return shift_R

    def place(self, index: int) -> tuple[int, int]:
        """Find this rank's token ``index``: its segment, and its position in that segment.

        Positions count from the segment's start in the mask, padding included; with ``local``
        that is this rank's part of a sequence, with ``response_zigzag`` its response.
        """
        end_R = np.cumsum(self.length_R)
        run = int(np.searchsorted(end_R, index, side="right"))
        segment = int(self.segment_R[run])
        position = self.start_R[run] + index - (end_R[run] - self.length_R[run])
        return segment, int(position - self.offset_G1[segment])

    def gathered(self, *, sums_gradients: bool = False) -> Layout:
        """Return the same split of per-token losses that every context-parallel rank has gathered.

        Losses are of the whole mask then. A rank weighs those whose logits are its own, and the
        gradient is right whether the gather's backward pass sums over ranks or keeps a rank's own
        slice. ``sums_gradients``: it is known to sum, so any split is right, not only the model's.
        Source: Megatron-LM (d98e8a64) ``megatron.rl.rl_utils.get_logprobs``. Raises
        :class:`LayoutError` if the mask is this rank's part only.
        """
        if self.is_local:
            raise LayoutError(
                f"got gathered losses with the layout {self.name}, whose mask is this rank's part: "
                "begin with the split of the whole mask, such as Layout.thd_zigzag(...).gathered()"
            )
        split = None if sums_gradients else self.split
        return replace(self, name=f"{self.name}_gathered", is_gathered=True, split=split)

    @staticmethod
    def thd_zigzag(cu_seqlens_padded: IntsLike, *, cp_size: int, cp_rank: int) -> Layout:
        """Lay out packed sequences, sliced as Megatron-Core and Transformer Engine slice them.

        Source: Transformer Engine ``thd_get_partitioned_indices``.

        Args:
            cu_seqlens_padded: Offsets of the *padded* segments, from 0, shape ``(n,)`` or
                ``(1, n)``. Mask and tokens are packed over these offsets before slicing.
            cp_size: CP.
            cp_rank: This rank's place among them.

        Returns:
            The layout; positions after the last segment weigh 0. At CP > 1 give them a segment of
            their own, whose sequence is -1: losses of a tail without one are refused.

        Raises:
            LayoutError: For a segment that is not a multiple of 2 CP, and for what are no offsets.
        """
        offset_G1, length_G = checked_offsets(cu_seqlens_padded)
        check_cp(cp_size, cp_rank)
        starts, lengths = [offset_G1[:-1]], [length_G]
        if cp_size > 1:
            unpadded = np.flatnonzero(length_G % (2 * cp_size))
            if len(unpadded):
                raise LayoutError(
                    f"segment {unpadded[0]} has {length_G[unpadded[0]]} tokens, not a multiple of "
                    f"2 CP = {2 * cp_size}: pad every sequence and pass cu_seqlens_padded"
                )
            chunk_G = length_G // (2 * cp_size)
            first, last = _chunks(cp_size, cp_rank)
            starts = [offset_G1[:-1] + first * chunk_G, offset_G1[:-1] + last * chunk_G]
            lengths = [chunk_G, chunk_G]
        runs = starts, lengths, cp_size, cp_rank
        return _of_runs(
            "thd_zigzag", offset_G1, *runs, allows_tail=True, is_whole=True, split="zigzag"
        )

    @staticmethod
    def bshd_zigzag(batch_size: int, seq_length: int, *, cp_size: int, cp_rank: int) -> Layout:
        """Lay out one sequence per batch entry: mask ``[b, s]``, per-token losses ``[b, s / CP]``.

        Raises :class:`LayoutError` for an ``s`` that is not a multiple of 2 CP, and for a CP rank
        out of range. Source: Megatron-Core ``get_batch_on_this_cp_rank``.
        """
        offset_G1 = batch_offsets(batch_size, seq_length)
        layout = Layout.thd_zigzag(offset_G1, cp_size=cp_size, cp_rank=cp_rank)
        return replace(
            layout, name="bshd_zigzag", allows_tail=False, batch_shape=(batch_size, seq_length)
        )

    @staticmethod
    def thd_contiguous(cu_seqlens_padded: IntsLike, *, cp_size: int, cp_rank: int) -> Layout:
        """Lay out packed sequences whose buffer is split into one interval for each CP rank.

        ``cu_seqlens_padded``: offsets of the padded segments, from 0 to the end of the buffer,
        shape ``(n,)`` or ``(1, n)``; what pads the buffer is a segment of its own. A rank may hold
        part of a sequence, all of it, or nothing. Raises :class:`LayoutError` for a buffer whose
        size is not a multiple of CP, and for offsets that do not start at 0 or decrease.
        Source: Megatron-Core (dev d48bd6be0a) ``get_cp_slice_for_thd`` with
        ``cp_partition_mode="contiguous"``.
        """
        offset_G1, _ = checked_offsets(cu_seqlens_padded)
        check_cp(cp_size, cp_rank)
        size = int(offset_G1[-1]) // cp_size
        if size * cp_size != offset_G1[-1]:
            raise LayoutError(
                f"cu_seqlens end at {offset_G1[-1]}, not a multiple of CP = {cp_size}: pad the "
                "buffer, end cu_seqlens at its end, and pass -1 as the sequence of that segment"
            )
        held_G1 = np.clip(offset_G1, cp_rank * size, (cp_rank + 1) * size)
        runs = [held_G1[:-1]], [np.diff(held_G1)], cp_size, cp_rank
        return _of_runs("thd_contiguous", offset_G1, *runs, is_whole=True, split="contiguous")

    @staticmethod
    def bshd_contiguous(batch_size: int, seq_length: int, *, cp_size: int, cp_rank: int) -> Layout:
        """Lay out one sequence per batch entry, each split into one interval for each CP rank.

        Mask ``[b, s]``, per-token losses ``[b, s / CP]``. Raises :class:`LayoutError` for an ``s``
        that is not a multiple of CP.
        """
        offset_G1 = batch_offsets(batch_size, seq_length)
        check_cp(cp_size, cp_rank)
        size = seq_length // cp_size
        if size * cp_size != seq_length:
            raise LayoutError(
                f"sequences of {seq_length} tokens are not a multiple of CP = {cp_size}: pad them"
            )
        start_G = offset_G1[:-1] + cp_rank * size
        runs = [start_G], [np.full_like(start_G, size)], cp_size, cp_rank
        shape = (batch_size, seq_length)
        return _of_runs(
            "bshd_contiguous",
            offset_G1,
            *runs,
            batch_shape=shape,
            is_whole=True,
            split="contiguous",
        )

    @staticmethod
    def response_zigzag(
        total_lengths: IntsLike, response_lengths: IntsLike, *, cp_size: int, cp_rank: int
    ) -> Layout:
        """Lay out response tokens only, as slime and miles do: mask = all responses end to end.

        Response token j of a sequence of ``total`` tokens sits on logit ``total - response -
        1 + j``, and the logit decides the rank: chunk = ceil(total / 2 CP). Source: slime
        ``get_logits_and_tokens_offset_with_cp``. Raises :class:`LayoutError` for lengths of
        different numbers, and a response that is longer than its sequence.
        """
        total_G = checked_integers("total_lengths", total_lengths, LayoutError, squeeze=True)
        response_G = checked_integers(
            "response_lengths", response_lengths, LayoutError, squeeze=True
        )
        check_cp(cp_size, cp_rank)
        check_responses(total_G, response_G)
        offset_G1 = _offsets(response_G)
        chunk_G = -(-total_G // (2 * cp_size))
        first_logit_G = total_G - response_G - 1
        starts, lengths = [], []
        for k in _chunks(cp_size, cp_rank):
            # Logits of chunk k that predict a response token: [k c, (k+1) c) clipped to the
            # response.
            lo_G = np.clip(k * chunk_G, first_logit_G, total_G - 1)
            hi_G = np.clip((k + 1) * chunk_G, first_logit_G, total_G - 1)
            starts.append(offset_G1[:-1] + lo_G - first_logit_G)
            lengths.append(hi_G - lo_G)
        return _of_runs(
            "response_zigzag", offset_G1, starts, lengths, cp_size, cp_rank, split="zigzag"
        )

    @staticmethod
    def local(sequence_lengths_here: IntsLike, *, cp_size: int, cp_rank: int) -> Layout:
        """Take mask and losses as already this rank's, as from Megatron-LM's ``get_batch``.

        Args:
            sequence_lengths_here: Tokens of each sequence on this rank.
            cp_size: CP.
            cp_rank: This rank's place among them.

        Returns:
            The layout, whose mask is the rank's own.

        Raises:
            LayoutError: For a negative length.
        """
        length_G = checked_integers(
            "sequence_lengths_here", sequence_lengths_here, LayoutError, squeeze=True
        )
        check_cp(cp_size, cp_rank)
        check_lengths("sequence_lengths_here", length_G)
        offset_G1 = _offsets(length_G)
        runs = [offset_G1[:-1]], [length_G]
        return _of_runs("local", offset_G1, *runs, cp_size, cp_rank, is_local=True)


def _chunks(cp_size: int, cp_rank: int) -> tuple[int, int]:
    """Which two of a sequence's 2 CP chunks a rank holds, in order."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def _of_runs(
    name: str,
    offset_G1: Ints,
    starts: list[Ints],
    lengths: list[Ints],
    cp_size: int,
    cp_rank: int,
    **kind: Any,
) -> Layout:
    """Lay out segments of equally many runs: of each run the starts and lengths, ``[G]``.

    ``kind``: the layout's other fields.
    """
    num_runs, segment_G = len(starts), np.arange(len(offset_G1) - 1)
    return Layout(
        name=name,
        offset_G1=offset_G1,
        start_R=starts[0] if num_runs == 1 else np.stack(starts, axis=1).ravel(),
        length_R=lengths[0] if num_runs == 1 else np.stack(lengths, axis=1).ravel(),
        segment_R=segment_G if num_runs == 1 else np.repeat(segment_G, num_runs),
        cp_size=cp_size,
        cp_rank=cp_rank,
        **kind,
    )


def _offsets(length_G: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length_G)])


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
