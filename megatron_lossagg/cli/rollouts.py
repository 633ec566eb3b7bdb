"""Read recorded rollouts: each response's trained tokens, its prompt and its step.

A file has one record per response: JSON lines (``.jsonl``), Parquet, or a ``torch.save`` file
(``.pt``). docs/plot.md tells which framework writes which file, and the release that was read.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lossagg.cli.extras import MissingPackageError, needed
from megatron_lossagg.cli.files import is_file, printable
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.verify.text import number_of

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["COLUMNS", "Rollouts", "RolloutsError", "add_reading_arguments", "read_rollouts"]

_Measure = Callable[[str], int]
_MOST = 2**53
"""Integers up to it are exact in the float64 of a weight, and where pandas makes floats of them."""
_DEEPEST = 64
"""How deep an id's lists may be nested; messages have five. Deeper, it would depend on Python."""


class RolloutsError(LossAggregationError, ValueError):
    """A file of rollouts that cannot be read; the message names file, record and fault."""


# The values of a record: each function raises something for what it does not take.


def _mask(value: object) -> Any:
    bits = np.asarray(value)
    if bits.ndim != 1 or bits.dtype.kind not in "biuf" or not np.isin(bits, (0, 1)).all():
        raise ValueError
    return bits


def _count(value: Any) -> int:
    value = _id(value)
    if not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError
    return value


def _length(value: Any) -> int:
    """Return a count, or how many token ids a response has."""
    value = _plain(value)
    if isinstance(value, list) and all(type(one) is int for one in value):
        return len(value)
    return _count(value)


def _texts(value: Any) -> list[str]:
    """Return a text, or what the assistant says in a list of messages."""
    if isinstance(value, str):
        return [value]
    messages = _plain(value)
    if any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        raise ValueError
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    if not all(isinstance(text, str) for text in said):
        raise TypeError
    return said


def _id(value: Any) -> str | int:
    value = _plain(value)
    if isinstance(value, list | dict):  # messages or token ids
        _check_depth(value)
        return json.dumps(value, sort_keys=True, default=_plain)
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST:
        value = int(value)  # pandas makes floats of a column in which some are missing
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        of_dicts = [inner for one in level if isinstance(one, dict) for inner in one.values()]
        level = of_dicts + [inner for one in level if isinstance(one, list) for inner in one]
        if not level:
            return
    raise ValueError


def _plain(value: Any) -> Any:
    """Return what a tensor or an array holds, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


_AN_ID = "a string, an integer, a list or an object"
_A_COUNT = "an integer from 0 to 2^53"
COLUMNS: Mapping[str, tuple[tuple[str, ...], Callable[[Any], Any], str]] = {
    "mask": (
        ("mask", "loss_mask", "response_mask", "completion_mask"),
        _mask,
        "a list of 0 and 1 per token",
    ),
    "lengths": (
        ("response_length", "response_ids", "completion_ids"),
        _length,
        f"{_A_COUNT}, or a list of token ids",
    ),
    "text": (
        ("output", "completion", "response", "messages"),
        _texts,
        "a text, or messages without tools: only the training run knows which of their tokens it "
        "trains. Record 'mask'",
    ),
    "prompt": (("prompt_id", "group_index", "input", "prompt"), _id, _AN_ID),
    "sample": (("sample_id", "rollout_id"), _id, _AN_ID),
    "step": (("step",), _count, _A_COUNT),
    "removed": (("remove_sample",), bool, "true or false"),
}
"""Of each column its usual names, how a value is read, and what is expected. The names are our own,
those of slime and miles, verl and TRL, and SFT's ``messages``; the first one that the files have
counts, unless ``--column`` names a different one.
"""


_FILES = {
    ".jsonl": "JSON lines",
    ".parquet": "Parquet",
    ".pt": "--save-debug-rollout-data of slime or miles with tensors and plain values, which are "
    "all that torch loads without running code of the file",
}


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what reading a file may need to be told."""
    group = parser.add_argument_group("recorded rollouts")
    group.add_argument(
        "--column",
        type=_named,
        action="append",
        default=[],
        metavar="COLUMN=NAME",
        help=f"the name of a column in the files, if it is not a usual one: {', '.join(COLUMNS)}",
    )
    lengths = group.add_mutually_exclusive_group()
    lengths.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="for files with texts and no lengths (verl, TRL, SFT): encode them again with this "
        "tokenizer.json",
    )
    lengths.add_argument(
        "--characters",
        action="store_true",
        help="for the same files: count characters instead of tokens",
    )


def _named(text: str) -> tuple[str, str]:
    column, _, name = text.partition("=")
    if column not in COLUMNS or not name:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected such as lengths=NAME: one of {', '.join(COLUMNS)}"
        )
    return column, name


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """What was read."""

    steps: tuple[DataFrame, ...]
    """Those with an active token. Columns, int64: ``active_tokens``; ``prompt`` if the file has
    prompts; ``sample`` if it has sample ids, else each sequence is its own sample."""
    masked_steps: int
    """How many steps have no active token; they train nothing and are left out."""
    unit: str
    """What a length counts: ``token`` or, if asked for, ``character``."""
    caveat: str
    """Why lengths that were measured on texts are not those of the trained tokens, or nothing."""
    source: str
    """File names, and the name that each column has in them."""


def read_rollouts(paths: Sequence[Path], args: argparse.Namespace) -> Rollouts:
    """Read files of rollouts; ``args``: of :func:`add_reading_arguments`.

    Records without ``step`` are one step per file. Raises :class:`RolloutsError`.
    """
    for path in paths:
        _check_file(path)
    pandas = needed("pandas", by="reading recorded rollouts", extra="plot")
    measure, caveat = _measure(args)
    frame = pandas.concat(map(_read, paths), keys=range(len(paths)), names=["file", "place"])
    records = _Records(frame, dict(args.column))
    columns = {"active_tokens": _active_tokens(records, measure)}
    if "prompt" in records.names:
        prompts = records.read("prompt")
        if None in prompts:
            name = records.names["prompt"]
            raise records.error(prompts.index(None), f"got no {name}: give it in every record")
        columns["prompt"] = _numbered(prompts)
    if "sample" in records.names:
        samples = enumerate(records.read("sample"))  # a record without an id is its own sample
        columns["sample"] = _numbered((n,) if one is None else one for n, one in samples)
    columns["step"] = [step or 0 for step in records.read("step")]
    read = pandas.DataFrame(columns, index=frame.index)
    found = [step for _, step in read.groupby(["file", "step"])]
    trained = tuple(step for step in found if step["active_tokens"].any())
    names = printable(paths[0].name)
    if len(paths) > 1:
        names += f" and {number_of(len(paths) - 1, 'more file')}"
    if not trained:
        raise RolloutsError(
            f"{names}: got {number_of(len(read), 'response')} and no active token, so that every "
            "weight is 0: give a file with a response that is trained"
        )
    named = ", ".join(
        column if column == name else f"{column} from {name}"
        for column, name in records.names.items()
    )
    return Rollouts(
        steps=trained,
        masked_steps=len(found) - len(trained),
        unit="character" if args.characters else "token",
        caveat=caveat,
        source=f"{names}: {printable(named)}",
    )


def _numbered(ids: Iterable[Hashable]) -> list[int]:
    """Number ids from 0, in the order in which they occur."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(one, len(numbers)) for one in ids]


def _active_tokens(records: _Records, measure: _Measure | None) -> list[int]:
    """Count each record's trained tokens: of its mask, else its length, else its text."""
    masks, lengths = records.read("mask"), records.read("lengths")
    texts = records.read("text") if measure is not None else [None] * len(masks)
    found = []
    for number, (mask, length, text) in enumerate(zip(masks, lengths, texts, strict=True)):
        if mask is not None and length not in (None, len(mask)):
            raise records.error(
                number,
                f"{records.names['mask']} has {number_of(len(mask), 'value')}, expected "
                f"{records.names['lengths']}, {length}",
            )
        if mask is not None:
            length = int(np.count_nonzero(mask))
        if measure is not None and length is not None:
            raise records.error(
                number, "got a length, and --tokenizer or --characters: leave the flag out"
            )
        if measure is not None and text is not None:
            length = sum(map(measure, text))
        if length is None:
            raise records.error(
                number,
                f"got no length in {records.listed}: give 'mask' (0 or 1 per response token) or "
                "'response_length', or its name with --column lengths=NAME. How many tokens a text "
                "has depends on its tokenizer: give --tokenizer tokenizer.json of the model, or "
                "--characters",
            )
        found.append(length)
    for number, is_removed in enumerate(records.read("removed")):
        if is_removed:  # slime trains on no token of it
            found[number] = 0
    return found


def _measure(args: argparse.Namespace) -> tuple[_Measure | None, str]:
    """Return what measures a text, if that was asked for, and the caveat."""
    if args.characters:
        return len, "Lengths are characters, not tokens: shares of the trained tokens differ."
    if args.tokenizer is None:
        return None, ""
    tokenizers = needed("tokenizers", by="--tokenizer", extra="tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.tokenizer))
    except Exception as error:  # the library raises Exception itself
        raise RolloutsError(
            f"--tokenizer {args.tokenizer} cannot be read ({_short(error)}): give the "
            "tokenizer.json of the model"
        ) from None
    return (
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        "Lengths are those of texts encoded again: without special tokens such as the end, and "
        "not always the tokens that were sampled.",
    )


class _Records:
    """The records of all files, and which of their columns are read."""

    def __init__(self, frame: DataFrame, given: Mapping[str, str]) -> None:
        self._frame = frame
        self.listed = ", ".join(_short(name) for name in list(self._frame)[:8])
        self.names: dict[str, str] = {}
        """In the files, of the columns that they have."""
        for column, (usual, _, _) in COLUMNS.items():
            names = [given[column]] if column in given else usual
            for name in names:
                if name in self._frame and self._frame[name].notna().any():
                    self.names.setdefault(column, name)
            if column in given and column not in self.names:
                raise RolloutsError(
                    f"--column {column}={given[column]}: got {self.listed}, expected one of these"
                )

    def read(self, column: str) -> list[Any]:
        """Read a column: None for a record that lacks it."""
        values = [None] * len(self._frame)
        if column in self.names:
            name, (_, read, expected) = self.names[column], COLUMNS[column]
            found = self._frame[name]
            for number, (value, is_missing) in enumerate(zip(found, found.isna(), strict=True)):
                if is_missing:
                    continue
                try:
                    values[number] = read(value)
                except Exception:  # of an endless list, a tensor without data
                    text = f"{name} is {_short(value)}, expected {expected}"
                    raise self.error(number, text) from None
        return values

    def error(self, number: int, text: str) -> RolloutsError:
        """Return the error of a record."""
        return RolloutsError(f"{self._frame.index[number][1]}: {text}")


def _check_file(path: Path) -> None:
    if path.suffix not in _FILES:
        raise RolloutsError(f"{path}: got the ending {path.suffix!r}, expected {', '.join(_FILES)}")
    if not is_file(path):
        raise RolloutsError(f"got {path}, which is not a file: give a file of rollouts")


def _read(path: Path) -> DataFrame:
    """Read a file, as objects, so that no number is rounded next to a missing one."""
    pandas = needed("pandas", by=str(path), extra="plot")
    try:
        if path.suffix == ".jsonl":
            frame = pandas.read_json(path, lines=True, dtype=False, convert_axes=False)
        elif path.suffix == ".parquet":
            needed("pyarrow", by=str(path), extra="parquet")
            frame = pandas.read_parquet(path, engine="pyarrow", dtype_backend="numpy_nullable")
        else:
            import torch

            dump = torch.load(path, map_location="cpu", weights_only=True)
            frame = pandas.DataFrame(dump["samples"], dtype=object)
    except MissingPackageError:
        raise
    except Exception as error:  # of pandas, pyarrow and torch: any
        unsafe = re.search(r"GLOBAL (\S+)", str(error))  # what torch refuses to load
        reason = f"it holds {unsafe[1]}" if unsafe else _short(error)
        raise RolloutsError(
            f"{path} cannot be read ({reason}), expected {_FILES[path.suffix]}. You can also "
            "record one line "
            '{"prompt_id": 7, "response_length": 512} per response'
        ) from None
    if frame.empty:
        raise RolloutsError(f"{path}: got no records, expected one per response")
    name = printable(str(path))
    places = [f"{name}, record {number}" for number in range(1, len(frame) + 1)]
    return frame.astype(object).set_axis(places)


def _short(value: object) -> str:
    """Write a value for a message, in 60 characters at most."""
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except Exception:  # nested too deeply, or of a class that cannot write it
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
