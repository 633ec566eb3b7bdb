"""Data and loss that Megatron-LM's scripts and Megatron-Bridge share: a masked sum of losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._segment_counts import count_segments, to_numpy, with_weights
from megatron_lossagg.loop.framework import FrameworkLoss, Integration
from megatron_lossagg.reduction.sequences import Sequences

_PACKED_AT = (
    ("cu_seqlens_q_padded", "cu_seqlens_q"),
    ("cu_seqlens_q", ""),
    ("cu_seqlens_padded", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_unpadded"),
)
"""Names of the offsets of packed sequences in Megatron-LM's and Megatron-Bridge's data, each with
the name of the offsets without padding. The first one that the data has is used."""

_OTHER_OFFSETS = ("seq_len_q", "packed_seq_params")
"""Names under which other data say how it is packed."""


class MaskedSumIntegration(Integration):
    """A dict with ``loss_mask``, and a loss that is a masked sum of per-token losses.

    A sequence is a packed conversation if the data has offsets of packed sequences, otherwise an
    entry of the batch. The mask of the loss is the first argument of a ``functools.partial``. Each
    training microbatch is compared with the masked sum, so that a loss with more terms is refused
    and not dropped. A ``loss_func`` or a model whose output is a tuple is refused.

    Under ``count="weights"`` the data's ``loss_mask`` is each token's weight, and a token with one
    above 0 is active. Otherwise a fraction in it is refused.
    """

    gives_token_weights = True

    _num_entries: frozenset[int] = frozenset()
    """How many entries the batches that were counted had; losses of packed ones may be flat."""

    def sequences(self, data: Any) -> Sequences:
        """Count the mask of each sequence; ``data`` is the dict of Megatron-LM's data sets."""
        mask = mask_of(data)
        self._num_entries |= {len(mask), *([1] if is_packed(data) else [])}
        if is_packed(data):
            counted = packed_sequences(data, mask)
        else:
            start_G = np.arange(len(mask)) * mask.shape[1]
            counted = count_segments(start_G, np.zeros(len(mask)), mask.ravel())
        return with_weights(counted, mask.ravel()) if self.weighs_tokens else counted

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Take the mask out of ``partial(loss_func, loss_mask, ...)``; the output is the losses."""
        mask = next(iter(getattr(loss_func, "args", ())), None)
        if not isinstance(output, Tensor):
            found = f"a {type(output).__name__}"
            raise _unknown(found, "forward_step", "one tensor of per-token losses")
        if not isinstance(mask, Tensor) or mask.numel() != output.numel():
            expected = "functools.partial(loss_func, loss_mask, ...) with one mask value per loss"
            raise _unknown(repr(loss_func), "forward_step", expected)
        self._check_entries(output)
        returned = loss_func(output)
        theirs = returned[0] if isinstance(returned, tuple) and len(returned) > 1 else None
        if (
            not isinstance(theirs, Tensor)
            or theirs.numel() != 1
            or not isinstance(returned[-1], Mapping)
        ):
            expected = "a tuple of the masked sum, counts and a report"
            raise _unknown(repr(returned), "loss_func", expected)
        return FrameworkLoss(
            losses=output.reshape(-1),
            mask=(mask.reshape(-1) != 0) if self.weighs_tokens else mask.reshape(-1),
            token_weights=mask.reshape(-1) if self.weighs_tokens else None,
            returned=returned,
            masked_sum=theirs.reshape(()),
        )

    def iteration(self) -> int | None:
        """Number the step as Megatron-LM's log does: ``curr_iteration`` counts finished steps."""
        from megatron.training import get_args

        finished = getattr(get_args(), "curr_iteration", None)
        return None if finished is None else finished + 1

    def _check_entries(self, output: Tensor) -> None:
        """Refuse losses of other entries than were counted, as of a batch that was transposed."""
        rows = output.shape[0] if output.dim() == 2 else None
        if self._num_entries and rows is not None and rows not in self._num_entries:
            found = f"losses of shape {list(output.shape)}"
            counted = " or ".join(map(str, sorted(self._num_entries)))
            expected = f"[b, s] with {counted} entries, as the loss_mask of the data has"
            raise _unknown(found, "the model", expected)


def mask_of(data: Any) -> npt.NDArray[Any]:
    """Return ``loss_mask`` ``[b, s]`` on the CPU; raises for data without one."""
    if not isinstance(data, Mapping) or data.get("loss_mask") is None:
        found = type(data).__name__
        raise _unknown(found, "the data iterator", "Megatron-LM's dict with loss_mask")
    for name in _OTHER_OFFSETS:
        if data.get(name) is not None and not is_packed(data):
            raise _unknown(name, "the data iterator", f"the offsets {_PACKED_AT[-1][0]}")
    mask = to_numpy(data["loss_mask"])
    if mask.ndim not in (1, 2):  # a packing scheduler's has no batch
        found = f"a loss_mask of shape {list(mask.shape)}"
        raise _unknown(found, "the data iterator", "[b, s], one row for each entry of the batch")
    return np.atleast_2d(mask)


def is_packed(data: Mapping[str, Any]) -> bool:
    """Whether the data has offsets of packed sequences."""
    return any(data.get(name) is not None for name, _ in _PACKED_AT)


def packed_sequences(data: Any, mask_BP: npt.NDArray[Any]) -> Sequences:
    """Count the sequences of a microbatch from its offsets, each entry's from its own.

    Not counted as sequences: empty segments (Megatron-LM pads offsets with them from 0.19 on), -1
    (Megatron-Bridge's padding of offsets), positions past an entry's last sequence, and segments
    that hold nothing but padding, by the offsets without padding or by ``padding_mask``.
    """
    b, s = mask_BP.shape
    name, unpadded = next(pair for pair in _PACKED_AT if data.get(pair[0]) is not None)
    given_BG = to_numpy(data[name]).reshape(b, -1).astype(np.int64)
    offset_BG = np.maximum.accumulate(given_BG, axis=1)  # -1 becomes the end of the last sequence
    if (offset_BG[:, 0] != 0).any() or ((given_BG >= 0) & (given_BG != offset_BG)).any():
        raise ValueError(f"got {name} {given_BG.tolist()}, expected offsets from 0 that never fall")
    end_BG = np.append(offset_BG[:, 1:], np.full((b, 1), s), axis=1)
    is_padding_BG = np.zeros_like(offset_BG, dtype=bool)
    is_padding_BG[:, -1] = True  # what follows the last sequence
    if data.get(unpadded) is not None:
        logical_BG = np.maximum.accumulate(to_numpy(data[unpadded]).reshape(b, -1), axis=1)
        is_padding_BG[:, :-1] |= np.diff(logical_BG) == 0
    if data.get("padding_mask") is not None:
        is_padding_BP = to_numpy(data["padding_mask"]).reshape(b, s) != 0
        total_BP1 = np.pad(np.cumsum(is_padding_BP, axis=1), ((0, 0), (1, 0)))
        padding_BG = np.take_along_axis(total_BP1, end_BG, 1)
        padding_BG -= np.take_along_axis(total_BP1, offset_BG, 1)
        is_padding_BG |= padding_BG == end_BG - offset_BG
    is_segment_BG = end_BG > offset_BG
    start_BG = offset_BG + s * np.arange(b)[:, None]
    return count_segments(start_BG[is_segment_BG], is_padding_BG[is_segment_BG], mask_BP.ravel())


def _unknown(found: str, source: str, expected: str) -> ContractError:
    return ContractError(
        f"got {found} from {source}, expected {expected}, as in pretrain_gpt.py: the data or the "
        "loss of this script is not known here; train it without the flags of --loss-aggregation"
    )
