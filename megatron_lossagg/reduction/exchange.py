"""What the ranks of a group send each other: a few integers, ragged columns, objects.

Each call is one collective and, except :meth:`Exchange.tensors`, one host sync. The tensors
are on the device that the group's backend needs: the CPU for gloo, the current CUDA device for
NCCL. :func:`together` is how ranks fail: all of them, or none.

For whom a rank waits is said after half a minute, and by the error of an exchange that failed,
without a collective: a rank that has waited a while leaves its number in the process group's store,
where the first that has waited too long looks for the others'. One thread of the process looks at
all waits, so that a wait itself costs no more than an entry of a list.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from megatron_lossagg.errors import ContractError, LossAggregationError, PlanError, message_of, say
from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.integers import Ints

PATIENCE = 30.0
"""Seconds after which a rank that waits for others says so."""
TICK = 1.0
"""Seconds between two looks."""

_numbers: Counter[str] = Counter()
"""Exchanges of each group, by its name: the same on all of its ranks that take part."""
_waits: list[_Wait] = []
_watcher: threading.Thread | None = None


def to_begin(forward_only: bool | None) -> str:
    """Say what ranks begin, for ``doing``, and why one may wait for the others forever."""
    kind = {None: "a step", True: "an evaluation", False: "a training step"}[forward_only]
    return (
        f"begin {kind}; a step that one rank begins alone, as after an error that it caught, never "
        "ends: begin it on all ranks, or let the error end the run"
    )


@contextmanager
def waiting(group: dist.ProcessGroup, doing: str) -> Iterator[None]:
    """Name the ranks that do not come to an exchange of ``group``; ``doing``: what for.

    After :data:`PATIENCE` in a line, once, and this rank goes on waiting; if the exchange then
    fails, in a :class:`ContractError`.
    """
    global _watcher
    wait = _Wait(group, doing)
    _waits.append(wait)
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="lossagg-waits", daemon=True)
        _watcher.start()
    try:
        yield
    except RuntimeError as error:
        if names := wait.late():
            raise ContractError(
                f"{names} did not come in time, expected every rank to {doing}"
            ) from error
        raise
    finally:
        _waits.remove(wait)


@dataclass(eq=False)
class _Wait:
    """One exchange of this rank with others."""

    group: dist.ProcessGroup
    doing: str
    began: float = field(default_factory=time.monotonic)
    is_marked: bool = False
    is_said: bool = False

    def __post_init__(self) -> None:
        name = str(getattr(self.group, "group_name", ""))
        _numbers[name] += 1
        self.key = f"lossagg/{name}/{_numbers[name]}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def look(self) -> None:
        """Leave this rank's number in the store after a while, and name the others later."""
        if not self.is_marked and self.seconds > PATIENCE / 6:
            self.is_marked = True
            _store().set(f"{self.key}/{dist.get_rank()}", "")
        if not self.is_said and self.seconds > PATIENCE:
            self.is_said = True
            is_first = _store().add(self.key, 1) == 1
            if is_first and (names := self.late()):
                say(f"rank {dist.get_rank()} has waited {PATIENCE:g} s for {names} to {self.doing}")

    def late(self) -> str:
        """Name the ranks that have not waited here; empty if none, and before it is late."""
        if self.seconds < PATIENCE:
            return ""
        with suppress(RuntimeError):  # a store that is gone
            store, ranks = _store(), dist.get_process_group_ranks(self.group)
            ranks = [one for one in ranks if one != dist.get_rank()]
            return _named([rank for rank in ranks if not store.check([f"{self.key}/{rank}"])])
        return ""


def _watch() -> None:
    while True:
        time.sleep(TICK)
        for wait in [*_waits]:
            with suppress(Exception):  # a group that ends, a store that keeps nothing
                wait.look()


def _store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    clone = getattr(store, "clone", None)  # the backend may wait in the store itself
    return store if clone is None else clone()


def _named(ranks: list[int]) -> str:
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


_HEAD_BYTES = 2048
"""Of the first all-gather of bytes, with their number."""
DP_RANK = "rank {} of the data-parallel group"
TP_RANK = "tensor-parallel rank {}"


@dataclass
class Told:
    """What the ranks of a group tell each other in :func:`together`."""

    own: Any = None
    """What this rank tells; set it inside the block, to what can be pickled."""
    of_ranks: list[Any] = field(default_factory=list)
    """What each rank has told, after the block."""
    error: Exception | None = None
    """What ended the block on this rank, if anything."""


@dataclass(frozen=True)
class Exchange:
    """All-gathers over one process group; without a group, this process only."""

    group: dist.ProcessGroup | None
    doing: str = "come to the same step"
    """What all ranks are waited for to do."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def name(self, rank: int | None = None) -> str:
        """Name a rank of the group for a message, by default this process's."""
        if self.group is None and dist.is_initialized():
            return f"rank {dist.get_rank()}"
        return DP_RANK.format(self.rank if rank is None else rank)

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Global ranks of the group; None without a group."""
        return None if self.group is None else tuple(dist.get_process_group_ranks(self.group))

    def integers(self, own: Ints) -> Ints:
        """Gather an int64 ``[K]`` of every rank; returns ``[W, K]``. One all-gather."""
        with self._waiting():
            gathered = self._gathered(torch.from_numpy(np.ascontiguousarray(own)))
            integers: Ints = gathered.cpu().numpy()
        return integers

    def tensors(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a ``[K]`` of every rank; returns ``[W, K]`` on the backend's device.

        One all-gather; no host sync if ``own`` is on that device.
        """
        with self._waiting():
            return self._gathered(own)

    def _waiting(self) -> Any:
        if self.group is None or self.size == 1:
            return nullcontext()
        return waiting(self.group, self.doing)

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return own[None]
        own = moved(own, self._device_for(own))
        gathered = own.new_empty(self.size, len(own))
        dist.all_gather(list(gathered.unbind()), own, group=self.group)
        return gathered

    def ragged(self, own: Sequence[Ints], counts_W: Ints) -> Sequence[Ints]:
        """Gather columns of int64 ``[n]`` of every rank, n differing; each ``[sum n]``.

        One all-gather. ``counts_W``: every rank's n, already known to all.
        """
        if self.size == 1:
            return own
        padded = np.zeros((len(own), int(counts_W.max())), dtype=np.int64)
        padded[:, : len(own[0])] = own
        gathered = self.integers(padded.ravel()).reshape(self.size, *padded.shape)
        parts = [columns[:, :n] for columns, n in zip(gathered, counts_W, strict=True)]
        return list(np.concatenate(parts, axis=1))

    def packed(self, own: bytes) -> list[bytes]:
        """Gather bytes of every rank. One all-gather of 2 KiB; a second one if a rank has more."""
        if self.size == 1:
            return [own]
        packed = np.zeros(max(_HEAD_BYTES, 8 + len(own) + -len(own) % 8), dtype=np.uint8)
        packed[:8] = np.array([len(own)]).view(np.uint8)
        packed[8 : 8 + len(own)] = np.frombuffer(own, dtype=np.uint8)
        head, rest = np.split(packed.view(np.int64), [_HEAD_BYTES // 8])
        gathered_WN = self.integers(head)
        length_W = gathered_WN[:, 0]
        more = max(0, -(-int(length_W.max()) // 8) + 1 - len(head))
        if more:
            rests_WN = self.integers(np.pad(rest, (0, more - len(rest))))
            gathered_WN = np.concatenate([gathered_WN, rests_WN], axis=1)
        return [
            row_N[1:].tobytes()[:length]
            for row_N, length in zip(gathered_WN, length_W.tolist(), strict=True)
        ]

    @contextmanager
    def together(
        self, named: str | None = None, raises: type[LossAggregationError] = PlanError
    ) -> Iterator[Told]:
        """See the function; ``named``: None as data-parallel ranks; in a group of one too."""
        named = DP_RANK if named is None else named
        told = Told()
        try:
            yield told
        except Exception as error:  # of any type: no rank may leave the others waiting
            told.error = error
        pairs = self._exchanged(told)
        told.of_ranks = [own for own, _ in pairs]
        for rank, (_, fault) in enumerate(pairs):
            if fault is not None:
                _raise(f"{named.format(rank)}: " if named else "", fault, told.error, raises)

    def _exchanged(self, told: Told) -> list[tuple[Any, str | None]]:
        """Return what each rank tells, and its fault."""
        if self.size == 1:
            return [(told.own, _text_of(told.error))]
        try:
            packed = pickle.dumps((told.own, _text_of(told.error)))
        except Exception as error:  # of any type, as above
            told.error = error
            packed = pickle.dumps((None, _text_of(error)))
        try:
            return [pickle.loads(one) for one in self.packed(packed)]
        except Exception as error:  # as if the others wait elsewhere: this rank's own says more
            raise error from told.error or error.__cause__

    def _device_for(self, own: torch.Tensor) -> torch.device:
        # A backend is named "gloo", "nccl" or "cpu:gloo,cuda:nccl".
        backend = str(dist.get_backend_config(self.group))
        if f"{own.device.type}:" in backend:
            return own.device
        if "cpu:" in backend or backend == dist.Backend.GLOO:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def together(
    group: dist.ProcessGroup | None,
    doing: str,
    *,
    named: str = "rank {}",
    raises: type[LossAggregationError] = ContractError,
) -> AbstractContextManager[Told]:
    """Leave a block on all ranks of a group, or raise on all of them what one has raised.

    No rank may leave the others waiting: an error of any type in the block, and what cannot be
    pickled, becomes the same ``raises`` on every rank, which names the first rank that has one, and
    whose cause on this rank is its own. In a group of one, or without a group, nobody is named.
    A rank that waits longer than half a minute for others at the end of the block names them.

    ``doing``: what every rank is expected to do, an infinitive for that line. ``named``: how the
    group's ranks are called. One all-gather of 2 KiB with its host sync, and a second one if a rank
    tells more.
    """
    exchange = Exchange(group, doing)
    return exchange.together(named if exchange.size > 1 else "", raises)


def _raise(
    named: str, fault: str, own: Exception | None, raises: type[LossAggregationError]
) -> NoReturn:
    """Raise what a rank has told; ``own``: this rank's error, if it has one."""
    if not isinstance(own, raises):
        raise raises(f"{named}{fault}") from own
    if not named:
        raise own
    raise raises(f"{named}{fault}") from own.__cause__ or own


def _text_of(error: Exception | None) -> str | None:
    """Return an error's message; what UTF-8 cannot encode, as in a file's name, is a "?"."""
    return None if error is None else message_of(error).encode(errors="replace").decode()
