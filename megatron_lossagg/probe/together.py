"""End each part of the probe alike on all ranks, and restore what the probe may change.

A part is a piece of Megatron-Core that the probe runs: DDP, the schedule, finalize. An error
on one rank must become the same error on all, or the others wait in a collective forever.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_lossagg.errors import ContractError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.integers import Ints

__all__ = ["PATIENCE", "NotMeasuredError", "part", "untouched", "world", "world_flags"]

PATIENCE = timedelta(seconds=60)
"""How long a rank that failed waits for the others to leave their collectives."""

_parts_run = itertools.count()


class NotMeasuredError(Exception):
    """A part of Megatron cannot run the probe; carries part and reason, equal on all ranks."""


def world() -> Exchange:
    """Return the exchange over all ranks."""
    return Exchange(dist.group.WORLD)


def world_flags(*flags: bool) -> Ints:
    """Gather flags, ``[number of flags, world size]``. One all-gather over the world."""
    by_flag: Ints = world().integers(np.array(flags, dtype=np.int64)).T
    return by_flag


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Raise :class:`NotMeasuredError` on all ranks where the block fails on one.

    Collectives: one all-gather over the world, a second one after an error. A rank that fails
    waits until every rank has left the block. If one may still be in a collective of it after
    ``PATIENCE``, the failed rank raises :class:`ContractError`, and the launcher ends the
    others.
    """
    fault = ""
    try:
        yield
    except Exception as error:  # of any kind: no rank may leave the others waiting
        fault = f"{type(error).__name__}: {error}"
    store = dist.distributed_c10d._get_default_store()
    mark = f"megatron_lossagg/probe/{next(_parts_run)}"
    store.set(f"{mark}/{dist.get_rank()}", "left")
    if fault:
        try:
            store.wait([f"{mark}/{rank}" for rank in range(dist.get_world_size())], PATIENCE)
        except Exception:
            raise ContractError(
                f"the startup probe failed on rank {dist.get_rank()} in the {name}: {fault}. "
                "Other ranks still wait for this one, so the run ends. Fix the error, or turn "
                "the probe off with --no-loss-aggregation-probe"
            ) from None
    (failed_by_rank,) = world_flags(bool(fault))
    if failed_by_rank.any():
        faults = enumerate(world().messages(fault))
        reason = next(f"rank {rank}: {message}" for rank, message in faults if message)
        raise NotMeasuredError(name, reason)


@contextlib.contextmanager
def untouched(chunks: Sequence[Any]) -> Iterator[None]:
    """Refuse every use of the live chunks' gradients, and restore Megatron's globals."""
    from megatron.core import parallel_state

    def refuse(*_: Any, **__: Any) -> None:
        raise ContractError("it works on the live model, not on the one that it is given")

    names = ("zero_grad_buffer", "start_grad_sync", "finish_grad_sync", "scale_gradients")
    own_by_chunk = [{name: vars(c)[name] for name in names if name in vars(c)} for c in chunks]
    state = vars(parallel_state)
    state_before = {name: value for name, value in state.items() if name.isupper()}
    try:
        for chunk in chunks:
            vars(chunk).update(dict.fromkeys(names, refuse))
        yield
    finally:
        for chunk, own in zip(chunks, own_by_chunk, strict=True):
            for name in names:
                vars(chunk).pop(name, None)
            vars(chunk).update(own)
        state.update(state_before)
