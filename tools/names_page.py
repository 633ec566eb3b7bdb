"""Prints ``docs/reference/names.md`` from the code: ``python -m tools.names_page``.

A test compares the page with what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lossagg.reduction.aliases import ALIASES  # noqa: E402

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "reference" / "names.md"
_PAGE = """\
# Names of other systems

What to write for the setting of a paper or a system, and the mode that it is.
`python -m tools.names_page` prints this page from the code;
[which commits were read](../evidence.md#aliases), and [what moves](../which-mode.md#what-moves).

| `--loss-aggregation` | mode | divisor and condition |
|---|---|---|
{rows}
"""


def page() -> str:
    """Return the whole page."""
    return _PAGE.format(rows="\n".join(_rows()))


def _rows() -> Iterator[str]:
    for name, alias in ALIASES.items():
        yield f"| `{name}` | `{alias.mode}` | {alias.note} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
