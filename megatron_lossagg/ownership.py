"""Which context-parallel rank trained which tokens, if the framework slices the mask itself.

With the layout ``local`` each rank brings the mask of its own slice, so no rank sees a whole
sequence.
Once per step the ranks of the context-parallel group gather how many tokens each has trained of
each sequence, and how many it counted. Together they must train each sequence's count: more is an
error,
fewer is one unless tokens are rejected on purpose.

Ranks may disagree on everything, the number of sequences included. So what is gathered has one
size:
sequence s is added to slot s modulo ``_SLOTS``.

Shape suffixes: S = sequences of this data-parallel rank in the step; F = slots; W = ranks of the
context-parallel group.
"""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.devices import from_numpy
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.faults import Faults
from megatron_lossagg.integers import Ints

__all__ = ["check_ownership"]

_SLOTS = 1024


def check_ownership(
    exchange: Exchange,
    faults: Faults,
    trained_S: Tensor,
    counted_S: Ints,
    *,
    settings: str,
    rejects_tokens: bool,
    has_failed: bool,
) -> None:
    """Leave in ``faults`` what the ranks trained other than was counted.

    ``exchange``: over the context-parallel group, every rank of which calls. ``trained_S``: this
    rank's trained tokens, int64 ``[S]``. ``counted_S``: n_s, int64 ``[S]``. ``settings``: what
    must be the same on every rank. ``has_failed``: whether this rank ends the step with an error
    anyway, which the others then raise too. One all-gather, no host sync.
    """
    device = trained_S.device
    slot_S = np.arange(len(counted_S)) % _SLOTS
    counted_F = np.bincount(slot_S, counted_S, minlength=_SLOTS).astype(np.int64)
    hashed = int.from_bytes(hashlib.sha256(settings.encode()).digest()[:8], "big") >> 1
    head = np.array([has_failed, hashed, len(counted_S)])
    trained_F = torch.zeros(_SLOTS, dtype=torch.int64, device=device)
    trained_F.index_add_(0, from_numpy(slot_S, device), trained_S)
    own = torch.cat([from_numpy(head, device), from_numpy(counted_F, device), trained_F])
    gathered = exchange.tensors(own)
    own = gathered[exchange.rank]
    failed_W, differs_W1 = gathered[:, 0], (gathered[:, 1:3] != own[1:3]).any(dim=1)
    counted_WF, trained_WF = gathered[:, 3 : 3 + _SLOTS], gathered[:, 3 + _SLOTS :]
    miscounts_F = (counted_WF != counted_WF[exchange.rank]).any(dim=0)
    missing_F = counted_WF[exchange.rank] - trained_WF.sum(dim=0)
    faults.record(
        [
            *failed_W.max(dim=0),
            *differs_W1.int().max(dim=0),
            *miscounts_F.int().max(dim=0),
            *missing_F.min(dim=0),
            *missing_F.max(dim=0),
        ],
        partial(_describe, exchange.rank, counted_S, rejects_tokens),
    )


def _describe(own_rank: int, counted_S: Ints, rejects_tokens: bool, values: list[float]) -> str:
    failed, failed_rank, differs, other, miscounts, slot, least, over, most, under = map(
        int, values
    )
    if failed and failed_rank != own_rank:
        return f"context-parallel rank {failed_rank} ended the step with an error"
    if differs:
        return (
            f"context-parallel ranks {own_rank} and {other} planned different steps (mode, options "
            "or number of sequences): start all ranks with the same flags and plan the "
            "same sequences on "
            "every rank of a context-parallel group"
        )
    if miscounts:
        return (
            f"the context-parallel ranks counted different tokens of "
            f"{_sequence(slot, counted_S)}, this "
            f"one {_counted(slot, counted_S)}: count the whole sequences, before they are sliced"
        )
    if least < 0:
        also = f", and {most} fewer of {_sequence(under, counted_S)}" if most > 0 else ""
        return (
            f"the context-parallel ranks train {-least} tokens more of "
            f"{_sequence(over, counted_S)} "
            f"than the {_counted(over, counted_S)} that were counted{also}: each token belongs to "
            "one rank; pass the lengths of the slices that this rank holds to Layout.local"
        )
    if most > 0 and not rejects_tokens:
        return (
            f"the context-parallel ranks train {most} tokens fewer of "
            f"{_sequence(under, counted_S)} "
            f"than the {_counted(under, counted_S)} that were counted: check mask, sequences and "
            "slices; if tokens are rejected on purpose, declare it with "
            "--loss-aggregation-rejects-tokens (Options(rejects_tokens=True))"
        )
    return ""


def _sequence(slot: int, counted_S: Ints) -> str:
    sequences = range(slot, len(counted_S), _SLOTS)
    return (
        f"sequence {slot}"
        if len(sequences) == 1
        else f"one of the sequences {', '.join(map(str, sequences))}"
    )


def _counted(slot: int, counted_S: Ints) -> int:
    return int(counted_S[slot::_SLOTS].sum())
