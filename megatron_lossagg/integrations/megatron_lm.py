"""Megatron-LM: an unmodified checkout's scripts with ``--loss-aggregation``.

``train()`` and ``evaluate()`` of ``megatron.training.training`` look up one name,
``get_forward_backward_func``, and call what it returns with keywords. That name is rebound
(:func:`install`); nothing else changes. After the schedule Megatron-LM multiplies by nothing
more: it logs sum / count of each reported pair, over microbatches and data-parallel ranks.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.buffer import MicrobatchSequences
from megatron_lossagg.errors import ContractError
from megatron_lossagg.layout import Layout
from megatron_lossagg.megatron_options import check_options
from megatron_lossagg.options import Options
from megatron_lossagg.schedule import FrameworkLoss, Integration, ScheduleHook

__all__ = [
    "PretrainIntegration",
    "count_segments",
    "install",
    "rebind",
    "report_if_unused",
    "to_numpy",
    "with_weights",
]

_HOOK = "get_forward_backward_func"
_PACKED_AT = (
    ("cu_seqlens_q_padded", "cu_seqlens_q"),
    ("cu_seqlens_q", ""),
    ("cu_seqlens_padded", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_unpadded"),
)
"""Offsets of packed sequences in Megatron-LM's and Megatron-Bridge's data, with those without
padding beside them; the first that is given."""


class PretrainIntegration(Integration):
    """``pretrain_gpt.py``, packed or not, and scripts that share its data and its loss.

    A sequence is a packed conversation where the data has ``cu_seqlens``, else an entry of the
    batch. A packing scheduler's microbatches (``dp_balanced``) are counted as it has packed them.
    The loss is a masked sum of per-token losses whose mask is the first argument of a
    ``functools.partial``; each training microbatch is compared with that, so that a loss with more
    terms is refused and not dropped. A ``loss_func`` or a model whose output is a tuple is refused.

    Under ``count="weights"`` the data's ``loss_mask`` is each token's weight, and a token with one
    above 0 is active. Otherwise a fraction in it is refused.
    """

    gives_token_weights = True
    counts_parts = True
    weighs_tokens = False
    """Whether the aggregation counts token weights."""

    def prepare(self, aggregations: Sequence[Aggregation]) -> None:
        """Note what ``loss_mask`` means, and whether microbatches have weights of their own."""
        self._packs = itertools.count()
        self.weighs_tokens = any(one.count == "weights" for one in aggregations)
        self._per_microbatch = any(one.mode == "microbatch_token_mean" for one in aggregations)

    def sequences(self, data: Any) -> MicrobatchSequences:
        """Count the mask of each sequence; ``data`` is the dict of Megatron-LM's data sets."""
        if not isinstance(data, Mapping) or data.get("loss_mask") is None:
            found = type(data).__name__
            raise _unknown(found, "the data iterator", "Megatron-LM's dict with loss_mask")
        mask = np.atleast_2d(to_numpy(data["loss_mask"]))  # a packing scheduler's has no batch
        if data.get("local_cp_size") is not None:
            return self._parts(data, mask)
        if all(data.get(name) is None for name, _ in _PACKED_AT):
            start_G = np.arange(len(mask)) * mask.shape[1]
            counted = count_segments(start_G, np.zeros(len(mask)), mask.ravel())
        else:
            counted = self._padded(_packed_sequences(data, mask))
        return with_weights(counted, mask.ravel()) if self.weighs_tokens else counted

    def _padded(self, found: MicrobatchSequences) -> MicrobatchSequences:
        """Add the tail with which Megatron-LM pads a pack after it was read.

        Refuses what only the script's arguments say about how packed sequences are split.
        """
        from megatron.training import get_args

        args = get_args()
        check_options("script arguments", args, cp_size=args.context_parallel_size)
        if getattr(args, "pad_packed_seq_alignment", None) is None:
            return found
        return _with_tail(found, args)

    def _parts(self, data: Any, mask: npt.NDArray[Any]) -> MicrobatchSequences:
        """Count this rank's parts of the sequences of a pack, with dynamic context parallelism.

        The parts that the ranks of the microbatch's group hold of a sequence are one sample. Ranks
        count packs in step, so that a pack's group and number name it.
        """
        from megatron.core import parallel_state
        from megatron.training import get_args

        args = get_args()
        if getattr(args, "pad_packed_seq_alignment", None) is not None or self._per_microbatch:
            raise ContractError(
                "got --dynamic-context-parallel with --pad-packed-seq-alignment or "
                "--loss-aggregation microbatch_token_mean, expected neither: padding and "
                "microbatches differ from rank to rank; drop it, or use a fixed "
                "--context-parallel-size"
            )
        found = _packed_sequences(data, mask)
        cp_size, pack = int(data["local_cp_size"]), next(self._packs)
        check_options("script arguments", args, cp_size=cp_size)
        group = parallel_state.get_dynamic_data_context_parallel_groups(group_size=cp_size)
        is_contiguous = getattr(args, "cp_partition_mode", "zigzag") == "contiguous"
        split = Layout.thd_contiguous if is_contiguous else Layout.thd_zigzag
        offset_G1 = np.cumsum([0, *np.asarray(found.lengths)])
        layout = split(offset_G1, cp_size=cp_size, cp_rank=dist.get_rank(group))
        length_G, mask_T = layout.local_lengths, mask.ravel()[layout.positions.numpy()]
        parts = count_segments(np.cumsum(length_G) - length_G, np.asarray(found.is_padding), mask_T)
        name = (pack * dist.get_world_size() + dist.get_process_group_ranks(group)[0]) << 20
        parts = replace(parts, sample=name + np.arange(len(length_G)))
        return with_weights(parts, mask_T) if self.weighs_tokens else parts

    def iteration(self) -> int | None:
        """Number the step as Megatron-LM's log does: ``curr_iteration`` counts finished steps."""
        from megatron.training import get_args

        finished = getattr(get_args(), "curr_iteration", None)
        return None if finished is None else finished + 1

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Take the mask out of ``partial(loss_func, loss_mask, ...)``; the output is the losses."""
        given = loss_func.args if isinstance(loss_func, functools.partial) else ()
        mask = next(iter(given), None)
        if not isinstance(output, Tensor):
            found = f"a {type(output).__name__}"
            raise _unknown(found, "forward_step", "one tensor of per-token losses")
        if not isinstance(mask, Tensor) or mask.numel() != output.numel():
            expected = "functools.partial(loss_func, loss_mask, ...) with one mask value per loss"
            raise _unknown(repr(loss_func), "forward_step", expected)
        returned = loss_func(output)
        theirs = returned[0] if isinstance(returned, tuple) and len(returned) > 1 else None
        if not (isinstance(theirs, Tensor) and theirs.numel() == 1):
            expected = "a tuple of the masked sum, counts and a report"
            raise _unknown(repr(returned), "loss_func", expected)
        return FrameworkLoss(
            losses=output.reshape(-1),
            mask=(mask.reshape(-1) != 0) if self.weighs_tokens else mask.reshape(-1),
            token_weights=mask.reshape(-1) if self.weighs_tokens else None,
            report=returned[-1],
            masked_sum=theirs.reshape(()),
        )


def _unknown(found: str, source: str, expected: str) -> ContractError:
    return ContractError(
        f"got {found} from {source}, expected {expected}, as in pretrain_gpt.py: the data or the "
        "loss of this script is not known here; train it without the flags of --loss-aggregation"
    )


def install(
    aggregation: Aggregation | None,
    *,
    options: Options | None = None,
    integration: Integration | None = None,
) -> ScheduleHook:
    """Rebind Megatron-LM's schedule in this process; return the hook, which counts its steps.

    ``aggregation``: None trains stock and reports ``options.shadow`` only. Call it before
    ``pretrain``, with ``megatron.training`` on the path. ``integration``: by default
    :class:`PretrainIntegration`. Raises :class:`ContractError` where ``megatron.training.training``
    has no such name, and what :class:`~megatron_lossagg.schedule.ScheduleHook` raises.
    """
    integration = integration or PretrainIntegration()
    hook = ScheduleHook(aggregation, integration, options=options)
    return rebind(hook, ["megatron.training.training"], "Megatron-LM (core_v0.16.1 and later)")


def rebind(hook: ScheduleHook, modules: Sequence[str], framework: str) -> ScheduleHook:
    """Put a hook around the schedule that a framework's modules look up by name; return the hook.

    ``framework``: whose loop it is, for messages. Raises :class:`ContractError` where a module
    cannot be imported or has no such name; then none is changed.
    """
    stocks: dict[str, Any] = {}
    for name in modules:
        try:
            stocks[name] = getattr(importlib.import_module(name), _HOOK, None)
        except ImportError as error:
            raise ContractError(
                f"{name} cannot be imported ({error}), expected the training loop of "
                f"{framework}: put its checkout on PYTHONPATH, or run where it is installed"
            ) from error
        if stocks[name] is None:
            raise ContractError(
                f"{name} has no {_HOOK}, expected the training loop of {framework}: this "
                "loop is not known here; wrap its schedule with LossAggregator.wrap"
            )
    for name, stock in stocks.items():
        setattr(importlib.import_module(name), _HOOK, _hooked(hook, stock))
    atexit.register(report_if_unused, hook, framework)
    return hook


def report_if_unused(hook: ScheduleHook, framework: str) -> None:
    """Print, as the process ends, that no step reached the hook.

    Nothing where an exception ends it: that says why already.
    """
    if hook.num_steps == 0 and not hasattr(sys, "last_value"):
        why = (
            f"the training loop of {framework} had no step left to do"
            if hook.is_found
            else f"the process ended without the training loop of {framework}, or the hook was "
            "installed after it began"
        )
        print(
            f"lossagg: no step reached {hook.flag}: {why}",
            file=sys.stderr,
        )


def _hooked(hook: ScheduleHook, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get(*args: Any, **kwargs: Any) -> Any:
        return hook.wrap(stock(*args, **kwargs))

    return get


def _packed_sequences(data: Any, mask_BP: npt.NDArray[Any]) -> MicrobatchSequences:
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


def _with_tail(found: MicrobatchSequences, args: Any) -> MicrobatchSequences:
    """Add the tail of ``pad_packed_seq_alignment``: each rank's part is padded to a length.

    The tail's mask is 0. It is a sequence of its own, or (``extend_last``) a part of the last one.
    Source: Megatron-LM (dev d48bd6be0a) ``get_batch_on_this_rank_for_sequence_packing`` and
    ``pad_sequence_for_thd``.
    """
    from megatron.core.packed_seq_params import (
        get_thd_padding_kwargs,
        resolve_thd_tail_padding_policy,
    )

    alignment, length_here, _ = get_thd_padding_kwargs(
        args.pad_packed_seq_alignment,
        args.max_seqlen_per_dp_cp_rank,
        args.thd_max_packed_sequences,
        args.cuda_graph_impl != "none",
    )
    cp_size = args.context_parallel_size
    length_G = np.array(found.lengths)
    if length_here is None:
        length_here = -(-int(length_G.sum()) // (cp_size * alignment)) * alignment
    tail = max(cp_size * length_here - int(length_G.sum()), 0)  # a longer pack fails in Megatron-LM
    if resolve_thd_tail_padding_policy(args) == "extend_last":
        length_G[-1] += tail
        return replace(found, lengths=length_G)
    return MicrobatchSequences(
        active_tokens=np.append(np.asarray(found.active_tokens), 0),
        lengths=np.append(length_G, tail),
        is_padding=np.append(np.asarray(found.is_padding), 1),
    )


def count_segments(
    start_G: npt.ArrayLike, is_padding_G: npt.ArrayLike, mask_P: npt.NDArray[Any]
) -> MicrobatchSequences:
    """Count the segments of a flat mask, each up to the next one's start."""
    offset_G1 = np.append(np.asarray(start_G, dtype=np.int64), len(mask_P))
    total_P1 = np.concatenate([[0], np.cumsum(mask_P != 0)])
    return MicrobatchSequences(
        active_tokens=np.diff(total_P1[offset_G1]),
        lengths=np.diff(offset_G1),
        is_padding=np.asarray(is_padding_G, dtype=np.int64),
    )


def with_weights(counted: MicrobatchSequences, weight_P: npt.NDArray[Any]) -> MicrobatchSequences:
    """Add the sum of each segment's token weights, rounded once, so that padding changes no bit."""
    ends = np.cumsum(np.asarray(counted.lengths)).tolist()
    weights = weight_P.astype(np.float64).tolist()
    sums = [math.fsum(weights[begin:end]) for begin, end in pairwise([0, *ends])]
    return replace(counted, token_weight_sums=sums)


def to_numpy(values: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's numbers on the CPU."""
    array: npt.NDArray[Any] = values.detach().cpu().numpy()
    return array
