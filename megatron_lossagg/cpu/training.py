"""Stand-ins for what Megatron-LM's ``megatron.training`` takes from CUDA.

Beyond those for Megatron-Core: a Megatron-LM checkout's scripts then train on a CPU with gloo, with
the attention and the norms of this package, which know context and sequence parallelism. Nothing in
the table computes but these. What Megatron-LM takes from CUDA kernels is turned off by its own
flags, which ``docs/integrations/megatron-lm.md`` lists.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from megatron_lossagg.cpu.stand_ins import (
    Replacement,
    always,
    around,
    install,
    instead,
    replace,
    replaced,
)
from megatron_lossagg.errors import ContractError


@around
def _without_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "allow_no_cuda": True})


@around
def _own_modules(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron_lossagg.cpu.model import use_own_modules

    return use_own_modules(original(*args, **kwargs))


@around
def _without_devices(
    original: Callable[..., Any], *args: Any, device_ids: Any = None, **kwargs: Any
) -> Any:
    del device_ids  # gloo takes none
    return original(*args, **kwargs)


@around
def _keep_pipeline_outputs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    config = original(*args, **kwargs)
    config.deallocate_pipeline_outputs = False
    return config


def _indices(offsets: Any, num_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Answer as Transformer Engine's ``thd_get_partitioned_indices``: chunks r and 2 CP - 1 - r.

    A sequence that is not a multiple of 2 CP tokens is refused, as there.
    """
    del num_tokens
    positions = []
    for begin, end in pairwise(sorted({int(offset) for offset in offsets.flatten()})):
        size, rest = divmod(end - begin, 2 * cp_size)
        if rest:
            raise ValueError(f"got a sequence of {end - begin} tokens, expected a multiple of 2 CP")
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions.append(torch.arange(begin + chunk * size, begin + (chunk + 1) * size))
    return torch.cat(positions)


@around
def _with_engine_for_packing(
    original: Callable[..., Any], version: str, *args: Any, **kwargs: Any
) -> Any:
    """Answer yes for the version that a packing scheduler asks for, whose attention is ours."""
    return version == "2.9.0" or original(version, *args, **kwargs)


@around
def _with_indices(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let a function of ``megatron.core.utils`` find Transformer Engine's indices."""
    from megatron.core import utils

    engine = types.SimpleNamespace(thd_get_partitioned_indices=_indices)
    theirs = {name: getattr(utils, name, None) for name in ("tex", "is_te_min_version")}
    vars(utils).update(tex=engine, is_te_min_version=lambda *args, **kwargs: True)
    try:
        return original(*args, **kwargs)
    finally:
        vars(utils).update(theirs)


@around
def _with_padded_offsets(
    original: Callable[..., Any],
    batch: Any,
    cu_seqlens: Any,
    cu_seqlens_padded: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if cu_seqlens_padded is None:  # 0.16.1's SFTDataset gives none; its offsets are padded
        cu_seqlens_padded = cu_seqlens
    return _with_indices(original)(batch, cu_seqlens, cu_seqlens_padded, *args, **kwargs)


@around
def _of_flat_offsets(
    original: Callable[..., Any], t: Any, cu_seqlens: Any, *args: Any, **kwargs: Any
) -> Any:
    return original(t, cu_seqlens.flatten(), *args, **kwargs)


_PROPERTIES = types.SimpleNamespace(
    major=8, minor=0, name="cpu", total_memory=0, multi_processor_count=1
)

TRAINING_STAND_INS: dict[str, Replacement] = {
    # megatron.training.initialize._set_random_seed
    "torch.cuda.device_count": always(1),
    # torch.utils.data.DataLoader(pin_memory=True), where NVML counts devices
    "torch.cuda.is_available": always(False),
    # megatron.training.initialize._initialize_distributed
    "torch.cuda.set_device": always(None),
    # megatron.training.utils.get_device_arch_version
    "torch.cuda.get_device_properties": always(_PROPERTIES),
    # megatron.training.training.pretrain
    "megatron.training.training.initialize_megatron": _without_cuda,
    "megatron.training.training.set_jit_fusion_options": always(None),
    # megatron.training.initialize._compile_dependencies
    "megatron.legacy.fused_kernels.load": always(None),
    # megatron.core.pipeline_parallel.schedules.deallocate_output_tensor
    "megatron.training.arguments.core_transformer_config_from_args": _keep_pipeline_outputs,
    # pretrain_gpt.get_batch: packed sequences, context parallelism; until 0.18
    "megatron.core.utils.get_thd_batch_on_this_cp_rank": _with_padded_offsets,
    # pretrain_gpt.get_batch: packed sequences, context parallelism; from 0.19 on
    "megatron.core.utils._get_batch_on_this_cp_rank_per_document_balancing": _with_indices,
    # pretrain_gpt.get_batch with a packing scheduler, context parallelism; dev
    "megatron.core.datasets.data_schedule_utils.get_thd_partitioned_indices": instead(_indices),
    # TransformerConfig with a packing scheduler, which asks for Transformer Engine 2.9; dev
    "megatron.core.transformer.transformer_config.is_te_min_version": _with_engine_for_packing,
    # megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator; dev
    "torch.cuda.is_current_stream_capturing": always(False),
    # megatron.core.parallel_state.initialize_model_parallel with dynamic context parallelism; dev
    "torch.distributed.barrier": _without_devices,
    # pretrain_gpt.get_batch: packed data with RoPE, whose fused kernel needs CUDA
    "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd": _of_flat_offsets,
    # context parallelism, packed sequences, sequence parallelism
    "megatron.core.transformer.transformer_block._get_block_submodules": _own_modules,
    "megatron.core.transformer.multi_token_prediction._get_mtp_block_submodules": _own_modules,
}


def install_training() -> None:
    """Install the stand-ins for Megatron-Core and for ``megatron.training``, which it imports.

    Call it before anything imports Megatron; later calls do nothing. ``megatron`` must lead to a
    Megatron-LM checkout: run from its folder or with it on the path. Raises
    :class:`ContractError` if it does not, before anything is replaced.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes most of a short run
    # Asked for by Megatron-LM; and anything but 1 by its Megatron-FSDP.
    connections = "8" if "--use-megatron-fsdp" in sys.argv else "1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    if "torch.cuda.device_count" in replaced():
        return
    found = None
    with contextlib.suppress(ModuleNotFoundError):  # no megatron at all
        found = importlib.util.find_spec("megatron.training")
    if found is None:
        raise ContractError(
            "megatron.training cannot be found, expected a Megatron-LM checkout: run in its "
            "folder, or put it on PYTHONPATH; a loop of your own makes a LossAggregator, or a "
            "Weighing"
        )
    absent = _triton_while_importing()
    install()
    importlib.import_module("megatron.training.training")
    for name in absent:
        del sys.modules[name]
    replace({name: make for name, make in TRAINING_STAND_INS.items() if _exists(name)})
    # Here the two states that it compares are one: it would warn for every weight matrix.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_not_of_random_states)


def _is_not_of_random_states(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _exists(name: str) -> bool:
    """Whether this release of Megatron-LM has a name."""
    owner, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(owner), attribute)
    except ImportError:
        return False


class _Absent(types.ModuleType):
    """A module whose every name is a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args and callable(args[0]) else _decorator


def _triton_while_importing() -> list[str]:
    """Answer for triton, which Megatron imports unguarded; return what to remove again."""
    if importlib.util.find_spec("triton") is not None:
        return []
    # Both look for triton when they are imported, and must see that there is none.
    for looking in ("torch._dynamo", "transformers.utils"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(looking)

    triton, language = _Absent("triton"), _Absent("triton.language")
    vars(triton).update(__path__=[], __version__="0", language=language)
    vars(language).update(constexpr=object)
    names = {"triton": triton, "triton.language": language}
    sys.modules.update(names)
    return list(names)
