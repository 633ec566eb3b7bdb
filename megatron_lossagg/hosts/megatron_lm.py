"""Megatron-LM: an unmodified checkout's scripts with ``--loss-aggregation``.

``train()`` and ``evaluate()`` of ``megatron.training.training`` look up one name,
``get_forward_backward_func``, and call what it returns with keywords. That name is rebound
(:func:`install`); nothing else changes. After the schedule Megatron-LM multiplies by nothing
more: it logs sum / count of each reported pair, over microbatches and data-parallel ranks.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.buffer import MicrobatchRows
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integers import Ints
from megatron_lossagg.plan import EmptyStep
from megatron_lossagg.schedule import Adapter, HostLoss, ScheduleHook

__all__ = ["ADAPTERS", "PretrainAdapter", "RLAdapter", "install", "rebind"]

_HOOK = "get_forward_backward_func"
_PACKED_AT = ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens_padded", "cu_seqlens")
"""Offsets of packed rows in Megatron-LM's and Megatron-Bridge's data; the first that is given."""


class PretrainAdapter(Adapter):
    """``pretrain_gpt.py``, packed or not, and scripts that share its data and its loss.

    A row is a packed conversation where the data has ``cu_seqlens``, else an entry of the
    batch. The loss is a masked sum of per-token losses whose mask is the first argument of a
    ``functools.partial``; the first microbatch of a run is compared with that, so that a loss
    with more terms is refused and not dropped.
    """

    def __init__(self) -> None:
        self._is_checked = False

    def rows(self, data: Any) -> MicrobatchRows:
        """Count the mask of each row; ``data`` is the dict of Megatron-LM's data sets."""
        if not isinstance(data, Mapping) or data.get("loss_mask") is None:
            raise ContractError(
                f"got {type(data).__name__} from the data iterator, expected Megatron-LM's dict "
                "with loss_mask: the data of this script is not known here"
            )
        mask = data["loss_mask"].detach().cpu().numpy()
        return _rows_at(_offsets(data, mask.shape), mask.ravel())

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> HostLoss:
        """Take the mask out of ``partial(loss_func, loss_mask, ...)``; the output is the losses."""
        mask = loss_func.args[0] if isinstance(loss_func, functools.partial) else None
        if not isinstance(mask, Tensor) or mask.numel() != output.numel():
            raise ContractError(
                f"got {loss_func!r} from forward_step, expected functools.partial(loss_func, "
                "loss_mask, ...) with one mask value per loss, as in pretrain_gpt.py: this "
                "script's loss is not known here"
            )
        losses, mask = output.reshape(-1).float(), mask.reshape(-1)
        theirs, *_, report = loss_func(output)
        if not self._is_checked:
            _check_is_masked_sum(theirs, losses, mask)
            self._is_checked = True
        return HostLoss(losses=losses, mask=mask, report=report)


class RLAdapter(PretrainAdapter):
    """``train_rl.py`` of core_v0.16: rollouts, one per entry of the batch or packed into bins.

    The per-token losses hold policy, KL and entropy terms together. A mask is shifted by one
    against its tokens, as log-probabilities are. No prompt ids: a rollout's group does not reach
    the microbatch. Context parallelism is refused.
    """

    def rows(self, data: Any) -> MicrobatchRows:
        """Count rollouts: ``data`` is ``prepare_data_for_update``'s tuple, or a bin's index."""
        from megatron.training import get_args

        args = get_args()
        if args.context_parallel_size > 1:
            raise ContractError(
                "train_rl.py with context parallelism gathers log-probabilities over its ranks, "
                "which is not known here: use --context-parallel-size 1"
            )
        if not args.rl_use_sequence_packing:
            mask = data[3][:, 1:].detach().cpu().numpy()
            return MicrobatchRows(
                active_tokens=(mask != 0).sum(1), lengths=np.full(len(mask), mask.shape[1])
            )
        from megatron.rl.rl_utils import get_rl_runtime_state

        context, index = get_rl_runtime_state().packing_context, int(data[0])
        mask = context.packed_loss_mask[index, 1:].detach().cpu().numpy()
        info = context.packing_info
        length_S = [info.seq_lengths[row] for row in info.bin_seq_indices[index]]
        start_S = list(info.seq_starts[index])[: len(length_S)]
        end = start_S[-1] + length_S[-1] if length_S else 0
        offset_S1 = np.clip([*start_S, end], 0, len(mask))
        if offset_S1[0] != 0:
            raise ContractError(f"got a bin whose first row begins at {start_S[0]}, expected 0")
        return _rows_at(offset_S1.astype(np.int64), mask)


ADAPTERS: Mapping[str, type[PretrainAdapter]] = {"train_rl.py": RLAdapter}
"""The adapter of a script, by its name, where it is not :class:`PretrainAdapter`."""


def install(
    aggregation: Aggregation,
    *,
    empty_step: EmptyStep = "zero",
    probe: bool = True,
    adapter: Adapter | None = None,
) -> ScheduleHook:
    """Rebind Megatron-LM's schedule in this process; return the hook, which counts its steps.

    Call it before ``pretrain``, with ``megatron.training`` on the path. ``adapter``: by default
    :class:`PretrainAdapter`. Raises :class:`ContractError` where ``megatron.training.training``
    has no such name, and what :class:`~megatron_lossagg.schedule.ScheduleHook` raises.
    """
    hook = ScheduleHook(
        aggregation, adapter or PretrainAdapter(), empty_step=empty_step, probe=probe
    )
    rebind(hook, ["megatron.training.training"], "Megatron-LM's (core_v0.16.1 and later)")
    return hook


def rebind(hook: ScheduleHook, modules: Sequence[str], host: str) -> None:
    """Put a hook around the schedule that modules of a host's training loop look up by name.

    ``host``: whose loop it is, for messages. Raises :class:`ContractError` where a module cannot be
    imported or has no such name; then none is changed.
    """
    stocks: dict[str, Any] = {}
    for name in modules:
        try:
            stocks[name] = getattr(importlib.import_module(name), _HOOK, None)
        except ImportError as error:
            raise ContractError(
                f"{name} cannot be imported ({error}), expected the training loop of {host}: put "
                "its checkout on PYTHONPATH, or run where it is installed"
            ) from error
        if stocks[name] is None:
            raise ContractError(
                f"{name} has no {_HOOK}, expected the training loop of {host}: this loop is not "
                "known here; put megatron_lossagg.schedule.aggregated(...) around its schedule"
            )
    for name, stock in stocks.items():
        setattr(importlib.import_module(name), _HOOK, _hooked(hook, stock))


def _hooked(hook: ScheduleHook, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get(*args: Any, **kwargs: Any) -> Any:
        return hook.aggregated(stock(*args, **kwargs))

    return get


def _offsets(data: Any, shape: tuple[int, ...]) -> Ints:
    """Return where the rows of a microbatch start and end in its flat mask."""
    b, s = shape
    entry_B = np.arange(b, dtype=np.int64)[:, None] * s
    packed = next((data[name] for name in _PACKED_AT if data.get(name) is not None), None)
    if packed is None:
        return np.append(entry_B, b * s)
    _check_split_by_rows()
    offset_BG = packed.detach().cpu().numpy().reshape(b, -1).astype(np.int64)
    # Data sets pad their offsets: Megatron-LM from 0.19 on with empty segments, Megatron-Bridge
    # with -1. Neither is a row.
    return np.unique((offset_BG + entry_B)[offset_BG >= 0])


def _rows_at(offset_G1: Ints, mask_P: npt.NDArray[Any]) -> MicrobatchRows:
    """Count the rows of a flat mask; positions past the last one are a filler."""
    total_P1 = np.concatenate([[0], np.cumsum(mask_P != 0)])
    length_G, active_G = np.diff(offset_G1), np.diff(total_P1[offset_G1])
    tail = len(mask_P) - offset_G1[-1]
    is_tail_G = np.zeros(len(length_G) + bool(tail), dtype=np.int64)
    if tail:
        is_tail_G[-1] = 1
        length_G, active_G = np.append(length_G, tail), np.append(active_G, 0)
    return MicrobatchRows(active_tokens=active_G, lengths=length_G, is_filler=is_tail_G)


def _check_split_by_rows() -> None:
    """Refuse packed rows that context parallelism splits as one, from 0.19 on."""
    try:
        from megatron.training import get_args
    except ImportError:  # Megatron-Bridge
        return
    args = get_args()
    as_one = getattr(args, "dataloader_inter_document_masking", False) and not args.sft
    if as_one and args.context_parallel_size > 1:
        raise ContractError(
            "--dataloader-inter-document-masking splits an entry over context-parallel ranks as a "
            "whole, so that a document's tokens lie unevenly on them, which is not known here: use "
            "--context-parallel-size 1, or leave the flag out"
        )


def _check_is_masked_sum(theirs: Tensor, losses: Tensor, mask: Tensor) -> None:
    """Raise :class:`ContractError` where the host's loss is more than a masked sum."""
    with torch.no_grad():
        ours = float((losses * mask.float()).sum())
    found = float(theirs.detach())
    if not math.isclose(found, ours, rel_tol=1e-3, abs_tol=1e-6) and math.isfinite(ours):
        raise ContractError(
            f"the script's loss_func gave {found:.6g} for the first microbatch, the masked sum of "
            f"its per-token losses is {ours:.6g}: it has terms that are not known here (a "
            "distillation loss, a penalty), and they would be lost; train it without "
            "--loss-aggregation"
        )
