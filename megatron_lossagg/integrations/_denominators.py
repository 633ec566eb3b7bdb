"""Denominators below 1 in slime and miles, whose loss raises each to 1.

Both divide a sequence's masked sum by ``torch.clamp_min(d_s, 1)``, for rollouts without an active
token. A carried d_s = 1 / (w_s G) is below 1 if a sequence weighs more than 1/G, such as the one
token of a short response. :class:`Denominators` are raised to 1 only if they are 0. A subclass,
because both clamp inside of a closure, between a sum and its division, where no option and no
function of theirs can be replaced. Sources: slime 624b824a and miles 31f1ca96
``get_sum_of_sample_mean``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError

_CLAMPS = [
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("clamp_min", "clamp", "clip", "maximum")
]
_SUMS = "get_sum_of_sample_mean"
_made: set[Callable[..., Any]] = set()
"""What replaced it, here."""


class Denominators(Tensor):
    """d_s: of these, ``clamp_min(d_s, 1)`` and the like change only what is not above 0."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; a clamp returns a plain tensor. No host sync."""
        kwargs = kwargs or {}
        if func not in _CLAMPS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        given = next(one for one in args if isinstance(one, cls)).as_subclass(Tensor)
        plain = [one.as_subclass(Tensor) if isinstance(one, cls) else one for one in args]
        return torch.where(given > 0, given, func(*plain, **kwargs))


def keep_below_one(modules: Sequence[str]) -> None:
    """Have modules of a framework read their ``denominators`` as :class:`Denominators`.

    Raises :class:`ContractError` if a module has no such function. Once per process.
    """
    for name in modules:
        module = import_module(name)
        stock = getattr(module, _SUMS, None)
        if stock is None:
            raise ContractError(
                f"got {name} without {_SUMS}, expected the function that divides by "
                "rollout_mask_sums: use a release that the integration was written for"
            )
        if stock not in _made:
            kept = _kept(stock)
            _made.add(kept)
            setattr(module, _SUMS, kept)


def _kept(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_sum_of_sample_mean(
        *args: Any, denominators: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> Any:
        if denominators is not None:
            denominators = [one.as_subclass(Denominators) for one in denominators]
        return stock(*args, denominators=denominators, **kwargs)

    return get_sum_of_sample_mean
