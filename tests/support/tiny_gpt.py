"""A tiny GPT on stock Megatron-Core, for launched workers; importing it installs the stand-ins."""

import megatron_lossagg.cpu as cpu

cpu.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from ranks import begin  # noqa: E402

from megatron_lossagg.verify import small_gpt as verification  # noqa: E402
from megatron_lossagg.verify.small_gpt import packed_at, reported  # noqa: E402, F401  for the workers
from megatron_lossagg.verify.step_data import VOCABULARY  # noqa: E402


def start(*, tp=1, pp=1, cp=1, ep=1, dtype=torch.float64, **more):
    """Initialize torch.distributed and Megatron's groups; DP is what is left of the world."""
    # finalize_model_grads computes 1 / num_tokens in the default dtype.
    torch.set_default_dtype(dtype)
    begin()
    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep, **more
    )
    model_parallel_cuda_manual_seed(1)


def config_of(*, per_token=False, num_layers=None, **more):
    """Return the model config at the sizes of Megatron's groups, by default one layer per stage."""
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    if "num_moe_experts" in more:
        experts = parallel_state.get_expert_model_parallel_world_size()
        sizes["expert_model_parallel_size"] = experts
    dtype = torch.get_default_dtype()
    return TransformerConfig(
        num_layers=num_layers or sizes["pipeline_model_parallel_size"],
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        variable_seq_lengths=True,  # sequences are packed to uneven lengths; pipeline stages ask
        moe_token_dispatcher_type="alltoall",  # what variable_seq_lengths asks for, dense too
        finalize_model_grads_func=finalize_model_grads,
        calculate_per_token_loss=per_token,
        **sizes,
        **more,
    )


def gpt(config, spec):
    """Build this pipeline stage's model, with weights that do not depend on the layout."""
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    cpu.initialize_weights([model], seed=3)
    return model


def wrapped(config, **ddp):
    """Wrap the model in Megatron-Core's DistributedDataParallel."""
    model = gpt(config, cpu.gpt_layer_spec(config))
    dtype = torch.get_default_dtype()
    ddp.setdefault("grad_reduce_in_fp32", dtype != torch.float64)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), model)


def run_schedule(forward_step, chunk, batches, *, forward_only=False):
    """Zero the gradients and run Megatron's schedule over the batches, one per microbatch."""
    return verification.run_schedule(forward_step, [chunk], batches, forward_only=forward_only)
