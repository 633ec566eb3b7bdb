"""Which tokens of a microbatch this context-parallel rank holds, and in which order.

A layout is index arithmetic on integers on the CPU: no tensor, no rank lookup, no collective.
It splits a microbatch's mask into *segments* (one packed sequence each). It lists, as *runs* of
consecutive mask positions, the tokens that this rank's per-token losses belong to. Zigzag: a
sequence padded to a multiple of 2 CP is split into 2 CP chunks; CP rank r holds the chunks r and
2 CP - 1 - r, in that order.

Shape suffixes: R = runs of consecutive positions; S1 = segments + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from megatron_lossagg.errors import LayoutError
from megatron_lossagg.integers import Ints, IntsLike, checked_integers, first_few, is_integer

__all__ = ["Layout"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The tokens of one microbatch that one context-parallel rank holds.

    Build it with one of the four named constructors. Lengths are read on the CPU: a CUDA
    ``cu_seqlens`` costs one host sync.
    """

    name: str
    offset_S1: Ints
    """Segment i is at ``offset_S1[i]:offset_S1[i + 1]`` of the mask."""
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
    allows_tail: bool = False
    """Whether positions may follow the last segment, which weigh 0."""
    batch_shape: tuple[int, int] | None = None
    """``[b, s]`` of the whole mask where sequences are not packed."""

    def __post_init__(self) -> None:
        for array in (self.offset_S1, self.start_R, self.length_R, self.segment_R):
            array.flags.writeable = False  # all holders share it

    @property
    def num_segments(self) -> int:
        """Number of segments, padding sequences included."""
        return len(self.offset_S1) - 1

    @cached_property
    def num_tokens(self) -> int:
        """Number of mask positions that the segments cover."""
        return int(self.offset_S1[-1])

    @cached_property
    def num_local_tokens(self) -> int:
        """Number of tokens this rank holds."""
        return int(self.length_R.sum())

    @cached_property
    def is_in_order(self) -> bool:
        """Whether this rank's tokens are the mask's first positions, in their order."""
        return not self._shift_R.any()

    @property
    def positions(self) -> torch.Tensor:
        """Mask positions of this rank's tokens, in order: int64 ``[num_local_tokens]``, CPU.

        ``tokens[layout.positions]`` slices anything that is packed like the mask.
        """
        position_T = np.repeat(self._shift_R, self.length_R)
        position_T += np.arange(self.num_local_tokens)
        return torch.from_numpy(position_T)

    def is_in_rows(self, sizes: Sequence[int], *, is_local: bool) -> bool:
        """Whether a tensor of several dimensions can hold the tokens in their order.

        ``sizes``: its dimensions but those of 1. Unpacked sequences: they are ``[b, s]``, and
        ``[b, s / CP]`` of what this rank holds. Packed sequences: two, and each row of the tensor
        begins with a segment.
        """
        if self.batch_shape is not None:
            b, s = self.batch_shape
            return list(sizes) == [n for n in (b, s // self.cp_size if is_local else s) if n != 1]
        length_S = np.diff(self.offset_S1)
        if is_local:
            length_S = np.bincount(self.segment_R, self.length_R, minlength=self.num_segments)
        offset_S1 = _offsets(length_S.astype(np.int64))
        starts = np.arange(0, offset_S1[-1], sizes[-1])
        return len(sizes) == 2 and bool(np.isin(starts, offset_S1).all())

    @property
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
        return segment, int(position - self.offset_S1[segment])

    @staticmethod
    def thd_zigzag(cu_seqlens_padded: IntsLike, *, cp_size: int, cp_rank: int) -> Layout:
        """Lay out packed sequences, sliced as Megatron-Core and Transformer Engine slice them.

        ``cu_seqlens_padded``: offsets of the *padded* segments, from 0, shape ``(n,)``
        or ``(1, n)``. Mask and tokens are packed over these offsets before slicing.
        Source: Transformer Engine ``thd_get_partitioned_indices``.
        """
        offset_S1 = checked_integers("cu_seqlens", cu_seqlens_padded, LayoutError, squeeze=True)
        _check_cp(cp_size, cp_rank)
        if len(offset_S1) == 0 or offset_S1[0] != 0:
            raise LayoutError(
                f"got cu_seqlens [{first_few(offset_S1, 4)}], expected offsets from 0, one more "
                "than segments"
            )
        length_S = np.diff(offset_S1)
        _check_lengths("cu_seqlens", length_S)
        unpadded = np.flatnonzero(length_S % (2 * cp_size))
        if cp_size > 1 and len(unpadded):
            raise LayoutError(
                f"segment {unpadded[0]} has {length_S[unpadded[0]]} tokens, not a multiple of "
                f"2 CP = {2 * cp_size}: pad every sequence and pass cu_seqlens_padded"
            )
        chunk_S = length_S // (2 * cp_size)
        layout = _zigzag("thd_zigzag", offset_S1, chunk_S, length_S, cp_size, cp_rank)
        return replace(layout, allows_tail=True)

    @staticmethod
    def bshd_zigzag(batch_size: int, seq_length: int, *, cp_size: int, cp_rank: int) -> Layout:
        """Lay out one sequence per batch entry: mask ``[b, s]``, per-token losses ``[b, s / CP]``.

        Source: Megatron-Core ``get_batch_on_this_cp_rank``.
        """
        for size in (batch_size, seq_length):
            if not is_integer(size):
                raise LayoutError(
                    f"got sizes [{batch_size!r}, {seq_length!r}], expected integers from 0"
                )
        offset_S1 = np.arange(batch_size + 1) * seq_length
        layout = Layout.thd_zigzag(offset_S1, cp_size=cp_size, cp_rank=cp_rank)
        return replace(
            layout, name="bshd_zigzag", allows_tail=False, batch_shape=(batch_size, seq_length)
        )

    @staticmethod
    def response_zigzag(
        total_lengths: IntsLike,
        response_lengths: IntsLike,
        *,
        cp_size: int,
        cp_rank: int,
        max_seq_len: int | None = None,
    ) -> Layout:
        """Lay out response tokens only, as slime and miles do: mask = all responses end to end.

        Response token j of a sequence of ``total`` tokens sits on logit ``total - response -
        1 + j``, and the logit decides the rank: chunk = ceil(total / 2 CP), or
        ceil(max_seq_len / 2 CP) for frameworks that pad the batch (bshd). Source: slime
        ``get_logits_and_tokens_offset_with_cp``.
        """
        total_S = checked_integers("total_lengths", total_lengths, LayoutError, squeeze=True)
        response_S = checked_integers(
            "response_lengths", response_lengths, LayoutError, squeeze=True
        )
        _check_cp(cp_size, cp_rank)
        _check_responses(total_S, response_S, max_seq_len)
        offset_S1 = _offsets(response_S)
        if cp_size == 1:
            return _zigzag("response_zigzag", offset_S1, response_S, response_S, 1, 0)
        padded_S = total_S if max_seq_len is None else np.full_like(total_S, max_seq_len)
        chunk_S = -(-padded_S // (2 * cp_size))
        first_logit_S = total_S - response_S - 1
        start_R, length_R = [], []
        for k in (cp_rank, 2 * cp_size - 1 - cp_rank):
            # Logits of chunk k that predict a response token: [k c, (k+1) c) clipped to the
            # response.
            lo_S = np.clip(k * chunk_S, first_logit_S, total_S - 1)
            hi_S = np.clip((k + 1) * chunk_S, first_logit_S, total_S - 1)
            start_R.append(offset_S1[:-1] + lo_S - first_logit_S)
            length_R.append(hi_S - lo_S)
        return Layout(
            name="response_zigzag",
            offset_S1=offset_S1,
            start_R=np.stack(start_R, axis=1).ravel(),
            length_R=np.stack(length_R, axis=1).ravel(),
            segment_R=np.repeat(np.arange(len(total_S)), 2),
            cp_size=cp_size,
            cp_rank=cp_rank,
        )

    @staticmethod
    def local(sequence_lengths_here: IntsLike, *, cp_size: int, cp_rank: int) -> Layout:
        """Take mask and losses as already this rank's, as from Megatron-LM's ``get_batch``.

        ``sequence_lengths_here``: tokens of each sequence on this rank.
        """
        length_S = checked_integers(
            "sequence_lengths_here", sequence_lengths_here, LayoutError, squeeze=True
        )
        _check_cp(cp_size, cp_rank)
        _check_lengths("sequence_lengths_here", length_S)
        offset_S1 = _offsets(length_S)
        return Layout(
            name="local",
            offset_S1=offset_S1,
            start_R=offset_S1[:-1],
            length_R=length_S,
            segment_R=np.arange(len(length_S)),
            cp_size=cp_size,
            cp_rank=cp_rank,
            is_local=True,
        )


def _zigzag(
    name: str, offset_S1: Ints, chunk_S: Ints, length_S: Ints, cp_size: int, cp_rank: int
) -> Layout:
    segments = np.arange(len(length_S))
    if cp_size == 1:
        start_R, length_R, segment_R = offset_S1[:-1], length_S, segments
    else:
        order = (cp_rank, 2 * cp_size - 1 - cp_rank)
        start_R = np.stack([offset_S1[:-1] + k * chunk_S for k in order], axis=1).ravel()
        length_R, segment_R = np.repeat(chunk_S, 2), np.repeat(segments, 2)
    return Layout(
        name=name,
        offset_S1=offset_S1,
        start_R=start_R,
        length_R=length_R,
        segment_R=segment_R,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


def _check_responses(total_S: Ints, response_S: Ints, max_seq_len: int | None) -> None:
    if max_seq_len is not None and not is_integer(max_seq_len):
        raise LayoutError(f"got max_seq_len {max_seq_len!r}, expected an integer from 0")
    if total_S.shape != response_S.shape:
        raise LayoutError(
            f"got {len(total_S)} total_lengths and {len(response_S)} response_lengths, "
            "expected one of each per sequence"
        )
    _check_lengths("response_lengths", response_S)
    promptless = np.flatnonzero(response_S >= total_S)
    if len(promptless):
        sequence = promptless[0]
        raise LayoutError(
            f"sequence {sequence} has {total_S[sequence]} tokens of which {response_S[sequence]} "
            "are the response: a response follows at least one prompt token, whose logit "
            "predicts its first"
        )
    if max_seq_len is not None and len(total_S) and total_S.max() > max_seq_len:
        raise LayoutError(
            f"sequence {total_S.argmax()} has {total_S.max()} tokens, max_seq_len is "
            f"{max_seq_len}: pass the length the batch is padded to"
        )


def _check_cp(cp_size: int, cp_rank: int) -> None:
    if not is_integer(cp_size, lowest=1) or not is_integer(cp_rank, highest=cp_size - 1):
        raise LayoutError(f"got CP rank {cp_rank} of {cp_size}, expected 0 to cp_size - 1")


def _check_lengths(name: str, length_S: Ints) -> None:
    if len(length_S) and length_S.min() < 0:
        raise LayoutError(
            f"{name} gives segment {length_S.argmin()} a length of {length_S.min()}: "
            "lengths are not negative and offsets never fall"
        )


def _offsets(length_S: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length_S)])
