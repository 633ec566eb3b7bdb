"""What a command writes: whole or not at all, and never over what it reads; and what it needs.

An extra of this package installs the packages that only some commands need.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron_lossagg.errors import LossAggregationError


class OutputError(LossAggregationError, ValueError):
    """A file that cannot be written, or that is read as well; the message names its flag."""


def printable(text: str) -> str:
    """Write what a terminal would act on, or no encoding has, as an escape such as ``\\x1b``."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def check_outputs(
    outputs: Mapping[str, Path | None], *, inputs: Iterable[Path | None] = ()
) -> None:
    """Refuse, before the work, a file that could not be written after it.

    ``outputs``: by flag; None if it was not given. ``inputs``: what the command reads. Raises
    :class:`OutputError` for an output that is an input or another output, by any link or spelling.
    """
    given = [(flag, path) for flag, path in outputs.items() if path is not None]
    for flag, path in given:
        if not (_is_special(path) or _can_be_replaced(path)):
            raise OutputError(
                f"{flag} {path} cannot be written: name a file in a folder that exists"
            )
        for read in filter(None, inputs):
            if _is_same(path, read):
                raise OutputError(f"{flag} {path} is {read}, which is read: name another file")
    for (flag, path), (other_flag, other) in combinations(given, 2):
        if _is_same(path, other) and not _is_special(path):
            raise OutputError(
                f"{flag} {path} and {other_flag} {other} are the same file: name another file"
            )


def write_whole(flag: str, path: Path, content: str | bytes) -> None:
    """Replace a file by ``content`` in one step, or leave it as it is; ``flag``: what named it.

    A link keeps pointing to its file, and a file keeps its mode. A device or a pipe is written to.
    Raises :class:`OutputError`.
    """
    if isinstance(content, str):
        content = content.encode("utf-8", errors="backslashreplace")
    try:
        if _is_special(path):
            path.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise OutputError(
            f"{flag} {path} cannot be written ({error.strerror}): name a file in a folder that "
            "exists and has space"
        ) from None


def write_json(
    path: Path | None, made: Any, *, default: Callable[[Any], Any] | None = None
) -> None:
    """Write what ``--json`` asks for, if it does; ``default``: as of :func:`json.dumps`.

    A number that is not finite becomes None. Raises :class:`OutputError`.
    """
    if path is not None:
        from megatron_lossagg.weigh.report import finite

        text = json.dumps(finite(made), indent=1, allow_nan=False, default=default)
        write_whole("--json", path, text + "\n")


def _replace(target: Path, content: bytes) -> None:
    partial = target.with_name(f".lossagg-{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            file.write(content)
        if _kind(target) is not None:
            shutil.copymode(target, partial)
        partial.replace(target)
    except BaseException:  # an interrupt too
        partial.unlink(missing_ok=True)
        raise


def is_file(path: Path) -> bool:
    """Tell whether the path leads to a regular file; False if it cannot be known."""
    return _kind(path) == stat.S_IFREG


def _kind(path: Path) -> int | None:
    """Return what ``stat`` says the path leads to, such as ``S_IFREG``; None if to nothing."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except OSError:
        return None


def _is_special(path: Path) -> bool:
    """Tell whether it is a device, a pipe or the like, which cannot be replaced."""
    return _kind(path) not in (None, stat.S_IFREG, stat.S_IFDIR)


def _can_be_replaced(path: Path) -> bool:
    target = Path(os.path.realpath(path))
    return (
        _kind(target) in (None, stat.S_IFREG)
        and _kind(target.parent) == stat.S_IFDIR
        and os.access(target.parent, os.W_OK | os.X_OK)
        and (_kind(target) is None or os.access(target, os.W_OK))
    )


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)


class MissingPackageError(LossAggregationError, ImportError):
    """A package that is not installed; the message names the extra that installs it."""


def needed(name: str, *, by: str, extra: str) -> Any:
    """Import a module of an optional package; the error names who needs it and its extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise MissingPackageError(
            f"{by} needs {missing}, which is not installed: "
            f"pip install 'megatron-lossagg[{extra}]'",
            name=missing,
        ) from None
