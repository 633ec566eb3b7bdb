"""End each part of the probe alike on all ranks, and restore what the probe may change.

An error on one rank must become the same error on all, or the others wait in a collective forever.
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

__all__ = ["PATIENCE", "NotMeasuredError", "any_rank", "part", "untouched"]

PATIENCE = timedelta(seconds=60)
"""How long a rank that failed waits for the others to leave their collectives."""

_parts_run = itertools.count()


class NotMeasuredError(Exception):
    """A part of Megatron cannot run the probe; its message is equal on all ranks."""


@contextlib.contextmanager
def part(name: str, *, fatal: str = "") -> Iterator[None]:
    """Raise :class:`NotMeasuredError` on all ranks if the block fails on one.

    ``fatal``: why training cannot go on then, if so; all ranks raise :class:`ContractError`. One
    all-gather over the world, a second one after an error. A rank that fails waits until every rank
    has left the block. If one may still be in a collective of it after ``PATIENCE``, the failed
    rank raises :class:`ContractError`, and the launcher ends the others.
    """
    fault = ""
    try:
        yield
    except ContractError as error:
        fault = str(error)
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
    if not any_rank(bool(fault)):
        return
    messages = enumerate(Exchange(dist.group.WORLD).messages(fault))
    reason = next(f"rank {rank}: {message}" for rank, message in messages if message)
    if fatal:
        raise ContractError(f"{reason}. {fatal}")
    raise NotMeasuredError(f"{name}: {reason}")


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. One all-gather over the world."""
    return bool(Exchange(dist.group.WORLD).integers(np.array([flag], dtype=np.int64)).any())


@contextlib.contextmanager
def untouched(chunks: Sequence[Any]) -> Iterator[None]:
    """Refuse every use of the live chunks' gradients, and restore Megatron's globals."""
    from megatron.core import parallel_state

    def refuse(*_: Any, **__: Any) -> None:
        raise ContractError("it works on the live model, not on the one that it is given")

    names = ("zero_grad_buffer", "start_grad_sync", "finish_grad_sync", "scale_gradients")
    changed = [*map(vars, chunks), vars(parallel_state)]
    before = [dict(attributes) for attributes in changed]
    try:
        for chunk in chunks:
            vars(chunk).update(dict.fromkeys(names, refuse))
        yield
    finally:
        for attributes, own in zip(changed, before, strict=True):
            for name in attributes.keys() - own.keys():
                del attributes[name]
            attributes.update(own)
