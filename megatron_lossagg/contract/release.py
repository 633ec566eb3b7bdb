"""Which Megatron-Core is imported."""

from __future__ import annotations

import re


def megatron_version() -> str:
    """Return the version of the Megatron-Core that is imported."""
    import megatron.core

    return str(megatron.core.__version__)


def megatron_release() -> tuple[int, ...]:
    """Return its major and minor version."""
    return tuple(int(part) for part in re.findall(r"\d+", megatron_version())[:2])
