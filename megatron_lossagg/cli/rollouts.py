"""Read recorded rollouts: each response's trained tokens, its prompt and its step.

A file has one record per response: JSON lines (``.jsonl``), Parquet, or a ``torch.save`` file
(``.pt``). docs/plot.md tells which framework writes which file, and the release that was read.
"""

from __future__ import annotations

import argparse
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from megatron_lossagg.cli.files import MissingPackageError, is_file, needed, printable
from megatron_lossagg.errors import LossAggregationError, meant
from megatron_lossagg.verify.text import number_of

if TYPE_CHECKING:
    from pandas import DataFrame

_Measure = Callable[[str], int]


class RolloutsError(LossAggregationError, ValueError):
    """A file of rollouts that cannot be read; the message names file, record and fault."""


# How a column is read: each function returns None, or raises, for a value that is none of it.


def _mask(value: Any) -> Any:
    is_mask = isinstance(value, list) and value.count(0) + value.count(1) == len(value)
    return value if is_mask else None


def _count(value: Any) -> Any:
    is_exact = type(value) is int and 0 <= value <= 2**53  # in the float64 of a weight
    return value if is_exact else None


def _length(value: Any) -> Any:
    """Return a count, or how many token ids a response has."""
    is_ids = isinstance(value, list) and all(type(one) is int for one in value)
    return len(value) if is_ids else _count(value)


def _texts(value: Any) -> Any:
    """Return a text, or what the assistant says in a list of messages."""
    if isinstance(value, str):
        return [value]
    if any(message["role"] == "tool" or message.get("tool_calls") for message in value):
        return None
    said = [message["content"] for message in value if message["role"] == "assistant"]
    return said if all(isinstance(text, str) for text in said) else None


def _id(value: Any) -> Any:
    is_id = type(value) in (str, int, list, dict)  # messages, token ids
    return json.dumps(value, sort_keys=True) if is_id else None


def _is_removed(value: Any) -> Any:
    return value if isinstance(value, bool) else None


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
    "removed": (("remove_sample",), _is_removed, "true or false"),
}
"""Of each column its usual names, how a value is read, and what is expected. The names are our own,
those of slime and miles, verl and TRL, and SFT's ``messages``; the first one that the files have
counts, unless ``--column`` names a different one.
"""


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
            f"{meant(column, COLUMNS)}"
        )
    return column, name


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """What was read."""

    steps: Sequence[DataFrame]
    """Those with an active token. Columns, int64: ``active_tokens``, ``sample``, and ``prompt`` if
    the files have prompts."""
    unit: str
    """What a length counts: ``token`` or, if asked for, ``character``."""
    notes: Sequence[str]
    """What was read, and what a reader has to know of it."""


def read_rollouts(paths: Sequence[Path], args: argparse.Namespace) -> Rollouts:
    """Read files of rollouts; ``args``: of :func:`add_reading_arguments`.

    Records without ``step`` are one step per file. Raises :class:`RolloutsError`.
    """
    measure, caveat = _measure(args)
    files = [_read(path) for path in paths]
    pandas = needed("pandas", by="lossagg plot", extra="plot")
    read = paths[0].name
    if len(paths) > 1:
        read += f" and {number_of(len(paths) - 1, 'more file')}"
    names = _names(chain.from_iterable(files), dict(args.column))
    if measure is None:
        names.pop("text", None)
    elif name := names.get("mask", names.get("lengths")):
        raise RolloutsError(
            f"{read}: got {name!r}, and --tokenizer or --characters: leave the flag out"
        )
    responses: list[dict[str, Any]] = []
    for number, (path, records) in enumerate(zip(paths, files, strict=True)):
        for place, record in enumerate(records, 1):
            try:
                response = _response(record, names, measure)
            except RolloutsError as error:
                raise RolloutsError(f"{path}, record {place}: {error}") from None
            own = {"file": number, "step": 0, "sample": len(responses)}
            responses.append({**own, **response})
    table = pandas.DataFrame(responses)
    for column in {"prompt", "sample"} & {*table}:
        table[column] = table[column].factorize()[0]
    found = [step for _, step in table.groupby(["file", "step"])]
    trained = [step for step in found if step["active_tokens"].any()]
    if not trained:
        raise RolloutsError(
            f"{read}: got {number_of(len(table), 'response')} and no active token, so that every "
            "weight is 0: give a file with a response that is trained"
        )
    named = ", ".join(c if c == name else f"{c} from {name}" for c, name in names.items())
    notes = [printable(f"Read from {read}: {named}."), *caveat]
    if masked := len(found) - len(trained):
        notes.append(f"{number_of(masked, 'step')} with no active token: left out.")
    return Rollouts(steps=trained, unit="character" if args.characters else "token", notes=notes)


def _response(
    record: Mapping[str, Any], names: Mapping[str, str], measure: _Measure | None
) -> dict[str, Any]:
    """Return a record's active tokens, and its prompt, sample and step if it has them."""
    values = {column: _value(record, column, name) for column, name in names.items()}
    mask, length = values.pop("mask", None), values.pop("lengths", None)
    texts, is_removed = values.pop("text", None), values.pop("removed", None)
    if mask is not None:
        if length not in (None, len(mask)):
            raise RolloutsError(
                f"{names['mask']} has {number_of(len(mask), 'value')}, expected "
                f"{names['lengths']}, {length}"
            )
        length = mask.count(1)
    elif measure is not None and texts is not None:
        length = sum(map(measure, texts))
    if length is None:
        raise RolloutsError(
            f"got no length in {reprlib.repr([*record])}: give 'mask' (0 or 1 per response token) "
            "or 'response_length', or its name with --column lengths=NAME. How many tokens a text "
            "has depends on its tokenizer: give --tokenizer tokenizer.json of the model, or "
            "--characters"
        )
    if "prompt" in values and values["prompt"] is None:
        raise RolloutsError(f"got no {names['prompt']}: give it in every record")
    given = {column: value for column, value in values.items() if value is not None}
    # slime trains on no token of a removed sample
    return {**given, "active_tokens": 0 if is_removed else length}


def _value(record: Mapping[str, Any], column: str, name: str) -> Any:
    """Read a value; None if the record lacks it."""
    _, read, expected = COLUMNS[column]
    if (value := record.get(name)) is None:
        return None
    found = None
    with suppress(Exception):  # of a message without a role, a tensor without data
        found = read(value.tolist() if hasattr(value, "tolist") else value)
    if found is None:
        raise RolloutsError(f"{name} is {reprlib.repr(value)}, expected {expected}")
    return found


def _names(records: Iterable[Mapping[str, Any]], given: Mapping[str, str]) -> dict[str, str]:
    """Return the name that each column has in the files; columns that they lack are left out."""
    found = {name: 0 for record in records for name, one in record.items() if one is not None}
    names = {}
    for column, (usual, _, _) in COLUMNS.items():
        known = [given[column]] if column in given else usual
        name = next((name for name in known if name in found), None)
        if name is not None:
            names[column] = name
        elif column in given:
            raise RolloutsError(
                f"--column {column}={known[0]}: got {reprlib.repr([*found])}, expected one of these"
                f"{meant(known[0], found)}"
            )
    return names


def _measure(args: argparse.Namespace) -> tuple[_Measure | None, list[str]]:
    """Return what measures a text, if that was asked for, and what a reader has to know of it."""
    if args.characters:
        return len, ["Lengths are characters, not tokens: shares of the trained tokens differ."]
    if args.tokenizer is None:
        return None, []
    tokenizers = needed("tokenizers", by="--tokenizer", extra="tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.tokenizer))
    except Exception as error:  # the library raises Exception itself
        raise RolloutsError(
            f"--tokenizer {args.tokenizer} cannot be read ({shorten(str(error), 80)}): give the "
            "tokenizer.json of the model"
        ) from None
    return (
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        [
            "Lengths are those of texts encoded again: without special tokens such as the end, and "
            "not always the tokens that were sampled."
        ],
    )


_FILES = {
    ".jsonl": "JSON lines",
    ".parquet": "Parquet",
    ".pt": "--save-debug-rollout-data of slime or miles with tensors and plain values, which are "
    "all that torch loads without running code of the file",
}


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file, as plain values and tensors."""
    if path.suffix not in _FILES:
        raise RolloutsError(f"{path}: got the ending {path.suffix!r}, expected {', '.join(_FILES)}")
    if not is_file(path):
        raise RolloutsError(f"got {path}, which is not a file: give a file of rollouts")
    found: list[dict[str, Any]] = []
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for line in filter(str.strip, lines):
                    found.append(dict(json.loads(line)))
        elif path.suffix == ".parquet":
            parquet = needed("pyarrow.parquet", by=str(path), extra="parquet")
            found = parquet.read_table(path).to_pylist()
        else:
            import torch

            dump = torch.load(path, map_location="cpu", weights_only=True)
            found = [dict(sample) for sample in dump["samples"]]
    except MissingPackageError:
        raise
    except Exception as error:  # of json, pyarrow and torch: any
        unsafe = re.search(r"GLOBAL (\S+)", str(error))  # what torch refuses to load
        reason = f"it holds {unsafe[1]}" if unsafe else shorten(str(error), 80)
        place = f", record {len(found) + 1}" if path.suffix == ".jsonl" else ""
        raise RolloutsError(
            f"{path}{place} cannot be read ({reason}), expected {_FILES[path.suffix]}. You can "
            'also record one line {"prompt_id": 7, "response_length": 512} per response'
        ) from None
    if not found:
        raise RolloutsError(f"{path}: got no records, expected one per response")
    return found
