"""Read recorded rollouts: each response's trained tokens, its prompt and its step.

One record per response, in JSON lines (``.jsonl``), a ``torch.save`` file (``.pt``) or Parquet.
The first name that a record has counts:

======== ============================================== ==========================================
field    names                                          without it
======== ============================================== ==========================================
length   ``mask``, ``loss_mask``, ``response_length``   the text is measured, if asked to; then
                                                        no record may have a length
text     ``output``, ``completion``                     an error
prompt   ``prompt_id``, ``group_index``, ``input``,     there is no ``prompt_mean``
         ``prompt``
sample   ``sample_id``, ``rollout_id``                  each record is a sample of its own
step     ``step``                                       a file is one step
======== ============================================== ==========================================

docs/plot.md says which framework writes which file, and the release or commit that was read.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.extras import needed
from megatron_lossagg.files import is_file, printable
from megatron_lossagg.sequences import MOST_TOKENS
from megatron_lossagg.text import number_of

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Rollouts", "RolloutsError", "add_reading_arguments", "read_rollouts"]

_Record = Mapping[str, Any]
_MASKS = ("mask", "loss_mask")
_LENGTHS = (*_MASKS, "response_length")
_TEXTS = ("output", "completion")
_PROMPTS = ("prompt_id", "group_index", "input", "prompt")
_SAMPLES = ("sample_id", "rollout_id")
_NAMES = {*_LENGTHS, *_TEXTS, *_PROMPTS, *_SAMPLES, "step", "remove_sample"}
_A_RECORD = 'one line or row {"prompt_id": 7, "response_length": 512} per response'


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
    rows: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        num_before = len(rows)
        for place, record in _records(path, trusted=args.trust_pickle):
            row = {"file": number, **_row(record, place, measure, args)}
            prompts, first = row["prompts from"], (rows or [row])[0]["prompts from"]
            if prompts != first:
                raise RolloutsError(
                    f"{place}: got its prompt from {prompts}, expected {first} as in the record "
                    "before it: give the same names in every record"
                )
            rows.append(row)
        if len(rows) == num_before:
            raise RolloutsError(f"{path}: got no records, expected one per response")
    frame = pandas.DataFrame({name: [row[name] for row in rows] for name in ("file", "step")})
    frame["active_tokens"] = [row["active_tokens"] for row in rows]
    for column in ("sample", "prompt"):
        ids = [("own", n) if row[column] is None else row[column] for n, row in enumerate(rows)]
        if any(row[column] is not None for row in rows):
            frame[column] = pandas.factorize(pandas.Series(ids, dtype=object))[0]
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
    lengths_from = " and ".join(dict.fromkeys(row["lengths from"] for row in rows))
    caveat = ""
    if args.characters:
        caveat = "Lengths are characters, not tokens: shares of the trained tokens differ."
    elif measure is not None:
        caveat = (
            "Lengths are those of texts encoded again: without special tokens such as the end, and "
            "not always the tokens that were sampled."
        )
    return Rollouts(
        steps=active,
        masked_steps=len(steps) - len(active),
        unit="character" if args.characters else "token",
        caveat=caveat,
        source=f"{names}: lengths from {lengths_from}, prompts from {rows[0]['prompts from']}",
    )


# The files


def _records(path: Path, *, trusted: bool) -> Iterator[tuple[str, _Record]]:
    """Yield every record with its place, such as ``a.jsonl, line 3``; ``trusted``: of pickles."""
    if not is_file(path):
        raise RolloutsError(f"got {path}, which is not a file: give a file of rollouts")
    kinds: dict[str, Callable[[], Iterable[tuple[int, object]]]] = {
        ".jsonl": lambda: _json_lines(path),
        ".pt": lambda: enumerate(_samples_of_torch(path, trusted=trusted)),
        ".parquet": lambda: enumerate(_rows_of_parquet(path)),
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
            raise RolloutsError(f"{place}: got {_short(record)}, expected an object with names")
        yield place, record


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Read each line by itself: pandas' reader names no line, and takes broken ones."""
    number, line = 0, ""
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
        reason = str(error).partition(";")[0]  # of an integer of too many digits
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        elif isinstance(error, RecursionError):
            reason = "nested too deeply"
        raise RolloutsError(
            f"{path}, line {number}: got {_short(line.strip())}, expected one JSON object "
            f"({reason})"
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
            f"{path} cannot be loaded by torch ({type(error).__name__}: {_short(str(error))}): "
            "give what --save-debug-rollout-data of slime or miles writes"
        ) from None
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list):
        raise RolloutsError(
            f"{path}: got {type(dump).__name__} without 'samples', expected what "
            "--save-debug-rollout-data of slime or miles writes"
        )
    return samples


def _rows_of_parquet(path: Path) -> Sequence[object]:
    parquet = needed("pyarrow.parquet", by=str(path), extra="parquet")
    try:
        names = [name for name in parquet.read_schema(path).names if name in _NAMES]
        rows: list[object] = parquet.read_table(path, columns=names).to_pylist()
    except Exception as error:  # pyarrow's own errors, some of them OSError
        raise RolloutsError(
            f"{path} cannot be read as Parquet ({_short(str(error))}): give a file that the "
            "training run has finished"
        ) from None
    return rows


# A record


def _row(
    record: _Record, place: str, measure: Callable[[str], int] | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Read a record's length, ids and step, and the names that the first two were read from."""
    length_from = _first(record, _LENGTHS)
    prompt_from, sample_from = _first(record, _PROMPTS), _first(record, _SAMPLES)
    if length_from is not None and measure is not None:
        flag = "--characters" if args.characters else "--tokenizer"
        raise RolloutsError(
            f"{place}: got a length ({length_from!r}) and {flag}, expected the flag only for "
            "records with texts and no lengths: leave it out, or give only such records"
        )
    if length_from is None:
        length_from, active = _measured(record, place, measure, args)
    else:
        given = record.get("response_length")
        active = 0 if given is None else _integer(record, "response_length", place)
        if length_from in _MASKS:
            length = None if given is None else active
            active = _sum_of_mask(record[length_from], f"{place}: {length_from}", length)
    return {
        "step": 0 if record.get("step") is None else _integer(record, "step", place),
        # slime trains on no token of a removed sample.
        "active_tokens": 0 if record.get("remove_sample") else active,
        "sample": None if sample_from is None else _id(record, sample_from, place),
        "prompt": None if prompt_from is None else _id(record, prompt_from, place),
        "lengths from": length_from,
        "prompts from": prompt_from or "nothing",
    }


def _measured(
    record: _Record, place: str, measure: Callable[[str], int] | None, args: argparse.Namespace
) -> tuple[str, int]:
    name = _first(record, _TEXTS)
    if name is None:
        listed = ", ".join(map(_short, list(record)[:8])) or "an empty record"
        raise RolloutsError(
            f"{place}: got {listed}, expected a length: give 'mask' (0 or 1 per response token) or "
            "'response_length'"
        )
    if measure is None:
        raise RolloutsError(
            f"{place}: got a text ({name!r}) and no length, and how many tokens a text has depends "
            "on its tokenizer. Give --tokenizer tokenizer.json of the model, or --characters to "
            "count characters instead"
        )
    text = record[name]
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], dict):
        text = text[0].get("content")
    if not isinstance(text, str):
        raise RolloutsError(
            f"{place}: {name} is {_short(record[name])}, expected a text or one message with a "
            "text: of several messages only the training run knows which tokens it trains. Record "
            "'mask'"
        )
    try:
        return f"the text of {name!r}", measure(text)
    except Exception as error:  # of the tokenizer's library
        raise RolloutsError(
            f"{place}: {name} is {_short(text)}, expected a text that --tokenizer "
            f"{args.tokenizer} can encode ({_short(str(error))})"
        ) from None


def _measure(args: argparse.Namespace) -> Callable[[str], int] | None:
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


def _integer(record: _Record, name: str, place: str) -> int:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOKENS:
        raise RolloutsError(
            f"{place}: {name} is {_short(value)}, expected an integer from 0 to 2^53"
        )
    return value


def _id(record: _Record, name: str, place: str) -> str | int:
    value = _plain(record[name], f"{place}: {name}")

    def in_json(part: object) -> object:
        return _plain(part, f"{place}: {name}") if hasattr(part, "tolist") else str(part)

    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    if isinstance(value, list | dict):  # messages or token ids
        with suppress(TypeError, ValueError, RecursionError):  # names of two kinds, endless, deep
            return json.dumps(value, sort_keys=True, default=in_json)
    raise RolloutsError(
        f"{place}: {name} is {_short(value)}, expected a string, an integer, a list or an "
        "object: give records to the same prompt or sample the same one"
    )


def _sum_of_mask(mask: object, name: str, length: int | None) -> int:
    values = _plain(mask, name)
    bits = isinstance(values, list) and all(
        isinstance(value, int | float) and value in (0, 1) for value in values
    )
    if not isinstance(values, list) or not bits:
        raise RolloutsError(f"{name} is {_short(values)}, expected a list of 0 and 1 per token")
    if length is not None and len(values) != length:
        raise RolloutsError(
            f"{name} has {number_of(len(values), 'value')}, expected response_length, which is "
            f"{length}: a mask has one value per response token"
        )
    return int(sum(values))


def _plain(value: object, name: str) -> object:
    """Return what a tensor or an array holds, and anything else as it is."""
    if not hasattr(value, "tolist"):
        return value
    try:
        return value.tolist()
    except Exception:  # of a tensor that is sparse, or has no data
        raise RolloutsError(
            f"{name} is a {type(value).__name__}, expected one whose values can be listed: record "
            "plain numbers"
        ) from None


def _short(value: object) -> str:
    """Write a value for a message, in 60 characters at most."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, or of a class that cannot write it
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
