"""Packages that only some commands need, and that an extra of this package installs."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_lossagg.errors import LossAggregationError


class MissingPackageError(LossAggregationError, ImportError):
    """A package that is not installed; the message names the extra that installs it."""


def needed(name: str, *, by: str, extra: str) -> Any:
    """Import a module of an optional package; the error names who needs it and its extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise MissingPackageError(
            f"{by} needs {missing}, which is not installed: "
            f"pip install 'megatron-lossagg[{extra}]'",
            name=missing,
        ) from None
