"""Stock Megatron-Core on a CPU with gloo: stand-ins for CUDA, an attention, weights, a launcher.

Importing this package does not import Megatron-Core: call :func:`install` first, then
import Megatron-Core. The names that need Megatron-Core load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megatron_lossagg.cpu.launch import launch
from megatron_lossagg.cpu.stand_ins import (
    STAND_INS,
    CudaPresentError,
    InstallOrderError,
    StandIn,
    install,
)

if TYPE_CHECKING:
    from megatron_lossagg.cpu.attention import ContextParallelAttention, UnsupportedModelError
    from megatron_lossagg.cpu.model import (
        Shard,
        gpt_layer_spec,
        gpt_mtp_spec,
        initialize_weights,
        named_shards,
    )

__all__ = [
    "STAND_INS",
    "ContextParallelAttention",
    "CudaPresentError",
    "InstallOrderError",
    "Shard",
    "StandIn",
    "UnsupportedModelError",
    "gpt_layer_spec",
    "gpt_mtp_spec",
    "initialize_weights",
    "install",
    "launch",
    "named_shards",
]

_NEEDS_MEGATRON = {
    "ContextParallelAttention": "attention",
    "UnsupportedModelError": "attention",
    "Shard": "model",
    "gpt_layer_spec": "model",
    "gpt_mtp_spec": "model",
    "initialize_weights": "model",
    "named_shards": "model",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_MEGATRON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEEDS_MEGATRON[name]}"), name)
