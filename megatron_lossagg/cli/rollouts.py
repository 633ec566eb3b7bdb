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

These are the names of our own files and of what the systems write:

- slime 624b824a, ``--save-debug-rollout-data``: ``save_debug_rollout_data`` writes
  ``{"rollout_id", "samples"}`` with ``Sample.to_dict`` of each; miles 31f1ca96 the same.
- verl 0.9.1, ``trainer.rollout_data_dir``: ``RayPPOTrainer._write_generations`` writes JSON lines
  with the decoded ``input`` and ``output`` and ``step``, and no length.
- TRL 1.16.0 (and commit f2cd5771), ``log_completions``: ``GRPOTrainer.log`` writes Parquet with
  ``step``, ``prompt`` and ``completion``, as texts or messages, and no length.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lossagg.cli.rollout_files import Record, RolloutsError, imported, records, short
from megatron_lossagg.files import printable
from megatron_lossagg.integers import Ints
from megatron_lossagg.sequences import MOST_TOKENS
from megatron_lossagg.text import number_of

__all__ = ["Rollouts", "RolloutsError", "Step", "add_reading_arguments", "read_rollouts"]

_MASKS = ("mask", "loss_mask")
_TEXTS = ("output", "completion")
_PROMPTS = ("prompt_id", "group_index", "input", "prompt")
_SAMPLES = ("sample_id", "rollout_id")
_KEYS = {*_MASKS, "response_length", *_TEXTS, *_PROMPTS, *_SAMPLES, "step", "remove_sample"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """The rows of one optimizer step; an integer per row, int64 ``[S]``."""

    active_tokens: Ints
    sample: Ints | None
    """None: each row is its own sample."""
    prompt: Ints | None
    """None: the file has no prompts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """What was read."""

    steps: tuple[Step, ...]
    """Those with an active token."""
    masked_steps: int
    """How many steps have none; they train nothing and are left out."""
    unit: str
    """What a length counts: ``token`` or, if asked for, ``character``."""
    caveat: str
    """Why lengths that were measured on texts are not those of the trained tokens, or nothing."""
    source: str
    """File names, and what the lengths and prompts were read from, in words."""


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
    reader = _Reader(args)
    rows: dict[tuple[int, int], list[_Row]] = {}
    for number, path in enumerate(paths):
        num_rows = 0
        for place, record in records(path, trusted=args.trust_pickle, names=_KEYS):
            row = reader.row(record, place)
            rows.setdefault((number, row.step), []).append(row)
            num_rows += 1
        if not num_rows:
            raise RolloutsError(f"{path}: got no records, expected one per response")
    steps = [reader.step(of_step) for _, of_step in sorted(rows.items(), key=lambda kv: kv[0])]
    active = tuple(step for step in steps if step.active_tokens.any())
    if not active:
        raise RolloutsError(
            f"{_names(paths)}: got {number_of(sum(map(len, rows.values())), 'response')} and no "
            "active token, so that every weight is 0: give a file with a response that is trained"
        )
    return Rollouts(
        steps=active,
        masked_steps=len(steps) - len(active),
        unit=reader.unit,
        caveat=reader.caveat,
        source=f"{_names(paths)}: {reader.in_words}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    active_tokens: int
    sample: int
    prompt: int
    step: int


class _Reader:
    """From records to integers: the same names in every record, ids by first appearance."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._measure = _measure(args)
        self._measure_flag = "--characters" if args.characters else "--tokenizer"
        self.unit = "character" if args.characters else "token"
        self._prompt_key: str | None = None
        self._lengths_from: dict[str, None] = {}
        self._ids: dict[str, dict[object, int]] = {"prompt": {}, "sample": {}}
        self._num_rows = 0
        self._has_samples = False

    @property
    def in_words(self) -> str:
        lengths = " and ".join(self._lengths_from)
        return f"lengths from {lengths}, prompts from {self._prompt_key or 'nothing'}"

    @property
    def caveat(self) -> str:
        if self._measure is None:
            return ""
        if self.unit == "character":
            return "Lengths are characters, not tokens: shares of the trained tokens differ."
        return (
            "Lengths are those of texts encoded again: without special tokens such as the end, and "
            "not always the tokens that were sampled."
        )

    def row(self, record: Record, place: str) -> _Row:
        """Read a record; ``place`` names it in errors."""
        prompt_key = _first(record, _PROMPTS)
        if not self._num_rows:
            self._prompt_key = prompt_key
        if prompt_key != self._prompt_key:
            raise RolloutsError(
                f"{place}: got its prompt from {prompt_key or 'nothing'}, expected "
                f"{self._prompt_key or 'nothing'} as in the record before it: give the same names "
                "in every record"
            )
        self._num_rows += 1
        sample_key = _first(record, _SAMPLES)
        self._has_samples |= sample_key is not None
        own = ("own", self._num_rows)
        return _Row(
            active_tokens=self._active_tokens(record, place),
            sample=self._number(
                "sample", own if sample_key is None else _id(record, sample_key, place)
            ),
            prompt=(
                -1 if prompt_key is None else self._number("prompt", _id(record, prompt_key, place))
            ),
            step=_integer(record, "step", place) if record.get("step") is not None else 0,
        )

    def step(self, rows: Sequence[_Row]) -> Step:
        """Collect the rows of one step."""
        columns = {
            name: np.fromiter((getattr(row, name) for row in rows), np.int64, len(rows))
            for name in ("active_tokens", "sample", "prompt")
        }
        return Step(
            active_tokens=columns["active_tokens"],
            sample=columns["sample"] if self._has_samples else None,
            prompt=None if self._prompt_key is None else columns["prompt"],
        )

    def _number(self, kind: str, value: object) -> int:
        known = self._ids[kind]
        return known.setdefault(value, len(known))

    def _active_tokens(self, record: Record, place: str) -> int:
        length_key = _first(record, (*_MASKS, "response_length"))
        if length_key is not None and self._measure is not None:
            raise RolloutsError(
                f"{place}: got a length ({length_key!r}) and {self._measure_flag}, expected "
                "the flag only for records with texts and no lengths: leave it out, or give only "
                "such records"
            )
        mask_key = _first(record, _MASKS)
        given = record.get("response_length")
        length = None if given is None else _integer(record, "response_length", place)
        if mask_key is not None:
            self._lengths_from[mask_key] = None
            active = _sum_of_mask(record[mask_key], f"{place}: {mask_key}", length)
        elif length is not None:
            self._lengths_from["response_length"] = None
            active = length
        else:
            active = self._measured(record, place)
        return 0 if record.get("remove_sample") else active  # slime: trains on none of it

    def _measured(self, record: Record, place: str) -> int:
        key = _first(record, _TEXTS)
        if key is None:
            raise RolloutsError(
                f"{place}: got {_listed(record)}, expected a length: give 'mask' (0 or 1 per "
                "response token) or 'response_length'"
            )
        if self._measure is None:
            raise RolloutsError(
                f"{place}: got a text ({key!r}) and no length, and how many tokens a text has "
                "depends on its tokenizer. Give --tokenizer tokenizer.json of the model, or "
                "--characters to count characters instead"
            )
        self._lengths_from[f"the text of {key!r}"] = None
        text = _text(record[key], f"{place}: {key}")
        try:
            return self._measure(text)
        except Exception as error:  # of the tokenizer's library
            raise RolloutsError(
                f"{place}: {key} is {short(text)}, expected a text that {self._measure_flag} can "
                f"encode ({short(str(error))})"
            ) from None


def _first(record: Record, names: Iterable[str]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _integer(record: Record, name: str, place: str) -> int:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOKENS:
        raise RolloutsError(
            f"{place}: {name} is {short(value)}, expected an integer from 0 to 2^53"
        )
    return value


def _id(record: Record, name: str, place: str) -> str | int:
    value = _plain(record[name], f"{place}: {name}")

    def in_json(part: object) -> object:
        return _plain(part, f"{place}: {name}") if hasattr(part, "tolist") else str(part)

    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    if isinstance(value, list | dict):  # messages or token ids
        with suppress(TypeError, ValueError, RecursionError):  # names of two kinds, endless, deep
            return json.dumps(value, sort_keys=True, default=in_json)
    raise RolloutsError(
        f"{place}: {name} is {short(value)}, expected a string, an integer, a list or an "
        "object: give records to the same prompt or sample the same one"
    )


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


def _sum_of_mask(mask: object, name: str, length: int | None) -> int:
    values = _plain(mask, name)
    if not isinstance(values, list) or not all(map(_is_bit, values)):
        raise RolloutsError(f"{name} is {short(values)}, expected a list of 0 and 1 per token")
    if length is not None and len(values) != length:
        raise RolloutsError(
            f"{name} has {number_of(len(values), 'value')}, expected response_length, which is "
            f"{length}: a mask has one value per response token"
        )
    return int(sum(values))


def _is_bit(value: object) -> bool:
    return isinstance(value, int | float) and value in (0, 1)


def _text(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        content = value[0].get("content")
        if isinstance(content, str):
            return content
    raise RolloutsError(
        f"{name} is {short(value)}, expected a text or one message with a text: of several "
        "messages only the training run knows which tokens it trains. Record 'mask'"
    )


def _measure(args: argparse.Namespace) -> Callable[[str], int] | None:
    """Return what measures a text, where asked for."""
    if args.characters:
        return len
    if args.tokenizer is None:
        return None
    tokenizers = imported("tokenizers", "--tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.tokenizer))
    except Exception as error:  # the library raises Exception itself
        raise RolloutsError(
            f"--tokenizer {args.tokenizer} cannot be read ({short(str(error))}): give the "
            "tokenizer.json of the model"
        ) from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _names(paths: Sequence[Path]) -> str:
    more = f" and {number_of(len(paths) - 1, 'more file')}" if paths[1:] else ""
    return f"{printable(paths[0].name)}{more}"


def _listed(record: Record) -> str:
    return ", ".join(short(name) for name in list(record)[:8]) or "an empty record"
