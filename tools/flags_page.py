"""Prints ``docs/reference/flags.md`` from the code: ``python -m tools.flags_page``.

A test compares the page with what is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lossagg import Aggregation, Options, add_loss_aggregation_args  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "flags.md"
_PAGE = """\
# Flags

Every flag of a training script, and what it is called in a loop of your own: `Aggregation` says
which loss, `Options` how a run behaves. `Aggregation(count_left_out=True)` has no flag.
`python -m tools.flags_page` prints this page from the code; `lossagg COMMAND --help` lists the
options of the commands. A file of arguments has them with underscores:
`loss_aggregation_count_empty: false`.

| flag | value | what it does | in a loop |
|---|---|---|---|
{rows}
"""


def page() -> str:
    """Return the whole page."""
    return _PAGE.format(rows="\n".join(_rows()))


def _rows() -> Iterator[str]:
    parser = argparse.ArgumentParser(add_help=False)
    named = {field.name: kind.__name__ for kind in (Aggregation, Options) for field in fields(kind)}
    for action in add_loss_aggregation_args(parser)._actions:
        flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
        value = action.metavar or (action.choices and "|".join(action.choices))
        shown = "" if value is None else f"`{value}`".replace("|", "\\|")
        name = action.dest.removeprefix("loss_aggregation_")
        field = {"loss_aggregation": "mode", "weights_path": "weights"}.get(name, name)
        where = f"`{named[field]}({field}=...)`"
        help_text = (
            (action.help or "")
            .replace("|", "\\|")
            .replace("a mode listed above", "a [mode](../which-mode.md)")
        )
        yield f"| {flags} | {shown} | {help_text} | {where} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
