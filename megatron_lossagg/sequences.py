"""What a caller passes of one optimizer step, and how it is checked.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_lossagg.errors import PlanError
from megatron_lossagg.integers import Ints, IntsLike, checked_integers, is_integer

__all__ = ["ID_KINDS", "MOST_TOKENS", "Ids", "Kind", "Sequences", "check_sum", "hashed"]

Ids = IntsLike | Sequence[str] | npt.NDArray[np.str_]
Kind = Literal["sample", "prompt"]

ID_KINDS: tuple[Kind, Kind] = ("sample", "prompt")
MOST_TOKENS = 2**53
"""The largest count: integers up to it are exact in the float64 of a weight."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences this data-parallel rank trains on in one optimizer step.

    Each field but the last two holds one integer per sequence, int64 ``[S]``, on the CPU: a list,
    a numpy array or a tensor. Counts are complete over context parallelism. Padding sequences are
    left out. Building one checks nothing: :func:`plan_step` does, so that all ranks fail together.
    """

    active_tokens: IntsLike
    """n_s: tokens whose loss mask is 1."""
    sample: Ids | None = None
    """Id of the sequence's sample, integer or string; None: each sequence is its own sample.

    Ids are global over the data-parallel group: equal ids on two ranks are one sample.
    """
    prompt: Ids | None = None
    """Id of the sequence's prompt, integer or string, global likewise."""
    microbatch: IntsLike | None = None
    """Index of the sequence's microbatch on this rank; needed by ``microbatch_token_mean``."""
    num_microbatches: int | None = None
    """M, microbatches with no sequences included; None: the largest ``microbatch`` plus one."""
    samples_per_prompt: int | None = None
    """How many samples each prompt has over the step; a check that ids are global, if passed."""
    string_ids: tuple[Kind, ...] = field(default=(), init=False, repr=False)
    """Which ids were strings; known once they are checked."""

    def checked(self) -> Sequences:
        """Return these as read-only int64 ``[S]``, strings as hashes; raises :class:`PlanError`."""
        n_S = _integers("active_tokens", self.active_tokens)
        check_sum(f"Sequences.active_tokens of {len(n_S)} sequences", n_S)
        columns = {"active_tokens": n_S}
        for kind in ID_KINDS:
            ids: Ids | None = getattr(self, kind)
            if ids is not None:
                columns[kind] = _ids(kind, ids, len(n_S))
        m = self.num_microbatches
        if m is not None and not is_integer(m, highest=MOST_TOKENS):
            raise PlanError(f"got num_microbatches {m!r}, expected an integer from 0 to 2^53")
        if self.microbatch is not None:
            columns["microbatch"] = _integers("microbatch", self.microbatch, len(n_S))
            least = int(columns["microbatch"].max(initial=-1)) + 1
            if m is not None and m < least:
                raise PlanError(
                    f"microbatch names microbatch {least - 1}, num_microbatches is {m}: indices "
                    "run from 0 to num_microbatches - 1"
                )
            m = least if m is None else m
        number = self.samples_per_prompt
        if number is not None and not is_integer(number, lowest=1):
            raise PlanError(f"got samples_per_prompt {number!r}, expected an integer from 1")
        if number is not None and self.prompt is None:
            raise PlanError(f"got samples_per_prompt {number} and no prompt ids: pass prompt=")
        for column_S in columns.values():
            column_S.flags.writeable = False  # the weights follow from them
        checked = replace(self, **columns, num_microbatches=m)  # type: ignore[arg-type]
        strings = tuple(kind for kind in ID_KINDS if _are_strings(getattr(self, kind)))
        object.__setattr__(checked, "string_ids", strings)
        return checked


def check_sum(what: str, tokens: Ints) -> None:
    """Raise where token counts sum to more than float64 holds exactly."""
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
    name: str, values: IntsLike, length: int | None = None, *, lowest: int | None = 0
) -> Ints:
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise PlanError(
            f"Sequences.{name} is on {values.device}: counts and ids are CPU integers, pass a "
            "list or a CPU tensor"
        )
    return checked_integers(f"Sequences.{name}", values, PlanError, lowest=lowest, length=length)


def _ids(kind: Kind, ids: Ids, length: int) -> Ints:
    if not _are_strings(ids):
        id_S = _integers(kind, ids, length, lowest=None)  # type: ignore[arg-type]
        if (id_S == -1).any():
            raise PlanError(
                f"Sequences.{kind}: got the id -1 at index {(id_S == -1).argmax()}, which "
                f"frameworks use for an unknown one: pass the {kind} of every sequence, or leave "
                f"{kind}= out"
            )
        return id_S
    array = np.asarray(ids)
    texts, index = np.unique(array.astype(np.str_), return_inverse=True)
    hashes = np.array([hashed(text) for text in texts.tolist()], dtype=np.int64)
    if len(np.unique(hashes)) < len(texts):
        raise PlanError(f"Sequences.{kind}: two strings have one 63-bit hash: pass integer ids")
    return _integers(kind, hashes[index.ravel()].reshape(array.shape), length)


def _are_strings(ids: object) -> bool:
    """Whether all of some ids are strings; a mixture is left to be refused as no integers."""
    if isinstance(ids, np.ndarray):
        ids = ids.ravel().tolist() if ids.dtype.kind in "UO" else ()
    if not isinstance(ids, Sequence) or not len(ids):
        return False
    return all(isinstance(one, str) for one in ids)
