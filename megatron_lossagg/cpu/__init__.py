"""Stock Megatron-Core on a CPU with gloo: stand-ins for CUDA, an attention, weights, a launcher.

Importing this package does not import Megatron-Core: call :func:`install` first, then
import Megatron-Core. The names that need Megatron-Core or torch load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megatron_lossagg.cpu.launch import launch

if TYPE_CHECKING:
    from megatron_lossagg.cpu.model import (
        gpt_layer_spec,
        gpt_mtp_spec,
        initialize_weights,
        named_shards,
    )
    from megatron_lossagg.cpu.stand_ins import install

__all__ = [
    "gpt_layer_spec",
    "gpt_mtp_spec",
    "initialize_weights",
    "install",
    "launch",
    "named_shards",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "stand_ins" if name == "install" else "model"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
