"""``python tools/addresses.py``: write this repository's address into the pages that clone it.

The address is ``repository`` under ``[tool.lossagg]`` of ``pyproject.toml``. Until it has one, the
pages say ``https://ADDRESS/megatron_lossagg`` and that the reader replaces ``ADDRESS``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGES = ("README.md", "docs/start.md")
PLACEHOLDER = "ADDRESS"
_URL = re.compile(rf"https://{PLACEHOLDER}/megatron_lossagg\b")
_TOLD = re.compile(
    rf"(?:; else replace|Replace) `{PLACEHOLDER}` by the address of this\s+repository(\.?)(\s?)"
)
"""What asks the reader to: the end of a sentence, or a sentence of its own."""


def addressed(page: str, repository: str) -> str:
    """Return a page with the address, and without what asks the reader to put it there."""
    page = _URL.sub(repository, page)
    return _TOLD.sub(lambda told: "" if told[0].startswith("R") else told[1] + told[2], page)


def repository_of(checkout: Path) -> str:
    """Return the address that ``pyproject.toml`` has, without a slash at its end; may be empty."""
    settings = tomllib.loads((checkout / "pyproject.toml").read_text())
    return str(settings["tool"]["lossagg"]["repository"]).rstrip("/")


def write(checkout: Path) -> None:
    """Write the address into the pages of a checkout, if there is one."""
    if repository := repository_of(checkout):
        for page in PAGES:
            path = checkout / page
            path.write_text(addressed(path.read_text(), repository))


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent)
