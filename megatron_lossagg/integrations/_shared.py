"""What several integrations share: refusals, a hook by its name, segments of a mask, groups.

Trainers without Megatron import this: it imports none.

The groups of ``balanced``, arXiv 2605.04077, are a prompt's samples by the sign of their advantage.
Samples whose advantage is 0 are neither of the paper's two subsets: they are a third group, so that
they change no weight of the other two.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import ContractError, PlanError, say
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.sequences import Sequences

WEIGH = "LOSSAGG_WEIGH"
"""The environment variable that weighs the first step, of a framework's own reduction too."""


def is_asked() -> bool:
    """Whether this process was asked to weigh."""
    return os.environ.get(WEIGH, "0") not in ("", "0")


def variables() -> dict[str, str]:
    """Return what a process that this one starts has to find in its environment."""
    return {WEIGH: os.environ[WEIGH]} if is_asked() else {}


@cache
def announce(framework: str, aggregation: Aggregation) -> None:
    """Print on rank 0, once per process, that a framework trains an aggregation."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(f"{framework} trains {aggregation}")


def imported(name: str, *, expected: str) -> Any:
    """Import a framework's module; raises :class:`ContractError` if it cannot be imported.

    ``expected``: what has to be there, and what to do about it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ContractError(f"{name} cannot be imported ({error}), expected {expected}") from error


def field_of(data: Any, name: str, source: str) -> Any:
    """Return a field of a microbatch; raises :class:`ContractError` if it has none.

    ``source``: what of the framework makes it.
    """
    found = data.get(name) if isinstance(data, Mapping) else None
    if found is None:
        raise ContractError(
            f"got a {type(data).__name__} from the data iterator, expected the dict with {name} "
            f"that {source} makes: train it without megatron_lossagg"
        )
    return found


def not_a_mask(name: str, change: str) -> PlanError:
    """Return the error for a mask with other values; ``change``: what the user can do."""
    return PlanError(
        f"got {name} with values other than 0 and 1, expected a 0/1 mask, since counts are "
        f"integers: {change}"
    )


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module or an object, and put its own back."""
    own = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


HOOK = "get_forward_backward_func"
"""What a framework's loop calls for Megatron's schedule."""


def rebind(hook: ScheduleHook, modules: Sequence[str], framework: str) -> ScheduleHook:
    """Put a hook around the schedule that a framework's modules look up by name; return the hook.

    ``framework``: its name in messages. Raises :class:`ContractError` if a module cannot be
    imported or has no such name; then no module is changed.
    """
    expected = (
        f"the training loop of {framework}: put its checkout on PYTHONPATH, or use an environment "
        "that has it"
    )
    found = [imported(name, expected=expected) for name in modules]
    for module in found:
        if not hasattr(module, HOOK):
            raise ContractError(
                f"{module.__name__} has no {HOOK}, expected the training loop of {framework}: this "
                "loop is not known here; wrap its schedule with LossAggregator.wrap"
            )
    for module in found:
        setattr(module, HOOK, _hooked(hook, getattr(module, HOOK)))
    atexit.register(report_if_unused, hook, framework)
    return hook


def _hooked(hook: ScheduleHook, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get(*args: Any, **kwargs: Any) -> Any:
        return hook.wrap(stock(*args, **kwargs))

    return get


def report_if_unused(hook: ScheduleHook, framework: str) -> None:
    """Print, as the process ends, that no step reached the hook.

    Nothing if an exception ends it: that says why already.
    """
    if hook.num_steps == 0 and not hasattr(sys, "last_value"):
        why = (
            f"the training loop of {framework} had no step left to do"
            if hook.is_found
            else f"the process ended without the training loop of {framework}, or the hook was "
            "installed after it began"
        )
        say(f"no step reached {hook.flag}: {why}")


def count_segments(
    start_G: npt.ArrayLike, is_padding_G: npt.ArrayLike, mask_P: npt.NDArray[Any]
) -> Sequences:
    """Count the segments of a flat mask, each up to the next one's start."""
    offset_G1 = np.append(np.asarray(start_G, dtype=np.int64), len(mask_P))
    total_P1 = np.concatenate([[0], np.cumsum(mask_P != 0)])
    return Sequences(
        active_tokens=np.diff(total_P1[offset_G1]),
        lengths=np.diff(offset_G1),
        is_padding=np.asarray(is_padding_G, dtype=np.int64),
    )


def with_weights(counted: Sequences, weight_P: npt.NDArray[Any]) -> Sequences:
    """Add the sum of each segment's token weights, rounded once, so that padding changes no bit."""
    ends = np.cumsum(np.asarray(counted.lengths)).tolist()
    weights = weight_P.astype(np.float64).tolist()
    sums = [math.fsum(weights[begin:end]) for begin, end in pairwise([0, *ends])]
    return replace(counted, token_weight_sums=sums)


def to_numpy(values: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's numbers on the CPU; NumPy has no bfloat16."""
    tensor = torch.as_tensor(values).detach().cpu()
    array: npt.NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def advantage_groups(
    prompts: Sequence[object],
    advantages: Tensor,
    masks: Tensor,
    samples: Sequence[object] | None = None,
) -> list[str]:
    """Name the group of each sequence; a host sync per sequence unless tensors are on the CPU.

    A sequence has the sign of all its active tokens. A fully masked one has the sign 0, or that of
    its sample's others if ``samples`` are passed. ``advantages``, ``masks``: ``[b, s]``, dense or
    jagged. Raises :class:`PlanError` for a sequence with more than one sign, or with NaN.
    """
    signs = [
        _sign(number, of_one, mask)
        for number, (of_one, mask) in enumerate(
            zip(advantages.unbind(), masks.unbind(), strict=True)
        )
    ]
    own = [*range(len(signs))] if samples is None else samples
    of_sample = {one: sign for one, sign in zip(own, signs, strict=True) if sign is not None}
    return [
        f"{of_sample.get(one, 0):+d} {prompt}" for one, prompt in zip(own, prompts, strict=True)
    ]


def _sign(number: int, advantage: Tensor, mask: Tensor) -> int | None:
    """Return 1, 0 or -1, and None of a fully masked sequence."""
    of_tokens = advantage[mask.bool()].cpu()
    signs = torch.unique(of_tokens.sign().where(~of_tokens.isnan(), torch.nan)).tolist()
    if not signs:
        return None
    if len(signs) > 1 or math.isnan(signs[0]):
        raise PlanError(
            f"got advantages of the signs {signs} in sequence {number}, expected one sign for all "
            "of a sequence's active tokens: balanced groups a prompt's samples by it. Choose an "
            "estimator with one advantage per sequence, such as GRPO, or another mode"
        )
    return int(signs[0])
