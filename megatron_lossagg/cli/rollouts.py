"""Read recorded rollouts: each response's trained tokens, its prompt and its step.

One record per response, in JSON lines (``.jsonl``), a ``torch.save`` file (``.pt``) or Parquet.
The first name that a record has counts. docs/plot.md lists the names and what is done without one,
which framework writes which file, and the release or commit that was read.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_lossagg.cli.extras import needed
from megatron_lossagg.cli.files import is_file, printable
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.reduction.sequences import MOST_TOKENS
from megatron_lossagg.verify.text import number_of

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Rollouts", "RolloutsError", "add_reading_arguments", "read_rollouts"]

_Record = Mapping[str, Any]
_Measure = Callable[[str], int]
_T = TypeVar("_T")
_LENGTHS = ("mask", "loss_mask", "response_length")
_TEXTS = ("output", "completion")
_PROMPTS = ("prompt_id", "group_index", "input", "prompt")
_SAMPLES = ("sample_id", "rollout_id")
_NAMES = {*_LENGTHS, *_TEXTS, *_PROMPTS, *_SAMPLES, "step", "remove_sample"}


class RolloutsError(LossAggregationError, ValueError):
    """A file of rollouts that cannot be read; the message names file, record and fault."""


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
    """File names, and what the lengths and prompts were read from."""


def add_reading_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add what reading a file may need to be told; return the group."""
    group = parser.add_argument_group("recorded rollouts")
    lengths = group.add_mutually_exclusive_group()
    lengths.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="for files with texts and no lengths (verl, TRL): encode them again with this "
        "tokenizer.json",
    )
    lengths.add_argument(
        "--characters",
        action="store_true",
        help="for the same files: count characters instead of tokens",
    )
    group.add_argument(
        "--trust-pickle",
        action="store_true",
        help="load a .pt file that holds more than tensors and plain values, such as NumPy arrays; "
        "it may run code",
    )
    return group


def read_rollouts(paths: Sequence[Path], args: argparse.Namespace) -> Rollouts:
    """Read files of rollouts; ``args``: of :func:`add_reading_arguments`.

    Records without ``step`` are one step per file. Raises :class:`RolloutsError`.
    """
    pandas = needed("pandas", by="reading recorded rollouts", extra="plot")
    measure = _measure(args)
    rows = [
        {"file": number, "place": place, **_row(record, place, measure, args)}
        for number, path in enumerate(paths)
        for place, record in _records(path, trusted=args.trust_pickle)
    ]
    frame = pandas.DataFrame(rows, dtype=object)  # ids are not rounded to floats
    prompts_from = rows[0]["prompts from"]
    for row in rows:
        if row["prompts from"] != prompts_from:
            raise RolloutsError(
                f"{row['place']}: got its prompt from {row['prompts from']}, expected "
                f"{prompts_from} as in the first record: give the same names in every record"
            )
    for column in ("sample", "prompt"):
        if frame[column].isna().all():
            del frame[column]
        else:  # a record without an id is a sample of its own
            own = pandas.Series([("own", n) for n in frame.index], dtype=object)
            frame[column] = pandas.factorize(frame[column].where(frame[column].notna(), own))[0]
    frame["active_tokens"] = frame["active_tokens"].astype("int64")
    steps = [step for _, step in frame.groupby(["file", "step"])]
    active = tuple(step for step in steps if step["active_tokens"].any())
    names = printable(paths[0].name)
    if len(paths) > 1:
        names += f" and {number_of(len(paths) - 1, 'more file')}"
    if not active:
        raise RolloutsError(
            f"{names}: got {number_of(len(rows), 'response')} and no active token, so that every "
            "weight is 0: give a file with a response that is trained"
        )
    caveat = ""
    if args.characters:
        caveat = "Lengths are characters, not tokens: shares of the trained tokens differ."
    elif measure is not None:
        caveat = (
            "Lengths are those of texts encoded again: without special tokens such as the end, and "
            "not always the tokens that were sampled."
        )
    lengths_from = " and ".join(frame["lengths from"].unique())
    return Rollouts(
        steps=active,
        masked_steps=len(steps) - len(active),
        unit="character" if args.characters else "token",
        caveat=caveat,
        source=f"{names}: lengths from {lengths_from}, prompts from {prompts_from}",
    )


# The files


def _records(path: Path, *, trusted: bool) -> list[tuple[str, object]]:
    """Read every record with its place, such as ``a.jsonl, line 3``; ``trusted``: of pickles."""
    if not is_file(path):
        raise RolloutsError(f"got {path}, which is not a file: give a file of rollouts")
    if path.suffix == ".jsonl":
        found = [(f"{path}, line {n}", record) for n, record in _json_lines(path)]
    elif path.suffix in (".pt", ".parquet"):
        is_torch = path.suffix == ".pt"
        records = _samples_of_torch(path, trusted=trusted) if is_torch else _rows_of_parquet(path)
        found = [(f"{path}, record {n}", record) for n, record in enumerate(records)]
    else:
        raise RolloutsError(
            f"{path}: got the ending {path.suffix!r}, expected .jsonl, .pt, .parquet"
        )
    if not found:
        raise RolloutsError(f"{path}: got no records, expected one per response")
    return found


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Read each line by itself: pandas' reader names no line, and takes broken ones."""
    number, line = 0, ""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except UnicodeDecodeError:
        raise RolloutsError(f"{path} is not UTF-8 text, expected JSON lines") from None
    except OSError as error:
        raise RolloutsError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # of an integer of too many digits
        raise RolloutsError(
            f"{path}, line {number}: got {_short(line.strip())}, expected one JSON object "
            f"({reason})"
        ) from None


def _samples_of_torch(path: Path, *, trusted: bool) -> list[object]:
    import torch

    try:
        dump = torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        reason = str(error).replace("\n", " ")
        unknown = reason.partition("GLOBAL ")[2].split(" ")[0] or "an object of its own"
        raise RolloutsError(
            f"{path}: got {unknown}, expected tensors and plain values, which are all that torch "
            "loads without running code of the file. If you trust who wrote it, give "
            '--trust-pickle; else record a line {"prompt_id": 7, "response_length": 512} per '
            "response"
        ) from None
    except Exception as error:  # of any library that a pickle names
        raise RolloutsError(
            f"{path} cannot be loaded by torch ({type(error).__name__}: {_short(str(error))})"
        ) from None
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list):
        raise RolloutsError(
            f"{path}: got {type(dump).__name__} without 'samples', expected what "
            "--save-debug-rollout-data of slime or miles writes"
        )
    return samples


def _rows_of_parquet(path: Path) -> list[object]:
    parquet = needed("pyarrow.parquet", by=str(path), extra="parquet")
    try:
        names = [name for name in parquet.read_schema(path).names if name in _NAMES]
        rows: list[object] = parquet.read_table(path, columns=names).to_pylist()
    except Exception as error:  # pyarrow's own errors, some of them OSError
        raise RolloutsError(f"{path} cannot be read as Parquet ({_short(str(error))})") from None
    return rows


# A record


def _row(
    record: object, place: str, measure: _Measure | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Read a record's length, ids and step, and the names that the first two were read from."""
    try:
        if not isinstance(record, Mapping):
            raise RolloutsError(f"got {_short(record)}, expected an object with names")
        length_from, active = _length(record, measure, args)
        prompt_from, sample_from = _first(record, _PROMPTS), _first(record, _SAMPLES)
        return {
            "step": _integer(record, "step") if record.get("step") is not None else 0,
            # slime trains on no token of a removed sample.
            "active_tokens": 0 if record.get("remove_sample") else active,
            "sample": None if sample_from is None else _id(record, sample_from),
            "prompt": None if prompt_from is None else _id(record, prompt_from),
            "lengths from": length_from,
            "prompts from": prompt_from or "nothing",
        }
    except RolloutsError as error:
        raise RolloutsError(f"{place}: {error}") from None


def _length(record: _Record, measure: _Measure | None, args: argparse.Namespace) -> tuple[str, int]:
    """Return what the length was read from, and the active tokens."""
    name, text = _first(record, _LENGTHS), _first(record, _TEXTS)
    if name is not None and measure is not None:
        flag = "--characters" if args.characters else "--tokenizer"
        raise RolloutsError(f"got a length ({name!r}) and {flag}: leave the flag out")
    if name == "response_length":
        return name, _integer(record, name)
    if name is not None:
        mask = _field(record, name, _mask, "a list of 0 and 1 per token")
        length = record.get("response_length")
        if length is not None and _integer(record, "response_length") != len(mask):
            raise RolloutsError(
                f"{name} has {number_of(len(mask), 'value')}, expected response_length, {length}"
            )
        return name, int(sum(mask))
    if text is None:
        listed = ", ".join(map(_short, list(record)[:8])) or "an empty record"
        raise RolloutsError(
            f"got {listed}, expected a length: give 'mask' (0 or 1 per response token) or "
            "'response_length'"
        )
    if measure is None:
        raise RolloutsError(
            f"got a text ({text!r}) and no length, and how many tokens a text has depends on its "
            "tokenizer. Give --tokenizer tokenizer.json of the model, or --characters"
        )

    def measured(value: Any) -> int:
        if isinstance(value, list):
            (message,) = value
            value = message["content"]
        if not isinstance(value, str):
            raise TypeError
        return measure(value)

    expected = (
        "a text that can be encoded, or one message with it: of several messages only the training "
        "run knows which tokens it trains. Record 'mask'"
    )
    return f"the text of {text!r}", _field(record, text, measured, expected)


def _measure(args: argparse.Namespace) -> _Measure | None:
    """Return what measures a text, if that was asked for."""
    if args.characters:
        return len
    if args.tokenizer is None:
        return None
    tokenizers = needed("tokenizers", by="--tokenizer", extra="tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.tokenizer))
    except Exception as error:  # the library raises Exception itself
        raise RolloutsError(
            f"--tokenizer {args.tokenizer} cannot be read ({_short(str(error))}): give the "
            "tokenizer.json of the model"
        ) from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _first(record: _Record, names: Iterable[str]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _field(record: _Record, name: str, read: Callable[[Any], _T], expected: str) -> _T:
    """Read one value of a record; ``read`` raises anything for what is not ``expected``."""
    try:
        return read(record[name])
    except Exception:  # of an endless list, a tensor without data, a tokenizer
        raise RolloutsError(f"{name} is {_short(record[name])}, expected {expected}") from None


def _integer(record: _Record, name: str) -> int:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOKENS:
            raise ValueError
        return value

    return _field(record, name, read, "an integer from 0 to 2^53")


def _id(record: _Record, name: str) -> str | int:
    def read(value: object) -> str | int:
        value = _plain(value)
        if isinstance(value, list | dict):  # messages or token ids
            return json.dumps(value, sort_keys=True, default=_in_json)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise TypeError
        return value

    return _field(record, name, read, "a string, an integer, a list or an object")


def _mask(value: object) -> list[float]:
    values = _plain(value)
    if not isinstance(values, list):
        raise TypeError
    if not all(isinstance(bit, int | float) and bit in (0, 1) for bit in values):
        raise ValueError
    return values


def _plain(value: Any) -> object:
    """Return what a tensor or an array holds, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _in_json(value: Any) -> object:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _short(value: object) -> str:
    """Write a value for a message, in 60 characters at most."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, or of a class that cannot write it
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
