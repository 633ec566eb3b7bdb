"""What a caller passes of one optimizer step: a table of columns, and how each is checked.

Each column is a field of :class:`Sequences` that says what it holds and how it is checked. What
checks, joins microbatches, leaves out, gathers, compares and counts goes over these fields
(:func:`columns_of`). Which modes need a column is theirs to say (``Mode.needs``).

Shape suffixes: S = sequences of this data-parallel rank in the step; A = sequences of all ranks;
W = ranks of the group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import (
    Ints,
    IntsLike,
    checked_integers,
    first_few,
    is_integer,
    is_tensor,
    whole_numbers,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_lossagg.reduction.table import Table


Ids: TypeAlias = "IntsLike | Sequence[str] | npt.NDArray[np.str_]"
Kind = Literal["sample", "prompt", "group"]
Floats = npt.NDArray[np.float64]
FloatsLike: TypeAlias = "Sequence[float] | npt.NDArray[np.floating[Any]] | Tensor"
Checked: TypeAlias = Any
""":class:`Sequences` of which each column is an array ``[S]``, read-only."""

_EXPECTED_IDS = (
    "only integers below 2^63 or only strings, one per sequence: make a string of what is neither, "
    'of a pair f"{a}/{b}"'
)
MOST_TOKENS = 2**53
"""The largest count: integers up to it are exact in the float64 of a weight."""


def check_sum(what: str, tokens: Ints) -> None:
    """Raise if token counts sum to more than float64 holds exactly."""
    if len(tokens) * int(tokens.max(initial=0)) <= MOST_TOKENS:
        return
    total = sum(tokens.tolist())  # Python's integers do not wrap
    if total > MOST_TOKENS:
        raise PlanError(
            f"{what} sum to {total}, the most that a step can count exactly is 2^53: pass the "
            "number of mask positions that are 1"
        )


def hashed(text: str) -> int:
    """Hash to 63 bits, the same in every process."""
    encoded = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") >> 1


def _integers(
    name: str,
    values: IntsLike,
    length: int | None = None,
    *,
    lowest: int | None = 0,
    expected: str = "integers in one dimension",
) -> Ints:
    if is_tensor(values) and values.device.type != "cpu":
        raise PlanError(
            f"Sequences.{name} is on {values.device}: counts and ids are CPU integers, pass a "
            "list or a CPU tensor"
        )
    return checked_integers(
        f"Sequences.{name}", values, PlanError, lowest=lowest, length=length, expected=expected
    )


def check_constant(name: str, values: Any) -> None:
    """Refuse what requires a gradient, which an array or a list of numbers would drop."""
    given = values if isinstance(values, (list, tuple)) else [values]
    if any(is_tensor(one) and one.requires_grad for one in given):
        raise PlanError(
            f"Sequences.{name} requires a gradient, expected constants: pass {name}.detach(), and "
            "multiply what is trained into the losses"
        )


def _floats(name: str, values: FloatsLike, length: int) -> Floats:
    """Copy to float64 ``[S]``; raises :class:`PlanError` for what is no number per sequence."""
    check_constant(name, values)
    if is_tensor(values):
        if values.device.type != "cpu":
            raise PlanError(
                f"Sequences.{name} is on {values.device}: pass CPU numbers, a list or a CPU tensor"
            )
        values = values.detach().double().numpy()
    array = np.asarray(values)
    if array.shape != (length,) or array.dtype.kind not in "bfiu":
        raise PlanError(
            f"Sequences.{name}: got {array.dtype} of shape {array.shape}, expected {length} "
            "numbers, one per sequence"
        )
    return array.astype(np.float64)


def _check_sequence_weights(weight_S: Floats, n_S: Ints) -> None:
    """Refuse negative weights, and those that float32 may not hold."""
    is_wrong_S = ~((weight_S == 0) | (weight_S >= 1 / MOST_TOKENS) & (weight_S <= MOST_TOKENS))
    if is_wrong_S.any():
        raise PlanError(
            f"Sequences.sequence_weight: got {weight_S[is_wrong_S.argmax()]} at index "
            f"{is_wrong_S.argmax()}, expected 0 or numbers from 2^-53 to 2^53: they multiply w_s, "
            "and a sign belongs into the losses"
        )


def _bools(name: str, values: Any, length: int) -> npt.NDArray[np.bool_]:
    given_S = _floats(name, values, length)
    if not ((given_S == 0) | (given_S == 1)).all():
        raise PlanError(f"Sequences.{name}: got {given_S.tolist()[:6]}, expected bools, or 0 and 1")
    return given_S.astype(bool)


def _check_names(given: object) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise PlanError(
            f"got columns {given!r}, expected numbers per sequence by name: pass a dict"
        )


def _own_columns(given: Any, length: int) -> dict[str, Floats]:
    """Copy each column to float64 ``[S]``, sorted by name; raises :class:`PlanError`."""
    _check_names(given)
    columns_S = {name: _floats(f"columns[{name!r}]", given[name], length) for name in sorted(given)}
    for name, value_S in columns_S.items():
        if not np.isfinite(value_S).all():
            at = int(np.isfinite(value_S).argmin())
            raise PlanError(
                f"Sequences.columns[{name!r}]: got {value_S[at]} at index {at}, expected finite "
                "numbers: mark what is not known by a number of your own, such as -1"
            )
    return columns_S


def _check_weight_sums(sum_S: Floats, n_S: Ints) -> None:
    """Refuse what is no sum of weights."""
    # One over a sum is a weight, so that a smaller one could be beyond float32 on one rank only.
    is_sum_S = (sum_S >= 1 / MOST_TOKENS) & (sum_S <= MOST_TOKENS)
    is_wrong_S = ~((sum_S == 0) | is_sum_S) | ((sum_S > 0) & (n_S == 0))
    if is_wrong_S.any():
        at = int(is_wrong_S.argmax())
        raise PlanError(
            f"Sequences.token_weight_sums: got {sum_S[at]} at index {at} for {n_S[at]} active "
            "tokens, expected 0 or a number from 2^-53 to 2^53, and 0 for no active token: pass "
            "the sum of the weights of the tokens whose mask is 1"
        )


def _ids(kind: str, ids: Ids, length: int) -> Ints:
    if not _are_strings(ids):
        if isinstance(ids, np.ndarray) and ids.dtype == object:
            ids = ids.tolist()
        id_S = _integers(kind, ids, length, lowest=None, expected=_EXPECTED_IDS)  # type: ignore[arg-type]
        if kind != "group" and (id_S == -1).any():
            raise PlanError(
                f"Sequences.{kind}: got the id -1 at index {(id_S == -1).argmax()}, which "
                f"frameworks use for an unknown one: pass the {kind} of every sequence, or leave "
                f"{kind}= out"
            )
        return id_S
    array = np.asarray(ids, dtype=object)  # NumPy's own strings lose a NUL at their end
    hashes = {text: hashed(text) for text in set(array.ravel().tolist())}
    if len(set(hashes.values())) < len(hashes):
        raise PlanError(f"Sequences.{kind}: two strings have one 63-bit hash: pass integer ids")
    hash_S = np.array([hashes[text] for text in array.ravel().tolist()], dtype=np.int64)
    return _integers(kind, hash_S.reshape(array.shape), length)


def _are_strings(ids: object) -> bool:
    """Whether all of some ids are strings; a mixture is left to be refused as no integers."""
    if isinstance(ids, str):
        return False
    if isinstance(ids, np.ndarray):
        ids = ids.ravel().tolist() if ids.dtype.kind in "UO" else ()
    if not isinstance(ids, Sequence) or not len(ids):
        return False
    return all(isinstance(one, str) for one in ids)


@dataclass(frozen=True)
class Column:
    """What one column of a step holds, and how it is checked."""

    dtype: type[int] | type[float] | type[bool]
    check: Callable[[Any, Ints], None] | None = None
    """Looks at the array, next to the active tokens; raises :class:`PlanError`."""
    is_id: bool = False
    """Whether equal values are one sample, prompt or group, on any ranks."""
    is_alone: bool = False
    """Whether it is one integer of the step, from ``lowest``, and has no entry per sequence."""
    lowest: int = 0
    is_named: bool = False
    """Whether it is a mapping of several by name."""
    with_totals: bool = False
    """Whether totals of the step may be passed too, for other ranks' entries matter to none."""
    at_end: bool = False
    """Whether context-parallel ranks compare it when the step ends, as they do counts and ids; if
    not, when it begins."""
    is_shared: bool = True
    """Whether ranks tell each other: all entries, or that the integer of the step is one."""

    def read(self, name: str, given: Any, length: int) -> Any:
        """Copy what was passed to an array ``[S]``; raises :class:`PlanError`."""
        if self.is_alone:
            if not is_integer(given, lowest=self.lowest, highest=MOST_TOKENS):
                raise PlanError(
                    f"got {name} {given!r}, expected an integer from {self.lowest} to 2^53"
                )
            return int(given)
        if self.is_named:
            return _own_columns(given, length)
        if self.is_id:
            return _ids(name, given, length)
        reader: Callable[[str, Any, int], Any] = _integers if self.dtype is int else _floats
        return (_bools if self.dtype is bool else reader)(name, given, length)


def column(dtype: type[int] | type[float] | type[bool], **what: Any) -> dict[str, Column]:
    """Make the metadata of a field that is a column; see :class:`Column`."""
    return {"column": Column(dtype, **what)}


def columns_of(kind: type[Sequences]) -> dict[str, Column]:
    """Return the columns that a class declares, by name."""
    return {one.name: one.metadata["column"] for one in fields(kind) if one.metadata}


def ids_of(kind: type[Sequences]) -> tuple[str, ...]:
    """Name the columns of a class that are ids."""
    return tuple(name for name, one in columns_of(kind).items() if one.is_id)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences this data-parallel rank trains on in one optimizer step, or a microbatch's.

    Counts and ids have one entry per sequence, ``[S]``, on the CPU: a list, a numpy array or a
    tensor. Counts are complete over context parallelism. Padding sequences are left out, or marked.
    Building one checks and raises nothing: :func:`plan_step` does, so that all ranks fail together.

    Args:
        active_tokens: n_s: tokens whose loss mask is 1.
        sample: Id of the sequence's sample, integer or string; None: each sequence is its own
            sample. Ids are global over the data-parallel group: equal ids on two ranks are one
            sample.
        prompt: Id of the sequence's prompt, integer or string, global likewise.
        group: Id of the group c of the sequence's sample, such as prompt and sign of the
            advantage, global likewise; needed by ``balanced``.
        microbatch: Index of the sequence's microbatch on this rank; needed by
            ``microbatch_token_mean``.
        num_microbatches: M, microbatches with no sequences included; None: the largest
            ``microbatch`` plus one.
        token_weight_sums: The sum of the active tokens' weights v_t of each sequence, 0 or from
            2^-53 to 2^53; needed by ``count="weights"``. ``math.fsum`` gives one that depends on no
            order.
        sequence_weight: omega_s, 0 or from 2^-53 to 2^53: it multiplies w_s. Nothing is
            renormalized, and a sequence that weighs 0 is counted as before. A custom reducer
            multiplies by it itself (``context.plan.sequences``).
        left_out: Which sequences leave every count, and weigh 0: bools, such as of groups without
            a signal. An :class:`Aggregation` with ``count_left_out`` counts and trains them. Their
            losses are finite all the same: give them the advantage 0, and not 0 / 0.
        columns: Numbers of your own for each sequence by name, such as ``{"turns": [3, 1]}``,
            finite; a weights function reads them, of all ranks' sequences.
        lengths: Tokens of each sequence, padding included, for an integration's layout.
        is_padding: 1 for a sequence that only fills a shape: it is in no count, has no position in
            the step, and is not read but for its length.
        samples_per_prompt: How many samples each prompt has over the step; a check that ids are
            global, if passed.
        sample_count: How many samples the whole step has, over all ranks, if the caller knows it;
            compared with what is counted.
        num_padding: How many padding sequences this rank has left out, for the line of the first
            step and the record; nothing else depends on it.

    Examples:
        Two turns of one rollout are two sequences of one sample:

        >>> sequences = Sequences(active_tokens=[900, 100, 500], sample=["a", "a", "b"])
        >>> plan_step(Aggregation("sample_mean"), sequences).weights.tolist()
        [0.0005, 0.0005, 0.001]
    """

    active_tokens: IntsLike = field(metadata=column(int, with_totals=True))
    sample: Ids | None = field(default=None, metadata=column(int, is_id=True))
    prompt: Ids | None = field(default=None, metadata=column(int, is_id=True))
    group: Ids | None = field(default=None, metadata=column(int, is_id=True))
    microbatch: IntsLike | None = field(default=None, metadata=column(int, with_totals=True))
    num_microbatches: int | None = field(
        default=None, metadata=column(int, is_alone=True, is_shared=False)
    )
    token_weight_sums: FloatsLike | None = field(
        default=None, metadata=column(float, check=_check_weight_sums, at_end=True)
    )
    sequence_weight: FloatsLike | None = field(
        default=None,
        metadata=column(float, check=_check_sequence_weights, with_totals=True, at_end=True),
    )
    left_out: IntsLike | Sequence[bool] | None = field(default=None, metadata=column(bool))
    columns: Mapping[str, FloatsLike] | None = field(
        default=None, metadata=column(float, is_named=True, with_totals=True)
    )
    lengths: IntsLike | None = field(default=None, metadata=column(int, is_shared=False))
    is_padding: IntsLike | Sequence[bool] | None = field(
        default=None, metadata=column(bool, is_shared=False)
    )
    samples_per_prompt: int | None = field(
        default=None, metadata=column(int, is_alone=True, lowest=1)
    )
    sample_count: int | None = field(default=None, metadata=column(int, is_alone=True))
    num_padding: int | None = field(
        default=None, metadata=column(int, is_alone=True, is_shared=False)
    )
    string_ids: tuple[str, ...] = field(default=(), init=False, repr=False)
    """Which ids :meth:`checked` has made of strings."""

    def checked(self) -> Checked:
        """Return these as arrays, strings as hashes; raises :class:`PlanError`."""
        if self.is_padding is not None:
            marked = self.listed()
            num_padding = (marked.num_padding or 0) + sum(marked.is_padding)
            of_sequences = self.with_entries(marked.trained_entries(), num_padding=num_padding)
            return replace(of_sequences, is_padding=None, lengths=None).checked()
        counts = self.active_tokens
        if not is_tensor(counts) or counts.device.type == "cpu":
            counts = whole_numbers(counts)  # type: ignore[assignment]
        n_S = _integers("active_tokens", counts)
        check_sum(f"Sequences.active_tokens of {len(n_S)} sequences", n_S)
        found: dict[str, Any] = {}
        for name, one in columns_of(type(self)).items():
            given = n_S if name == "active_tokens" else getattr(self, name)
            found[name] = None if given is None else one.read(name, given, len(n_S))
            if given is not None and one.check is not None:
                one.check(found[name], n_S)
        found |= {"lengths": None}  # of microbatches, for their layouts
        _check_microbatches(found, len(n_S))
        if self.samples_per_prompt is not None and self.prompt is None:
            raise PlanError(
                f"got samples_per_prompt {self.samples_per_prompt} and no prompt ids: pass prompt="
            )
        texts = [kind for kind in ids_of(type(self)) if _are_strings(getattr(self, kind))]
        checked: Checked = replace(self, **found)
        checked = checked.with_entries(checked.entries())
        object.__setattr__(checked, "string_ids", tuple(texts))
        return checked

    def entries(self) -> dict[str, Any]:
        """Return what has an entry per sequence and was passed; one's own as ``columns turns``."""
        found: dict[str, Any] = {}
        for name, one in columns_of(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                found |= {f"{name} {key}": values for key, values in value.items()}
            elif value is not None and not one.is_alone:
                found[name] = value
        return found

    def with_entries(self, entries: Mapping[str, Any], **others: Any) -> Checked:
        """Return these with others in place of :meth:`entries`; arrays become read-only."""
        for name, values in entries.items():
            if isinstance(values, np.ndarray):
                values.flags.writeable = False  # the weights follow from them
            name, is_named, key = name.partition(" ")
            others[name] = {**others.get(name, {}), key: values} if is_named else values
        return replace(self, **others)

    def said(self, *, strings: bool) -> list[str]:
        """Say what every rank passes alike: which columns, and the integers of the step.

        ``strings``: name the ids that were strings too; a rank without sequences has none.
        """
        ids, others, alone = [], [], []
        for name, one in columns_of(type(self)).items():
            value = getattr(self, name)
            if one.is_alone and one.is_shared:
                alone.append(f"{name} {value}")
            elif one.is_named:
                others.append(f"the {name} {', '.join(value)}" if value else f"no {name}")
            elif one.dtype is int and one.is_shared and value is not None:
                ids.append(f"{name} (strings)" if strings and name in self.string_ids else name)
            elif one.dtype is not int and one.is_shared:
                others.append(f"no {name}" if value is None else name)
        _, *ids = ids  # the first are the active tokens
        return [f"{', '.join(ids) or 'no'} ids", *others, *alone]

    @property
    def own(self) -> str:
        """What context-parallel ranks must pass alike and no count shows, as ``name=hash``."""
        texts: dict[str, str] = {}
        for name, values in self.entries().items():
            of, _, key = name.partition(" ")
            one = columns_of(type(self))[of]
            if one.dtype is not int and not one.at_end:
                texts[of] = f"{texts.get(of, '')} {key} {values.tobytes().hex()}"
        return " ".join(f"{of}={hashed(text)}" for of, text in texts.items())

    @cached_property
    def kept(self) -> Checked:
        """Those that are not left out, if some are."""
        left_out: Any = self.left_out
        kept = {name: one[~left_out] for name, one in self.entries().items()}
        return self.with_entries(kept | {"left_out": None})

    @cached_property
    def in_order(self) -> set[bytes]:
        """The bytes of all sequences of each microbatch, in order; empty if none was planned."""
        microbatch_S: Any = self.microbatch
        if microbatch_S is None or not len(microbatch_S):
            return set()
        in_order = np.argsort(microbatch_S, kind="stable").astype(np.int64)
        ends = np.flatnonzero(np.diff(microbatch_S[in_order])) + 1
        return {own.tobytes() for own in np.split(in_order, ends)}

    def listed(self) -> Checked:
        """Return these as lists of one length, padding marked; :func:`plan_step` checks the rest.

        Raises :class:`ValueError` for a count without dimension, and :class:`PlanError` for what
        :func:`plan_step` cannot see: what is not shared, and what a list or a join would change.
        """
        n_G = np.asarray(whole_numbers(self.active_tokens))
        if n_G.ndim != 1:
            raise ValueError(f"got {n_G.ndim} dimensions, expected one number per sequence")
        _check_names(self.columns or {})
        read: dict[str, Any] = {"is_padding": np.zeros(len(n_G), dtype=bool)}
        for name, one in columns_of(type(self)).items():
            given = None if one.is_shared else getattr(self, name)
            if given is not None:
                given = given.cpu() if is_tensor(given) else given
                read[name] = one.read(name, given, len(n_G))
        marked: Checked = replace(self, active_tokens=n_G, **read)
        found = {}
        for name, values in marked.entries().items():
            check_constant(name, values)
            values = [values] if isinstance(values, str) else values  # its letters are no entries
            found[name] = values.tolist() if hasattr(values, "tolist") else list(values)
            if len(found[name]) != len(n_G):
                raise PlanError(
                    f"Sequences.{name}: got {len(found[name])} entries, expected {len(n_G)}, one "
                    "per sequence"
                )
        return marked.with_entries(found)

    @staticmethod
    def of_microbatches(parts: Sequence[Checked], num_microbatches: int) -> Sequences:
        """Join the microbatches of a step, each :meth:`listed`, without what fills a shape.

        One without ids is one in which no sequence needs any.
        """
        kept = [part.trained_entries() for part in parts]
        names = dict.fromkeys(name for one in kept for name in one)
        entries = {name: [v for one in kept for v in one.get(name, ())] for name in names}
        entries |= {"microbatch": [i for i, one in enumerate(kept) for _ in one["active_tokens"]]}
        first: Sequences = next(iter(parts), Sequences(active_tokens=[]))
        num_padding = sum(sum(one.is_padding) + (one.num_padding or 0) for one in parts)
        numbers = {"num_microbatches": num_microbatches, "num_padding": num_padding}
        joined: Sequences = first.with_entries(entries, is_padding=None, lengths=None, **numbers)
        return joined

    def trained_entries(self) -> dict[str, Any]:
        """Return :meth:`entries` of what is :meth:`listed`, without what only fills a shape."""
        shared = [name for name, one in columns_of(type(self)).items() if one.is_shared]
        is_padding: Any = self.is_padding
        return {
            name: [value for value, pads in zip(values, is_padding, strict=True) if not pads]
            for name, values in self.entries().items()
            if name.partition(" ")[0] in shared
        }


ID_KINDS: tuple[Any, ...] = ids_of(Sequences)


def _check_microbatches(found: dict[str, Any], num_sequences: int) -> None:
    """Refuse a microbatch beyond M; M is as many as are named if it was not passed."""
    m, microbatch_S = found["num_microbatches"], found["microbatch"]
    if m == 0 and num_sequences:  # which lie in one microbatch or more
        raise PlanError(
            "got num_microbatches 0, expected an integer from 1 to 2^53: pass what the schedule "
            "gets"
        )
    if microbatch_S is None:
        return
    least = int(microbatch_S.max(initial=-1)) + 1
    if m is not None and m < least:
        raise PlanError(
            f"microbatch names microbatch {least - 1}, num_microbatches is {m}: indices "
            "run from 0 to num_microbatches - 1"
        )
    found["num_microbatches"] = least if m is None else m


def check_ids(table: Table, samples_per_prompt: int | None) -> None:
    """Refuse ids that contradict one another; warn of those that look as if they were not global.

    Alike on all ranks: no rank waits for another.
    """
    for kind in ("prompt", "group"):
        if getattr(table.rows, kind) is not None and table.rows.sample is not None:
            _check_one(kind, table)
    if samples_per_prompt is not None:
        _check_samples_per_prompt(table, samples_per_prompt)
        return
    for what, doubt in _doubts(table):
        warn_once(what, doubt)


def _doubts(table: Table) -> Iterator[tuple[str, str]]:
    """Describe ids that look like placeholders, or like numbers that start anew on every rank."""
    sequences_W = np.bincount(table.rank_A, minlength=1)
    for kind in ID_KINDS:
        ids_A, ids = getattr(table.rows, kind), table.ids(kind)
        if ids_A is None or ids is None:
            continue
        if len(ids_A) > 1 and (ids_A == ids_A[0]).all():
            yield (
                f"one {kind} id",
                f"all {len(ids_A)} sequences of the step have one {kind} id, so one {kind} has all "
                f"tokens: if the id is a placeholder, leave {kind}= out",
            )
        elif _is_every_id_on_one_rank(ids_A, ids.num, sequences_W):
            yield (
                f"{kind} ids of every rank",
                f"the data-parallel ranks have the same {kind} ids, which merges {kind}s if "
                "numbers start at 0 on every rank: add an offset per rank, or pass "
                "samples_per_prompt= to have it checked",
            )


def _is_every_id_on_one_rank(ids_A: Ints, num_ids: int, sequences_W: Ints) -> bool:
    """Whether several ranks have sequences and one of them has every id of the step.

    Such a rank has the lowest and the highest id, so the ids of other ranks are not grouped.
    """
    ends = np.cumsum(sequences_W)[sequences_W > 0]
    starts = ends - sequences_W[sequences_W > 0]
    if len(starts) < 2:
        return False
    lowest, highest = np.minimum.reduceat(ids_A, starts), np.maximum.reduceat(ids_A, starts)
    has_both = (lowest == lowest.min()) & (highest == highest.max())
    return any(
        len(np.unique(ids_A[start:end])) == num_ids
        for start, end in zip(starts[has_both], ends[has_both], strict=True)
    )


def _check_one(kind: str, table: Table) -> None:
    sample_A, kind_A = table.rows.sample, getattr(table.rows, kind)
    samples: Any = table.ids("sample")
    wrong = np.flatnonzero(kind_A != samples.one_of(kind_A)[samples.index_A])
    if len(wrong):
        sample = sample_A[wrong].min()
        found = np.unique(kind_A[sample_A == sample])
        raise PlanError(
            f"sample {sample} has sequences under {len(found)} {kind}s ({first_few(found, 4)}): a "
            f"sample belongs to one {kind}; ids are global over the data-parallel group"
        )


def _check_samples_per_prompt(table: Table, number: int) -> None:
    samples: Any = table.ids("sample")
    prompt_of_sample = samples.one_of(table.rows.prompt)[samples.num_sequences_I > 0]
    prompts, num_samples = np.unique(prompt_of_sample, return_counts=True)
    wrong = np.flatnonzero(num_samples != number)
    if len(wrong):
        raise PlanError(
            f"prompt {prompts[wrong[0]]} has {num_samples[wrong[0]]} samples over the step, "
            f"samples_per_prompt is {number}: ids are global over the data-parallel group, and "
            "numbers that start at 0 on every rank merge prompts; add rank * prompts per rank"
        )


def check_sample_count(given: int | None, found: int | None, *, has_ids: bool) -> None:
    """Raise :class:`PlanError` if a step has another number of samples than the caller knows."""
    if given is None or found is None or given == found:
        return
    if not has_ids:
        change = "without sample= each sequence is one: pass the sample of each sequence"
    elif found < given:
        change = (
            "equal ids are one sample, so ids that restart in each prompt or on each rank merge "
            'several: pass ids of the whole step, such as f"{prompt}/{sample}"'
        )
    else:
        change = (
            "each id is a sample: give all sequences of a sample one id, the same on every rank, "
            "and leave padding sequences out"
        )
    raise PlanError(f"got sample_count {given}, the step's ids have {found} samples; {change}")
