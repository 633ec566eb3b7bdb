"""Entry points for frameworks, one file each; a file that begins with ``_`` serves several.

One that calls Megatron's schedule is an ``Integration`` of ``loop/schedule_hook.py``, as
``docs/integrations/integration.md`` shows. CONTRIBUTING.md lists what one more
costs. What it cannot do is refused in its file.
"""

from __future__ import annotations

__all__: list[str] = []


def __getattr__(name: str) -> object:
    """Answer a loader that splits ``megatron_lossagg.integrations.NAME:f`` at its last dot."""
    message = f"module {__name__!r} has no attribute {name!r}"
    if ":" in name:
        dotted = f"{__name__}.{name.replace(':', '.')}"
        message += f": this framework's loader splits a path at its last dot, write {dotted}"
    raise AttributeError(message)
