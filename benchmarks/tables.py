"""Markdown: tables, sections with a note, and where they stand in a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Lay out a table."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def filled(note: str) -> str:
    """Wrap a paragraph."""
    return textwrap.fill(note, 138, break_long_words=False, break_on_hyphens=False)


def section(
    title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], note: str = ""
) -> str:
    """Lay out a heading, a note and a table."""
    return "\n".join(
        [f"\n### {title}\n", *([filled(note), ""] if note else []), table(columns, lines)]
    )


def write_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two markers of a file."""
    before, begun, rest = path.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise SystemExit(f"{path} has no lines {begin!r} and {end!r}: add them around the tables")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")
