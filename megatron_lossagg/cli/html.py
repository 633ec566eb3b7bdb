"""HTML pages, each from one jinja2 template: self-contained, no script, light and dark.

A template extends ``base.html``, which has the style of all pages, and takes tables from
``parts.html``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_lossagg.cli.extras import needed

__all__ = ["page"]

_FOLDERS = [Path(__file__).with_name("templates")]


def page(template: str, *, extra: str = "plot", **values: Any) -> str:
    """Render a template of this package; values are escaped.

    ``extra``: what installs jinja2 for the caller. Raises :class:`MissingPackageError` without it.
    """
    jinja2 = needed("jinja2", by="an HTML page", extra=extra)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDERS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return str(environment.get_template(template).render(values))
