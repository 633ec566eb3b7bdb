"""Read the files that rollouts are recorded in: JSON lines, a ``torch.save`` file, Parquet.

Each holds records, objects with names; ``rollouts`` has what the names mean.
"""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.files import is_file

__all__ = ["Record", "RolloutsError", "imported", "records", "short"]

Record = Mapping[str, Any]
_A_RECORD = 'one line or row {"prompt_id": 7, "response_length": 512} per response'


class RolloutsError(LossAggregationError, ValueError):
    """A file of rollouts that cannot be read; the message names file, record and fault."""


def records(path: Path, *, trusted: bool, names: Collection[str]) -> Iterator[tuple[str, Record]]:
    """Yield every record of a file with its place in words, such as ``a.jsonl, line 3``.

    ``trusted``: also load a pickle that torch's ``weights_only`` refuses; it may run code, and what
    it says of a NumPy array is believed. ``names``: the columns of a Parquet file that are read.
    Raises :class:`RolloutsError`.
    """
    if not is_file(path):
        raise RolloutsError(f"got {path}, which is not a file: give a file of rollouts")
    kinds: dict[str, Callable[[], Iterable[tuple[int, object]]]] = {
        ".jsonl": lambda: _json_lines(path),
        ".pt": lambda: enumerate(_samples_of_torch(path, trusted=trusted)),
        ".parquet": lambda: enumerate(_rows_of_parquet(path, names)),
    }
    kind = kinds.get(path.suffix)
    if kind is None:
        raise RolloutsError(
            f"{path}: got the ending {path.suffix!r}, expected {', '.join(kinds)}: rename it, or "
            f"write {_A_RECORD}"
        )
    word = "line" if path.suffix == ".jsonl" else "record"
    for number, record in kind():
        place = f"{path}, {word} {number}"
        if not isinstance(record, Mapping):
            raise RolloutsError(f"{place}: got {short(record)}, expected an object with names")
        yield place, record


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except OSError as error:
        raise RolloutsError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise RolloutsError(f"{path} is not UTF-8 text, expected JSON lines") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        elif isinstance(error, RecursionError):
            reason = "nested too deeply"
        else:
            reason = str(error).partition(";")[0]  # an integer of too many digits
        raise RolloutsError(
            f"{path}, line {number}: got {short(line.strip())}, expected one JSON object ({reason})"
        ) from None


def _samples_of_torch(path: Path, *, trusted: bool) -> Sequence[object]:
    import torch

    try:
        dump = torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        reason = str(error).replace("\n", " ")
        unknown = reason.partition("GLOBAL ")[2].split(" ")[0] or "an object of its own"
        raise RolloutsError(
            f"{path}: got {unknown}, expected tensors and plain values, which are all that torch "
            "loads without running code of the file. If you trust who wrote it, give "
            f"--trust-pickle; else save the rollouts as JSON lines or Parquet, {_A_RECORD}"
        ) from None
    except Exception as error:  # of any library that a pickle names
        raise RolloutsError(
            f"{path} cannot be loaded by torch ({type(error).__name__}: {short(str(error))}): "
            "give what --save-debug-rollout-data of slime or miles writes"
        ) from None
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list):
        raise RolloutsError(
            f"{path}: got {type(dump).__name__} without 'samples', expected what "
            "--save-debug-rollout-data of slime or miles writes"
        )
    return samples


def _rows_of_parquet(path: Path, wanted: Collection[str]) -> Sequence[object]:
    imported("pyarrow", str(path))
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        names = [name for name in parquet.read_schema(path).names if name in wanted]
        rows: list[object] = parquet.read_table(path, columns=names).to_pylist()
    except Exception as error:  # pyarrow's own errors, some of them OSError
        raise RolloutsError(
            f"{path} cannot be read as Parquet ({short(str(error))}): give a file that the "
            "training run has finished"
        ) from None
    return rows


def imported(name: str, wanted_by: str) -> Any:
    """Import an optional package; the error names what wanted it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise RolloutsError(
            f"{wanted_by} needs the package {name}, which is not installed: pip install {name}"
        ) from None


def short(value: object) -> str:
    """Write a value for a message, in 60 characters at most."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, or of a class that cannot write it
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
