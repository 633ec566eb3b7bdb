"""What is read from the live, wrapped model chunks, and which of them are refused.

Which options are rejected is in :mod:`megatron_lossagg.contract.megatron_options`. Symbols:
``TransformerConfig``, ``rerun_state_machine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.contract.megatron_options import check_options
from megatron_lossagg.contract.release import megatron_release, megatron_version
from megatron_lossagg.contract.scaling import LossScaling
from megatron_lossagg.errors import ContractError

_OLDEST_MEGATRON = (0, 13)


def checked_loss_scaling(chunks: Sequence[Any], *, counts_parts: bool = False) -> LossScaling:
    """Refuse what cannot be compensated; return the loss scaling of the first chunk's config.

    ``counts_parts``: as in :func:`check_options`.
    """
    if megatron_release() < _OLDEST_MEGATRON:
        raise ContractError(
            f"megatron-core {megatron_version()}: before 0.13 num_tokens is reduced over a "
            "different group and the schedule multiplies by CP: install megatron-core>=0.13"
        )
    if not chunks:
        raise ContractError("got no model chunk: pass the chunks that the schedule gets")
    for chunk in chunks:
        if fault := engine_of(chunk).fault():
            raise ContractError(fault)
    config = chunks[0].config
    check_options(
        "model config",
        config,
        cp_size=int(config.context_parallel_size),
        num_chunks=len(chunks),
        counts_parts=counts_parts,
    )
    return "per_token" if config.calculate_per_token_loss else "average"


def may_hold_back(no_sync: Any, chunks: Sequence[Any]) -> bool:
    """Whether a no_sync_func may hold back the reduction of these chunks' gradients.

    That of a different model does not, nor ``nullcontext``; what others do is not known.
    """
    while isinstance(no_sync, partial):
        no_sync = no_sync.func
    owner = getattr(no_sync, "__self__", None)
    is_of_others = hasattr(owner, "ddp_config") and all(
        owner is not module for chunk in chunks for module in engine_of(chunk).modules
    )
    return no_sync is not None and no_sync is not nullcontext and not is_of_others


def is_rerunning() -> bool:
    """Whether Megatron's rerun machine runs a step again (``RerunState``, from 0.9 on)."""
    from megatron.core import rerun_state_machine

    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return machine is not None and "RERUNNING" in machine.state.name
