"""Megatron's options, as ``docs/reference/options.md`` has them, and whether a release agrees."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
NOT_OF_A_CONFIG_CLASS = {"flextron"}
"""Set on the config by Megatron-LM's elastification."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    since: dict[str, str]
    """The first release of each option; ``dev``: that branch only."""
    lacks: str
    """A branch without them, empty if there is none."""
    holder: str
    verdict: str
    why: str


def table():
    """Read the rows of the page."""
    _, section = PAGE.read_text().split("| option | since |")
    lines = section.split("\n\n")[0].splitlines()[2:]
    cells = [re.fullmatch(r"\| (.*) \|", line)[1].split(" | ") for line in lines]
    return [row(*row_cells) for row_cells in cells]


def row(options, since, verdict, why, shown_by):
    names, _, holder = options.partition("; ")
    since, _, lacks = since.partition(", not ")
    found = re.findall(r"`([^`]+)`(?: \(([^)]+)\))?", names)
    return Row(
        since={name: later or since for name, later in found},
        lacks=lacks,
        holder=holder or "model config",
        verdict=verdict,
        why=why,
    )


def missing_or_early(fields, release):
    """Return the options of a model's config that ``release`` has otherwise than the table says.

    ``fields``: of its config classes. ``release``: ``0.13`` to ``0.19``, ``main`` or ``dev``.
    """
    return {
        name
        for one in table()
        if one.holder == "model config"
        for name in one.since.keys() - NOT_OF_A_CONFIG_CLASS
        if (name in fields) != is_in(one, name, release)
    }


def is_in(one, name, release):
    """Return whether a release has an option, as the table says."""
    since = one.since[name]
    if since == "dev" or release == one.lacks:
        return since == release
    return since != "0.20" and (release in ("main", "dev") or since <= release)
