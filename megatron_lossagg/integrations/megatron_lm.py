"""Megatron-LM: an unmodified checkout's scripts with ``--loss-aggregation``.

``train()`` and ``evaluate()`` of ``megatron.training.training`` look up one name,
``get_forward_backward_func``, and call what it returns with keywords. That name is rebound
(:func:`install`). After the schedule Megatron-LM multiplies by nothing more: it logs sum / count of
each reported pair, over microbatches, data-parallel ranks and evaluation steps. Only ``evaluate()``
under ``--sft`` divides each microbatch's pair by itself: what it returns of ours is replaced.
Data and loss, a masked sum of losses, are those of other frameworks on its loop too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.contract.megatron_options import check_options
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import count_segments, rebind, to_numpy, with_weights
from megatron_lossagg.loop.schedule_hook import FrameworkLoss, Integration, Schedule, ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.sequences import Sequences

_PACKED_AT = (
    ("cu_seqlens_q_padded", "cu_seqlens_q"),
    ("cu_seqlens_q", ""),
    ("cu_seqlens_padded", "cu_seqlens"),
    ("cu_seqlens", "cu_seqlens_unpadded"),
)
"""Names of the offsets of packed sequences, each with the name of those without padding. The first
one that the data has is used."""

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

        finished = getattr(get_args(), "curr_iteration", None)  # which train() sets
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
    (others pad offsets with it), positions past an entry's last sequence, and segments
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


class PretrainIntegration(MaskedSumIntegration):
    """``pretrain_gpt.py``, packed or not, and scripts that share its data and its loss.

    A packing scheduler's microbatches (``dp_balanced``) are counted as it has packed them; with
    dynamic context parallelism, the parts that this rank holds of them.
    """

    @property
    def counts_parts(self) -> bool:
        """True, unless a subclass counts sequences itself and does not say so again."""
        return self._counts_as_given

    @property
    def _counts_as_given(self) -> bool:
        return type(self).sequences is PretrainIntegration.sequences

    def prepare(self, aggregations: Sequence[Aggregation]) -> None:
        """Note what ``loss_mask`` means."""
        super().prepare(aggregations)
        self._packs = itertools.count()

    def applies(self, call: Mapping[str, Any]) -> bool:
        """Refuse, on every rank and before each step, padding that differs from rank to rank."""
        model = call["model"]
        config = (model[0] if isinstance(model, (list, tuple)) else model).config
        if self._counts_as_given and getattr(config, "dynamic_context_parallel", False):
            from megatron.training import get_args

            alignment = getattr(get_args(), "pad_packed_seq_alignment", None)
            if alignment is not None:
                raise ContractError(
                    "got --dynamic-context-parallel with --pad-packed-seq-alignment "
                    f"{alignment}, expected one of the two: the padding of packs would differ from "
                    "rank to rank; drop one, or use a fixed --context-parallel-size"
                )
        return super().applies(call)

    def sequences(self, data: Any) -> Sequences:
        """Count the mask of each sequence; ``data`` is the dict of Megatron-LM's data sets."""
        if isinstance(data, Mapping) and data.get("local_cp_size") is not None:
            return self._parts(data)
        counted = super().sequences(data)
        return _with_tail(counted) if is_packed(data) else counted

    def _parts(self, data: Mapping[str, Any]) -> Sequences:
        """Count this rank's parts of the sequences of a pack, with dynamic context parallelism.

        The parts that the ranks of the microbatch's group hold of a sequence are one sample. Ranks
        count packs in step, so that a pack's group and number name it.
        """
        from megatron.core import parallel_state
        from megatron.training import get_args

        args = get_args()
        mask = mask_of(data)
        found = packed_sequences(data, mask)
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


def install(
    aggregation: Aggregation | str | None,
    *,
    options: Options | None = None,
    integration: Integration | None = None,
) -> ScheduleHook:
    """Rebind Megatron-LM's schedule in this process; return the hook, which counts its steps.

    Call it before ``pretrain``, with ``megatron.training`` on the path. The arguments are those of
    :class:`~megatron_lossagg.loop.schedule_hook.ScheduleHook`, ``integration`` by default
    :class:`PretrainIntegration`. Raises :class:`ContractError` if ``megatron.training.training``
    has no such name.
    """
    integration = integration or PretrainIntegration()
    hook = _Hook(aggregation, integration, options=options)
    rebind(hook, ["megatron.training.training"], "Megatron-LM (core_v0.16.1 and later)")
    from megatron.training import training

    training.evaluate = hook.wrap_evaluation(training.evaluate)
    return hook


class _Hook(ScheduleHook):
    """Adds up what is reported in an evaluation: under ``--sft`` its mean is no loss of a mode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums: dict[str, Tensor] = {}
        """Both entries of each report of the running evaluation, on this rank."""

    def wrap(self, schedule: Schedule) -> Schedule:
        """Wrap the schedule."""
        hooked = super().wrap(schedule)

        @functools.wraps(hooked)
        def run(*args: Any, **call: Any) -> Any:
            reports = hooked(*args, **call)
            if call.get("forward_only") and not call.get("collect_non_loss_data"):
                for report, name in itertools.product(reports, self.reported):
                    if name in report and not name.startswith("stock/"):
                        self._sums[name] = self._sums.get(name, 0) + report[name].double()
            return reports

        return run

    def wrap_evaluation(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``evaluate``; under ``--sft`` one all-reduce more, over DP CP ranks."""

        @functools.wraps(evaluate)
        def run(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            self._sums = {}
            returned = evaluate(*args, **kwargs)
            losses = returned[0]  # none on an earlier pipeline stage, and after the time limit
            if losses and self._sums and self.aggregator and getattr(get_args(), "sft", False):
                pairs = torch.stack([*self._sums.values()])
                dist.all_reduce(pairs, group=self.aggregator.groups.dp_cp_group)
                found = (pairs[:, 0] / pairs[:, 1]).float()
                losses.update(zip(self._sums, found.unbind(), strict=True))
            return returned

        return run


def _with_tail(found: Sequences) -> Sequences:
    """Add the tail of ``pad_packed_seq_alignment``: each rank's part is padded to a length.

    The tail's mask is 0. It is a sequence of its own, or (``extend_last``) a part of the last one.
    Source: Megatron-LM (dev d48bd6be0a) ``get_batch_on_this_rank_for_sequence_packing`` and
    ``pad_sequence_for_thd``. Refuses what only the script's arguments say about how packed
    sequences are split.
    """
    from megatron.training import get_args

    args = get_args()
    check_options("script arguments", args, cp_size=args.context_parallel_size)
    if getattr(args, "pad_packed_seq_alignment", None) is None:
        return found
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
    of_tail = {"lengths": tail, "is_padding": 1}  # and 0 active tokens
    tailed: Sequences = found.with_entries(
        {name: np.append(values, of_tail.get(name, 0)) for name, values in found.entries().items()}
    )
    return tailed
