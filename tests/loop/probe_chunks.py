"""The live chunks that the probe reads, as of a run or of Megatron-LM, and their facts."""

import dataclasses
from unittest.mock import patch

import tiny_gpt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.timers import Timers
from megatron.core.transformer.module import Float16Module
from probe_cases import LAYOUTS

import megatron_lossagg.cpu as cpu
from megatron_lossagg.verify.step_data import VOCABULARY

DDP_OPTIONS = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True},
    "distributed": {"use_distributed_optimizer": True},
    "distributed, overlap": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "in collective": {"average_in_collective": True},
}

# What megatron.training 0.16.1 gives DistributedDataParallelConfig from its flags.
MEGATRON_LM_DDP_OPTIONS = {
    "defaults": {"grad_reduce_in_fp32": True, "check_for_nan_in_grad": True},
    "reduced in the parameters' dtype": {"check_for_nan_in_grad": True},
    "small buckets": {
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": True,
        "check_for_large_grads": True,
        "overlap_grad_reduce": True,
        "bucket_size": 100,
    },
    "all overlaps": {
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": True,
        "check_for_large_grads": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "align_param_gather": True,
        "bucket_size": 100,
        "pad_buckets_for_high_nccl_busbw": True,
    },
    "fp32 accumulation": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "reduce_scatter_with_fp32_accumulation": True,
    },
}

MEGATRON_LM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Set after construction, because the model that they need is not built here.
MODULES_AND_MEMORY = {
    "enable_autocast": True,
    "autocast_dtype": torch.bfloat16,
    "sequence_parallel": True,
    "num_moe_experts": 2,
    "moe_router_enable_expert_bias": True,
    "mtp_num_layers": 1,
    "mtp_standalone": True,
    "qk_layernorm": True,
    "has_cond_embedder": True,
    "defer_embedding_wgrad_compute": True,
    "delay_wgrad_compute": True,
    "overlap_moe_expert_parallel_comm": True,
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "recompute_granularity": "full",
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
}


def megatrons_groups():
    from megatron.core.process_groups_config import ProcessGroupCollection  # from 0.15 on

    return ProcessGroupCollection.use_mpu_process_groups()


def live_chunks(
    layout=LAYOUTS["DP2"],
    *,
    per_token,
    dtype=torch.float32,
    wrapper=None,
    options=None,
    converted=lambda config, model: model,
    **ddp,
):
    """Build a real GPT of this layout in the DDP class that a run would use.

    ``options``: set on its config. ``converted``: puts a module around it.
    """
    more, vpp = {}, layout.vpp
    if layout.moe:
        more = {"num_moe_experts": 2, "add_bias_linear": False, "moe_aux_loss_coeff": 0.01}
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    config = tiny_gpt.config_of(per_token=per_token, **more)
    config.params_dtype = config.pipeline_dtype = dtype
    with patch.object(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None):
        spec = cpu.gpt_layer_spec(config)  # one layer per stage, virtual or not
    if vpp > 1:
        config.num_layers = 2 * vpp
        config.virtual_pipeline_model_parallel_size = vpp
        config.microbatch_group_size_per_vp_stage = 2
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    for name, value in (options or {}).items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    ddp.setdefault("grad_reduce_in_fp32", dtype == torch.bfloat16)
    groups = {}
    if layout.optimizer_instances > 1:
        ddp |= {"num_distributed_optimizer_instances": layout.optimizer_instances}
        groups = {"pg_collection": megatrons_groups()}
    chunks = []
    for stage in range(vpp):
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True) and stage == 0,
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and stage == vpp - 1,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            **({"vp_stage": stage} if vpp > 1 else {}),
        )
        wrapped = (wrapper or DistributedDataParallel)(
            config, DistributedDataParallelConfig(**ddp), converted(config, model), **groups
        )
        for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
            buffer.grad_data.uniform_()
        chunks.append(wrapped)
    return chunks


def megatron_lm_chunks(layout, name, *, per_token, dtype, folder):
    """Build the chunks of a run of megatron.training 0.16.1, with its config as inside train().

    From ``core_transformer_config_from_args``, ``get_model`` and ``train``, with every flag
    that sets one of their options; and, last, options that need modules or memory.
    """
    options = {
        "deallocate_pipeline_outputs": True,
        "variable_seq_lengths": False,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
    }
    if layout.vpp > 1 and name == "all overlaps":
        options["overlap_p2p_comm_warmup_flush"] = True
    chunks = live_chunks(
        layout,
        per_token=per_token,
        dtype=dtype,
        options=options,
        converted=Float16Module if dtype != torch.float32 else lambda config, module: module,
        **known_to(DistributedDataParallelConfig, MEGATRON_LM_DDP_OPTIONS[name]),
    )
    config, ddp_config = chunks[0].config, chunks[0].ddp_config
    optimizer_options = {
        "lr": 1e-3,
        "fp16": config.fp16,
        "bf16": config.bf16,
        "params_dtype": dtype,
        "loss_scale": 1024.0 if config.fp16 else None,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**known_to(OptimizerConfig, optimizer_options)),
        chunks,
    )

    def hooks(method):
        by_chunk = [getattr(chunk, method) for chunk in chunks]
        return by_chunk if len(by_chunk) > 1 else by_chunk[0]

    config.grad_scale_func = optimizer.scale_loss
    config.timers = Timers(2, "minmax")
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = hooks("no_sync")
        config.grad_sync_func = hooks("start_grad_sync")  # --align-grad-reduce, the default
    if ddp_config.overlap_param_gather:
        config.param_sync_func = hooks("start_param_sync")
    config.finalize_model_grads_func = finalize_model_grads
    config.config_logger_dir = str(folder)
    for option, value in known_to(type(config), MODULES_AND_MEMORY).items():
        setattr(config, option, value)
    return chunks


def known_to(config_class, options):
    """Return the options that this release of Megatron-Core has."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in options.items() if name in names}


def facts(chunks):
    """List all that the probe must leave unchanged, in a form that compares."""
    buffers = [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    tracker = get_cuda_rng_tracker().get_states()
    return {
        "config": [{name: id(v) for name, v in vars(c.config).items()} for c in chunks],
        "ddp config": [dict(vars(c.ddp_config)) for c in chunks],
        "chunk": [{name: id(v) for name, v in vars(c).items()} for c in chunks],
        "globals": {name: id(v) for name, v in vars(parallel_state).items() if name.isupper()},
        "default dtype": torch.get_default_dtype(),
        "random state": bits(torch.get_rng_state()),
        "tracker": {name: bits(state) for name, state in tracker.items()},
        "gradients": [bits(b.grad_data) for b in buffers],
        "parameters": [bits(p.detach()) for chunk in chunks for p in chunk.parameters()],
        "groups": {
            (name, value)
            for chunk in chunks
            for group in chunk.bucket_groups
            for name, value in vars(group).items()
            if isinstance(value, bool)
        },
    }


def bits(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()
