"""Prints ``docs/reference/ran.md`` from the files of ``tests/ran``: ``python -m tools.ran_page``.

It first takes in what runs have written since, ``runs/ran`` or the folders that are named, such as
those of a workflow. A test compares the page with the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import ran  # noqa: E402  of tests/support

PAGE = ROOT / "docs" / "reference" / "ran.md"
_PAGE = """\
# Last runs

The last run of each release, framework and Python: `python -m tools.ran_page` prints this page from
what the runs write. An empty cell was not written. [What ran in all](../evidence.md).

## Megatron-Core

`make test-versions`. *Standard set*: `lossagg verify` in seven layouts and both loss scalings,
cases right and the largest error of a gradient. *MoE*: DP 2 x CP 2 x EP 2.

{megatron_core}

## Pythons

`make test-machine` types README's lines in an empty environment.

{pythons}

## Frameworks

`make test-frameworks`, and files of `tests/frameworks` that ran whole on checkouts.

{frameworks}

## Newest mains

`make test-newest`: which names that this package uses are there, and checks of its functions.

{newest}
"""


def page(folder: Path = ran.COMMITTED) -> str:
    """Return the whole page."""
    tables = {file.stem: _table(ran.read(file)) for file in folder.glob("*.tsv")}
    return _PAGE.format(**tables)


def _table(rows: list[list[str]]) -> str:
    header, *others = rows
    lines = [header, ["---"] * len(header), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def taken(rows: list[list[str]], written: list[list[str]]) -> list[list[str]]:
    """Return a table with written rows, each in the place of the one of what it ran, or last."""
    size = rows[0].index("Python") + 1
    found = {tuple(row[:size]): row for row in [*rows, *written]}
    return [*found.values()]


def main(*folders: str) -> None:
    """Take in what was written, and write the page."""
    for folder in map(Path, folders or [ran.WRITTEN]):
        for file in sorted(folder.glob("*.tsv")):
            committed = ran.COMMITTED / file.name
            rows = taken(ran.read(committed), ran.read(file))
            committed.write_text("".join("\t".join(row) + "\n" for row in rows))
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main(*sys.argv[1:])
