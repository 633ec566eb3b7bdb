"""The former name of :class:`~megatron_lossagg.reduction.microbatch.Microbatch`."""

from __future__ import annotations

import warnings

from megatron_lossagg.reduction.microbatch import Microbatch


def __getattr__(name: str) -> object:
    if name != "Reducer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "megatron_lossagg.reduction.reducer.Reducer is now reduction.microbatch.Microbatch",
        DeprecationWarning,
        stacklevel=2,
    )
    return Microbatch
