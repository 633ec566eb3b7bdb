"""The probe's model: a tiny chunk per stage, under copies of the live configs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.contract.engine import engine_of

_PIECE = 128  # elements of w per rank; Megatron pads a bucket to a multiple of it

_PLAIN_CONFIG: Mapping[str, Any] = {
    # callbacks
    "timers": None,
    "no_sync_func": None,
    "grad_sync_func": None,
    "param_sync_func": None,
    "grad_scale_func": None,
    "config_logger_dir": "",
    # the shape and dtype of what stages send one another
    "hidden_size": 1,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "enable_autocast": False,
    "variable_seq_lengths": False,
    "sequence_parallel": False,
    # what needs modules that the probe's chunk does not have
    "num_moe_experts": None,
    "moe_router_enable_expert_bias": False,
    "mtp_num_layers": None,
    "mtp_standalone": False,
    "qk_layernorm": False,
    "has_cond_embedder": False,
    "defer_embedding_wgrad_compute": False,
    "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
    # memory and speed
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "recompute_granularity": None,
    "num_microbatches_with_partial_activation_checkpoints": None,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
}
_PLAIN_DDP_CONFIG: Mapping[str, Any] = {
    "overlap_param_gather": False,
    "align_param_gather": False,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "nccl_ub": False,
    "pad_buckets_for_high_nccl_busbw": False,  # a padded bucket leaves some ranks no weight
}


class _ProbeChunk(torch.nn.Module):
    """One stage of the probe's model: the sum of its weights; its input gets the same gradient."""

    pre_process = post_process = False
    share_embeddings_and_output_weights = False

    def __init__(self, live: Any, config: Any, vp_stage: int | None) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.input: Tensor | None = None
        self.weights = _Weights(live)

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what the stage before sent; the schedule calls it."""
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self) -> Tensor:
        """Return ``[1, 1, 1]`` with storage of its own.

        With ``deallocate_pipeline_outputs`` the schedule frees the output once it is sent, and
        refuses to free a view.
        """
        total: Tensor = self.weights()
        return total if self.input is None else _Through.apply(self.input) + total  # type: ignore[no-untyped-call]


class _Weights(torch.nn.Module):
    """The weights, which Megatron-FSDP gathers and frees by submodules."""

    def __init__(self, live: Any) -> None:
        super().__init__()
        device, engine = next(live.module.parameters()).device, engine_of(live)
        self.dense = _weight(engine.dp_cp_group, device)
        if engine.has_experts:
            weight = _weight(engine.expert_group, device)
            weight.allreduce = False  # how DistributedDataParallel recognizes an expert's
            self.experts = torch.nn.ParameterDict({"weight": weight})  # Megatron-FSDP: by the name

    def forward(self) -> Tensor:
        """Return their sum, ``[1, 1, 1]``."""
        sums = torch.stack([weight.sum() for weight in self.parameters()])
        return sums.view(1, 1, -1).sum(dim=-1, keepdim=True)


class _Through(torch.autograd.Function):
    """Zeros that pass the gradient on.

    gloo may still read an output that the schedule has freed (``deallocate_pipeline_outputs``): the
    next stage then receives any value. It must not reach the probe's loss, which would be NaN.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return torch.zeros_like(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _weight(group: Any, device: torch.device) -> Any:
    size = _PIECE * dist.get_world_size(group)
    return torch.nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device))


def build(chunks: Sequence[Any], finalize: Callable[..., None], num_stages: int) -> list[Any]:
    """Wrap a :class:`_ProbeChunk` for each live chunk in the live chunk's class.

    ``finalize``: what the schedule calls to finalize. The live configs are copied.
    """
    config = _changed(chunks[0].config, _PLAIN_CONFIG)
    config.microbatch_group_size_per_vp_stage = num_stages
    config.finalize_model_grads_func = finalize
    built = []
    for index, chunk in enumerate(chunks):
        module = _ProbeChunk(chunk, config, index if len(chunks) > 1 else None)
        ddp_config = _changed(chunk.ddp_config, _PLAIN_DDP_CONFIG)
        built.append(engine_of(chunk).wrap(config, ddp_config, module, _Weights))
    if built[0].ddp_config.overlap_grad_reduce:  # as megatron.training does
        config.no_sync_func = _per_chunk([chunk.no_sync for chunk in built])
    if _starts_sync(chunks):
        config.grad_sync_func = _per_chunk([chunk.start_grad_sync for chunk in built])
    return built


def _starts_sync(chunks: Sequence[Any]) -> bool:
    """Whether the schedule starts the chunks' reductions, as with ``--align-grad-reduce``.

    Any other ``grad_sync_func`` is the framework's own and is left out of the probe.
    """
    hooks = chunks[0].config.grad_sync_func
    hooks = hooks if isinstance(hooks, list) else [hooks]
    return len(hooks) == len(chunks) and all(
        getattr(hook, "__name__", None) == "start_grad_sync"
        and getattr(hook, "__self__", None) in engine_of(chunk).modules
        for hook, chunk in zip(hooks, chunks, strict=True)
    )


def _per_chunk(hooks: list[Any]) -> Any:
    """Return hooks as Megatron takes them: a list, or the only one."""
    return hooks if len(hooks) > 1 else hooks[0]


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a shallow copy with the changes to those fields that this version has."""
    changed = copy.copy(config)
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(changed, name, value)
    return changed
