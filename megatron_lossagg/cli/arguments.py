"""What several commands ask of their arguments, and where what these name is imported from."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_from_here() -> None:
    """Let modules of the current folder be imported, as ``python -m`` does."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def seconds(text: str) -> float:
    """Read the value of ``--timeout``."""
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def given(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> dict[str, Any]:
    """Return the options that differ from their default; ``add_arguments``: the command's."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own = {action.dest for action in parser._actions}
    values = {name: value for name, value in vars(args).items() if name in own}
    return {name: value for name, value in values.items() if value != parser.get_default(name)}
