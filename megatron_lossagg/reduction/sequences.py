"""What a caller passes of one optimizer step, and how it is checked.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.integers import (
    Ints,
    IntsLike,
    checked_integers,
    is_integer,
    is_tensor,
    whole_numbers,
)

if TYPE_CHECKING:
    from torch import Tensor

Ids: TypeAlias = "IntsLike | Sequence[str] | npt.NDArray[np.str_]"
Kind = Literal["sample", "prompt", "group"]
Floats = npt.NDArray[np.float64]
FloatsLike: TypeAlias = "Sequence[float] | npt.NDArray[np.floating[Any]] | Tensor"

ID_KINDS: tuple[Kind, ...] = ("sample", "prompt", "group")
GATHERED_FLOATS = ("token_weight_sums", "sequence_weight")
"""The columns of a step that are no integers."""
_EXPECTED_IDS = (
    "only integers below 2^63 or only strings, one per sequence: make a string of what is neither, "
    'of a pair f"{a}/{b}"'
)
MOST_TOKENS = 2**53
"""The largest count: integers up to it are exact in the float64 of a weight."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences this data-parallel rank trains on in one optimizer step.

    Counts and ids have one entry per sequence, ``[S]``, on the CPU: a list, a numpy array or a
    tensor. Counts are complete over context parallelism. Padding sequences are left out. Building
    one checks nothing and raises nothing: :func:`plan_step` does, so that all ranks fail together.

    Args:
        active_tokens: n_s: tokens whose loss mask is 1.
        sample: Id of the sequence's sample, integer or string; None: each sequence is its own
            sample. Ids are global over the data-parallel group: equal ids on two ranks are one
            sample.
        prompt: Id of the sequence's prompt, integer or string, global likewise.
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
        group: Id of the group c of the sequence's sample, such as prompt and sign of the
            advantage, global likewise; needed by ``balanced``.
        columns: Numbers of your own for each sequence by name, such as ``{"turns": [3, 1]}``,
            finite; a weights function reads them, of all ranks' sequences.
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

    active_tokens: IntsLike
    sample: Ids | None = None
    prompt: Ids | None = None
    microbatch: IntsLike | None = None
    num_microbatches: int | None = None
    token_weight_sums: FloatsLike | None = None
    sequence_weight: FloatsLike | None = None
    left_out: IntsLike | Sequence[bool] | None = None
    group: Ids | None = None
    columns: Mapping[str, FloatsLike] | None = None
    samples_per_prompt: int | None = None
    sample_count: int | None = None
    num_padding: int | None = None

    def checked(self) -> CheckedSequences:
        """Return these as arrays, strings as hashes; raises :class:`PlanError`."""
        counts = self.active_tokens
        if not is_tensor(counts) or counts.device.type == "cpu":
            counts = whole_numbers(counts)  # type: ignore[assignment]
        n_S = _integers("active_tokens", counts)
        check_sum(f"Sequences.active_tokens of {len(n_S)} sequences", n_S)
        ids: dict[Kind, Ids | None] = {kind: getattr(self, kind) for kind in ID_KINDS}
        id_S: dict[str, Any] = {
            kind: None if given is None else _ids(kind, given, len(n_S))
            for kind, given in ids.items()
        }
        m = self.num_microbatches
        least_m = min(len(n_S), 1)  # sequences lie in one microbatch or more
        if m is not None and not is_integer(m, lowest=least_m, highest=MOST_TOKENS):
            raise PlanError(
                f"got num_microbatches {m!r}, expected an integer from "
                f"{least_m} to 2^53: pass what the schedule gets"
            )
        microbatch_S = None
        if self.microbatch is not None:
            microbatch_S = _integers("microbatch", self.microbatch, len(n_S))
            least = int(microbatch_S.max(initial=-1)) + 1
            if m is not None and m < least:
                raise PlanError(
                    f"microbatch names microbatch {least - 1}, num_microbatches is {m}: indices "
                    "run from 0 to num_microbatches - 1"
                )
            m = least if m is None else m
        lowest: dict[str, int] = {"samples_per_prompt": 1, "sample_count": 0, "num_padding": 0}
        numbers: dict[str, Any] = {name: getattr(self, name) for name in lowest}
        for name, number in numbers.items():
            if number is not None and not is_integer(number, lowest=lowest[name]):
                raise PlanError(f"got {name} {number!r}, expected an integer from {lowest[name]}")
        number = self.samples_per_prompt
        if number is not None and self.prompt is None:
            raise PlanError(f"got samples_per_prompt {number} and no prompt ids: pass prompt=")
        sums, weight = self.token_weight_sums, self.sequence_weight
        return CheckedSequences(
            active_tokens=n_S,
            **id_S,
            microbatch=microbatch_S,
            num_microbatches=m,
            token_weight_sums=None if sums is None else _weight_sums(sums, n_S),
            sequence_weight=None if weight is None else _sequence_weights(weight, len(n_S)),
            left_out=None if self.left_out is None else _bools("left_out", self.left_out, len(n_S)),
            columns=_columns(self.columns, len(n_S)),
            **numbers,
            string_ids=tuple(kind for kind, given in ids.items() if _are_strings(given)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckedSequences:
    """:class:`Sequences` as read-only arrays: int64 ``[S]``; weights and sums float64."""

    active_tokens: Ints
    sample: Ints | None
    prompt: Ints | None
    group: Ints | None
    microbatch: Ints | None
    num_microbatches: int | None
    token_weight_sums: Floats | None
    sequence_weight: Floats | None
    left_out: npt.NDArray[np.bool_] | None
    columns: Mapping[str, Floats]
    """Sorted by name; empty if none were passed."""
    samples_per_prompt: int | None
    sample_count: int | None
    num_padding: int | None
    string_ids: tuple[Kind, ...]
    """Which ids were strings; hashes stand for them."""

    @property
    def own(self) -> str:
        """What context-parallel ranks must pass alike and no count shows, as ``name=hash``."""
        columns = [f"{name} {one.tobytes().hex()}" for name, one in self.columns.items()]
        left_out = "" if self.left_out is None else self.left_out.tobytes().hex()
        given = {"columns": " ".join(columns), "left_out": left_out}
        return " ".join(f"{name}={hashed(text)}" for name, text in given.items() if text)

    @cached_property
    def kept(self) -> CheckedSequences:
        """Those that are not left out."""
        if self.left_out is None:
            return self
        kept_S, given = ~self.left_out, vars(self).items()
        kept: dict[str, Any] = {k: one[kept_S] for k, one in given if isinstance(one, np.ndarray)}
        columns = {name: one[kept_S] for name, one in self.columns.items()}
        return replace(self, **kept | {"columns": columns, "left_out": None})

    @cached_property
    def in_order(self) -> set[bytes]:
        """The bytes of all sequences of each microbatch, in order; empty if none was planned."""
        if self.microbatch is None or not len(self.microbatch):
            return set()
        in_order = np.argsort(self.microbatch, kind="stable").astype(np.int64)
        ends = np.flatnonzero(np.diff(self.microbatch[in_order])) + 1
        return {own.tobytes() for own in np.split(in_order, ends)}

    def __post_init__(self) -> None:
        for value in (*vars(self).values(), *self.columns.values()):
            if isinstance(value, np.ndarray):
                value.flags.writeable = False  # the weights follow from them


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


def _floats(name: str, values: FloatsLike, length: int) -> Floats:
    """Copy to float64 ``[S]``; raises :class:`PlanError` for what is no number per sequence."""
    given = values if isinstance(values, (list, tuple)) else [values]
    if any(is_tensor(one) and one.requires_grad for one in given):
        raise PlanError(
            f"Sequences.{name} requires a gradient, expected constants: pass {name}.detach(), and "
            "multiply what is trained into the losses"
        )
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


def _sequence_weights(values: FloatsLike, length: int) -> Floats:
    weight_S = _floats("sequence_weight", values, length)
    is_wrong_S = ~((weight_S == 0) | (weight_S >= 1 / MOST_TOKENS) & (weight_S <= MOST_TOKENS))
    if is_wrong_S.any():
        raise PlanError(
            f"Sequences.sequence_weight: got {weight_S[is_wrong_S.argmax()]} at index "
            f"{is_wrong_S.argmax()}, expected 0 or numbers from 2^-53 to 2^53: they multiply w_s, "
            "and a sign belongs into the losses"
        )
    return weight_S


def _bools(name: str, values: Any, length: int) -> npt.NDArray[np.bool_]:
    given_S = _floats(name, values, length)
    if not ((given_S == 0) | (given_S == 1)).all():
        raise PlanError(f"Sequences.{name}: got {given_S.tolist()[:6]}, expected bools, or 0 and 1")
    return given_S.astype(bool)


def _columns(given: object, length: int) -> dict[str, Floats]:
    """Copy each column to float64 ``[S]``, sorted by name; raises :class:`PlanError`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise PlanError(
            f"got columns {given!r}, expected numbers per sequence by name: pass a dict"
        )
    columns_S = {name: _floats(f"columns[{name!r}]", given[name], length) for name in sorted(given)}
    for name, value_S in columns_S.items():
        if not np.isfinite(value_S).all():
            at = int(np.isfinite(value_S).argmin())
            raise PlanError(
                f"Sequences.columns[{name!r}]: got {value_S[at]} at index {at}, expected finite "
                "numbers: mark what is not known by a number of your own, such as -1"
            )
    return columns_S


def _weight_sums(values: FloatsLike, n_S: Ints) -> Floats:
    """Copy to float64 ``[S]``; raises :class:`PlanError` for what is no sum of weights."""
    sum_S = _floats("token_weight_sums", values, len(n_S))
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
    return sum_S


def _ids(kind: Kind, ids: Ids, length: int) -> Ints:
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
