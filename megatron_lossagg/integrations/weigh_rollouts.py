"""Weigh slime and miles: which weight each response's tokens get, in each term of their loss.

Their code runs as it is. In the configuration of either::

    custom_megatron_init_path: megatron_lossagg.integrations.weigh_rollouts.slime

(``...miles``). Each training process then weighs its first training step, and rank 0 prints a
report for each term: the policy loss, KL, entropy. A term's weights are those of the mode times
the term's coefficient.

Both frameworks reduce a term by the function that ``get_sum_of_sample_mean`` returns, or by a
custom one for the policy loss; these hear the term's losses of the response tokens here. Sources:
slime 624b824a ``loss_function``, miles 31f1ca96 ``loss_function``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._rollouts import REDUCER
from megatron_lossagg.integrations.weigh_rl import TermsWeighing, print_term
from megatron_lossagg.integrations.weigh_script import Report, rebind_schedule
from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.layout import Layout

_MAKER = "get_sum_of_sample_mean"
_LOADER = "load_function"


class _Where(NamedTuple):
    """Where a framework looks up its schedule, and the functions that make its reducers."""

    schedule: str
    reducers: tuple[str, ...]
    hooks: str
    """Our module for it, whose ``check`` stands at the same option under a mode of ours."""


_FRAMEWORKS = {
    "slime": _Where(
        "slime.backends.megatron_utils.model",
        ("slime.backends.megatron_utils.loss",),
        "megatron_lossagg.integrations.slime",
    ),
    "miles": _Where(
        "miles.backends.megatron_utils.model",
        ("miles.backends.training_utils.loss", "miles.backends.training_utils.loss_hub.losses"),
        "megatron_lossagg.integrations.miles",
    ),
}


def slime(args: Any) -> None:
    """Weigh slime's first training step; for ``custom_megatron_init_path``."""
    _begin("slime", args)


def miles(args: Any) -> None:
    """Weigh miles' first training step; for ``custom_megatron_init_path``."""
    _begin("miles", args)


def install(
    framework: str, *, steps: int = 1, reducer: str | None = None, report: Report
) -> TermsWeighing:
    """Listen in a framework's training in this process; call it before the first step.

    ``steps``: how many training steps are weighed. ``reducer``: the path of a custom reducer of the
    policy loss, if the arguments have one.
    """
    where, expected = _FRAMEWORKS[framework], f"{framework}'s Megatron backend"
    weighing = TermsWeighing(steps, report=report)
    rebind_schedule(where.schedule, weighing, expected=expected)
    for module in map(importlib.import_module, where.reducers):
        if stock := getattr(module, _MAKER, None):
            setattr(module, _MAKER, _heard_maker(weighing, stock))
        if stock := getattr(module, _LOADER, None):
            setattr(module, _LOADER, _heard_loader(weighing, stock, reducer))
    return weighing


def _begin(framework: str, args: Any) -> None:
    importlib.import_module(_FRAMEWORKS[framework].hooks).check(args)
    install(framework, reducer=getattr(args, REDUCER, None), report=print_term)


def _heard_loader(
    weighing: TermsWeighing, load: Callable[..., Any], reducer: str | None
) -> Callable[..., Any]:
    """Hear what a custom reducer of the policy loss gets, which the framework loads by its path."""

    @functools.wraps(load)
    def loaded(path: str, *args: Any, **kwargs: Any) -> Any:
        function = load(path, *args, **kwargs)
        return _heard_maker(weighing, function) if path == reducer else function

    return loaded


def _heard_maker(weighing: TermsWeighing, make: Callable[..., Any]) -> Callable[..., Any]:
    """Hear what the reducers get that this function makes for a microbatch."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Callable[[Tensor], Tensor]:
        reduce = make(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments

        @functools.wraps(reduce)
        def heard(x: Tensor) -> Any:
            mask, lengths = _slice(given)
            frame = sys._getframe(1)
            x = weighing.hear(x, moved(mask, x.device), lengths=lengths, frame=frame)
            return reduce(x)

        return heard

    return made


def _slice(given: dict[str, Any]) -> tuple[Tensor, Sequence[int]]:
    """Return the loss mask of the response tokens here, and how many each sequence has of them."""
    from megatron.core import mpu

    cp_size = mpu.get_context_parallel_world_size()
    if cp_size > 1 and given.get("qkv_format", "thd") != "thd":
        raise ContractError(
            "got qkv_format bshd with context parallelism, expected thd: which response tokens a "
            "rank holds is not read there"
        )
    layout = Layout.response_zigzag(
        given["total_lengths"],
        given["response_lengths"],
        cp_size=cp_size,
        cp_rank=mpu.get_context_parallel_rank(),
    )
    masks = given["loss_masks"]
    mask = torch.cat([*masks]) if len(masks) else torch.zeros(0)
    return mask[moved(layout.positions, mask.device)], layout.local_lengths.tolist()
