"""End each part of the probe alike on all ranks, and restore what the probe may change.

An error on one rank must become the same error on all, or the others wait in a collective forever.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.exchange import together

PATIENCE = timedelta(seconds=60)
"""How long a rank that failed waits for the others to leave their collectives."""

_REMEDY = "fix the error, or turn the probe off with --no-loss-aggregation-probe"

_parts_run = itertools.count()


class NotMeasuredError(Exception):
    """The probe cannot run; its message is equal on all ranks."""


@contextlib.contextmanager
def part(name: str, *, is_fatal: bool = False) -> Iterator[None]:
    """End the block alike on all ranks if it fails on one.

    All raise ``NotMeasuredError`` after an error of Megatron's parts, and :class:`ContractError`
    after one of those, or after any error if ``is_fatal``. One all-gather over the world, a second
    one after a long error. A rank that fails waits until every rank has left the block. If one may
    still be in a collective of it after ``PATIENCE``, the failed rank raises
    :class:`ContractError`, and the launcher ends the others.
    """
    severity, fault = 0, ""
    try:
        yield
    except NotMeasuredError as error:
        severity, fault = 1, str(error)
    except ContractError as error:
        severity, fault = 2, str(error)
    except Exception as error:  # of any kind: no rank may leave the others waiting
        severity, fault = 1, f"{type(error).__name__}: {error}"
        if is_fatal:
            severity, fault = 2, f"the startup probe failed in the {name}, {fault}: {_REMEDY}"
    _wait_for_others(name, fault)
    with together(dist.group.WORLD, f"leave the startup probe's {name}") as ranks:
        ranks.own = severity, fault
    severity = max(severity for severity, _ in ranks.of_ranks)
    if not severity:
        return
    rank, fault = next((r, said) for r, (one, said) in enumerate(ranks.of_ranks) if one == severity)
    fault = f"rank {rank}: {fault}"
    if severity == 2:
        raise ContractError(fault)
    raise NotMeasuredError(f"{name}: {fault}")


def _wait_for_others(name: str, fault: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    mark = f"megatron_lossagg/probe/{next(_parts_run)}"
    store.set(f"{mark}/{dist.get_rank()}", "left")
    if not fault:
        return
    try:
        store.wait([f"{mark}/{rank}" for rank in range(dist.get_world_size())], PATIENCE)
    except Exception:
        raise ContractError(
            f"the startup probe failed on rank {dist.get_rank()} in the {name}: {fault}. Other "
            f"ranks still wait for this one, so the run ends: {_REMEDY}"
        ) from None


@contextlib.contextmanager
def untouched(chunks: Sequence[Any]) -> Iterator[None]:
    """Refuse every use of the live chunks' gradients, and restore Megatron's globals."""
    from megatron.core import parallel_state

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("it works on the live model, not on the one that it is given")

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
