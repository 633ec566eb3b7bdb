"""Prints ``docs/reference/names.md`` from the code: ``python -m tools.names_page``.

A test compares the page with what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lossagg.reduction.modes import ALIASES  # noqa: E402

SOURCES = {
    "agent-lightning": ("microsoft/agent-lightning", "c632d8dd"),
    "openrlhf": ("OpenRLHF/OpenRLHF", "3c3be623"),
    "prime-rl": ("PrimeIntellect-ai/prime-rl", "559b44772"),
    "rlinf": ("RLinf/RLinf", "a3816b596"),
    "roll": ("alibaba/ROLL", "8eb27cc2"),
    "tinker": ("thinking-machines-lab/tinker-cookbook", "9dfcc3a2"),
    "torchrl": ("pytorch/rl", "ae9719f17"),
    "tunix": ("google/tunix", "c7d8950f, and 0.1.7"),
    "unsloth": ("unslothai/unsloth-zoo", "ce232d6c, and 2026.10.9"),
}
"""Repository and commit of a system's code."""
PAGE = ROOT / "docs" / "reference" / "names.md"
_PAGE = """\
# Names of other systems

What to write for the setting of a paper or a system, and the mode that it is.
`python -m tools.names_page` prints this page from the code;
[what moves in your dashboard](../which-mode.md#what-moves) is on its page.

| mode | divisor and condition | `--loss-aggregation` |
|---|---|---|
{rows}

## Sources

The code that was read, if the system is not in [what ran](../evidence.md#frameworks).
`pytest tests/reduction/test_aliases.py` compares formulas of rlinf, agent-lightning, torchrl,
tunix and unsloth. ScaleRL's are of [its paper](https://arxiv.org/abs/2510.13786).

| system | repository, commit |
|---|---|
{sources}
"""


def page() -> str:
    """Return the whole page."""
    sources = (
        f"| {system} | [{repository}](https://github.com/{repository}) {commit} |"
        for system, (repository, commit) in SOURCES.items()
    )
    return _PAGE.format(rows="\n".join(_rows()), sources="\n".join(sources))


def _rows() -> Iterator[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for name, alias in ALIASES.items():
        rows.setdefault((alias.mode, alias.note), []).append(f"`{name}`")
    for (mode, note), names in sorted(rows.items()):
        yield f"| `{mode}` | {note} | {', '.join(names)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
