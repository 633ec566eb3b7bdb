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
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.buffer import MicrobatchSequences
from megatron_lossagg.errors import ContractError
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
    batch. The loss is a masked sum of per-token losses whose mask is the first argument of a
    ``functools.partial``; each training microbatch is compared with that, so that a loss with more
    terms is refused and not dropped. A ``loss_func`` or a model whose output is a tuple is refused.
    """

    def sequences(self, data: Any) -> MicrobatchSequences:
        """Count the mask of each sequence; ``data`` is the dict of Megatron-LM's data sets."""
        if not isinstance(data, Mapping) or data.get("loss_mask") is None:
            raise ContractError(
                f"got {type(data).__name__} from the data iterator, expected Megatron-LM's dict "
                "with loss_mask: the data of this script is not known here"
            )
        mask = to_numpy(data["loss_mask"])
        if all(data.get(name) is None for name, _ in _PACKED_AT):
            start_G = np.arange(len(mask)) * mask.shape[1]
            return count_segments(start_G, np.zeros(len(mask)), mask.ravel())
        self._check_split()
        return _packed_sequences(data, mask)

    def _check_split(self) -> None:
        """Refuse what only the script's arguments say about how packed sequences are split."""
        from megatron.training import get_args

        args = get_args()
        check_options("script arguments", args, cp_size=args.context_parallel_size)

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Take the mask out of ``partial(loss_func, loss_mask, ...)``; the output is the losses."""
        given = loss_func.args if isinstance(loss_func, functools.partial) else ()
        mask = next(iter(given), None)
        if not isinstance(output, Tensor):
            raise ContractError(
                f"got a {type(output).__name__} from forward_step, expected one tensor of "
                "per-token losses, as in pretrain_gpt.py: this script's loss is not known here; "
                "train it without --loss-aggregation"
            )
        if not isinstance(mask, Tensor) or mask.numel() != output.numel():
            raise ContractError(
                f"got {loss_func!r} from forward_step, expected functools.partial(loss_func, "
                "loss_mask, ...) with one mask value per loss, as in pretrain_gpt.py: this "
                "script's loss is not known here"
            )
        returned = loss_func(output)
        theirs = returned[0] if isinstance(returned, tuple) and len(returned) > 1 else None
        if not (isinstance(theirs, Tensor) and theirs.numel() == 1):
            raise ContractError(
                f"got {returned!r} from loss_func, expected a tuple of the masked sum, counts and "
                "a report, as in pretrain_gpt.py: this script's loss is not known here"
            )
        return FrameworkLoss(
            losses=output.reshape(-1),
            mask=mask.reshape(-1),
            report=returned[-1],
            masked_sum=theirs.reshape(()),
        )


def install(
    aggregation: Aggregation,
    *,
    options: Options | None = None,
    integration: Integration | None = None,
) -> ScheduleHook:
    """Rebind Megatron-LM's schedule in this process; return the hook, which counts its steps.

    Call it before ``pretrain``, with ``megatron.training`` on the path. ``integration``: by default
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
    _keep_exit_status()
    atexit.register(report_if_unused, hook, framework)
    return hook


_exit_status: list[Any] = []
"""What ``sys.exit`` was called with last."""


def _keep_exit_status() -> None:
    """Keep what ``sys.exit`` gets: nothing tells a function at exit how the process ends."""
    stock = sys.exit

    @functools.wraps(stock)
    def kept(status: Any = None, /) -> NoReturn:
        _exit_status[:] = [status]
        stock(status)

    sys.exit = kept


def report_if_unused(hook: ScheduleHook, framework: str) -> None:
    """Print, as the process ends, that no step reached the hook.

    Nothing where an exception or an exit status other than 0 ends it: that says why already.
    """
    failed = hasattr(sys, "last_value") or any(_exit_status)
    if hook.num_steps == 0 and not failed:
        why = (
            f"the training loop of {framework} had no step left to do"
            if hook.is_found
            else f"the process ended without the training loop of {framework}, or the hook was "
            "installed after it began"
        )
        print(
            f"lossagg: no step reached --loss-aggregation {hook.aggregation}: {why}",
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


def to_numpy(values: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's numbers on the CPU."""
    array: npt.NDArray[Any] = values.detach().cpu().numpy()
    return array
