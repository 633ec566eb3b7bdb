"""Checks of lengths, offsets and ranks from which a layout is made.

Shape suffix: G = segments of the microbatch (G1: one more).
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_lossagg.errors import LayoutError
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
