"""f, measured: what became of the gradients that backward passes have added to a parameter.

The step's gradient of a parameter is f times the sum, over the ranks that add up their gradients,
of what their backward passes added. Both are heard at some entries of a few small parameters
(``parameters.py``), so that nothing is assumed of what reduces, averages, scales or divides them.

NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_ROUNDINGS, _FINEST = 4, 1e-5
"""How many roundings of its dtype a gradient may be off, and the least that is told apart."""
_ROUNDED = 0.02
"""The residual of a gradient that was rounded, at most; with more it is another gradient."""
_NOT_ZERO = (
    "the gradient buffer was not zero before the step: what was there is trained with it; zero "
    "gradients before the step, or weigh the first of several schedule calls"
)
_NOT_REDUCED = (
    "nothing was reduced: each rank has the gradient of its own tokens, as under no_sync in every "
    "microbatch, or with a forward pass that goes by the wrapper"
)
_NO_MULTIPLE = (
    "the gradients are no multiple of what backward passes added: they were reduced over some of "
    "the ranks, or changed afterwards"
)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Added:
    """Some entries of the gradient of a parameter on one rank."""

    place: tuple[int, ...]
    """Ranks with the same one add up their gradients."""
    name: str
    added: Array
    """By this rank's backward passes, since the gradient was last zero."""
    size: Array
    """As ``added``, of absolute values."""
    before: Array
    """What was there when the first of them began; NaN if another rank has the entry."""
    after: Array
    """What is there after the step; NaN likewise."""
    eps: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """f as it was measured."""

    value: float
    noise: float
    """How far it may be off, relative."""
    fault: str = ""
    """Why the gradient is not f times what was added."""

    def agrees(self, f: float) -> bool:
        """Whether another f is the same within the noise."""
        return abs(self.value - f) <= self.noise * abs(f)


def measure(heard: Iterable[Added]) -> Measured | None:
    """Return f by the first parameter whose gradient is large enough; None if there is none.

    ``heard``: by all ranks.
    """
    of_parameter: dict[tuple[str, tuple[int, ...]], list[Added]] = {}
    for one in heard:
        of_parameter.setdefault((one.name, one.place), []).append(one)
    found = (_of_parameter(ranks) for ranks in of_parameter.values())
    return next((one for one in found if one is not None), None)


def _of_parameter(ranks: Sequence[Added]) -> Measured | None:
    """Compare the gradient of one parameter with what its ranks have added to it."""
    added, size = sum(one.added for one in ranks), sum(one.size for one in ranks)
    after = np.stack([one.after for one in ranks])
    owned = ~np.isnan(after)
    norm, eps = float(np.linalg.norm(added)), max(one.eps for one in ranks)
    if not norm or not owned.any(0).all() or not np.isfinite(after[owned]).all():
        return None
    noise = max(_FINEST, _ROUNDINGS * eps * float(np.linalg.norm(size)) / norm)
    if not noise < 0.1:  # the sum is what rounding has left of it
        return None
    if any(np.nan_to_num(one.before).any() for one in ranks):
        return Measured(value=np.nan, noise=noise, fault=_NOT_ZERO)
    every = np.broadcast_to(added, after.shape)
    f, residual = _multiple(after[owned], every[owned])
    if residual <= max(noise, _ROUNDED):
        return Measured(value=f, noise=max(noise, 3 * residual))
    own = np.stack([one.added for one in ranks])
    _, residual = _multiple(after[owned], own[owned])
    fault = _NOT_REDUCED if residual <= max(noise, _ROUNDED) else _NO_MULTIPLE
    return Measured(value=np.nan, noise=noise, fault=fault)


def _multiple(values: Array, of: Array) -> tuple[float, float]:
    """Return which multiple of an array another is closest to, and how far it is, relative."""
    f = float(values @ of / (of @ of))
    return f, float(np.linalg.norm(values - f * of) / (np.linalg.norm(values) or 1.0))
