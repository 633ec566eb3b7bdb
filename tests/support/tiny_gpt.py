"""A tiny GPT on stock Megatron-Core, and the batches it trains on; for launched workers."""

import megatron_lossagg.cpu as cpu

cpu.install()

import itertools  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from step_data import VOCABULARY, zigzag  # noqa: E402

from megatron_lossagg.verify.model import reported  # noqa: E402, F401  for the workers


def start(*, tp=1, pp=1, cp=1, ep=1, dtype=torch.float64):
    """Initialize torch.distributed and Megatron's groups; DP is what is left of the world."""
    # finalize_model_grads computes 1 / num_tokens in the default dtype.
    torch.set_default_dtype(dtype)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep
    )
    model_parallel_cuda_manual_seed(1)


def config_of(*, per_token=False, sequence_parallel=False, parallel=True, **more):
    """Return the model's config; ``parallel=False`` for a reference on one process."""
    sizes = {}
    if parallel:
        sizes = {
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        }
    if parallel and "num_moe_experts" in more:
        experts = parallel_state.get_expert_model_parallel_world_size()
        sizes["expert_model_parallel_size"] = experts
    dtype = torch.get_default_dtype()
    return TransformerConfig(
        num_layers=2,
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
        sequence_parallel=sequence_parallel,
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


def microbatch(sequences, indices, cp_size, cp_rank, *, sequence_length=None):
    """Pack sequences and, last, a padding sequence; sliced for this rank.

    ``sequence_length``: pad every sequence to it and leave the sequences unpacked, ``[b, s / CP]``.
    """
    pad = 2 * cp_size
    tokens, labels, coefficients, positions, mask, offsets = [], [], [], [], [], [0]
    padding = {"tokens": [1] * (pad + 1), "coefficient": [2.0] * pad, "trained": [0] * pad}
    for sequence in [*(sequences[index] for index in indices), padding]:
        length = len(sequence["trained"])
        fill = [0] * ((sequence_length or length + -length % pad) - length)
        tokens += sequence["tokens"][:-1] + fill
        labels += sequence["tokens"][1:] + fill
        coefficients += sequence["coefficient"] + fill
        mask += sequence["trained"] + fill
        positions += range(length + len(fill))
        offsets.append(len(tokens))
    held = zigzag(offsets, cp_size, cp_rank)
    shape = (1, -1) if sequence_length is None else (len(offsets) - 1, -1)
    dtype = torch.get_default_dtype()
    mask = torch.tensor(mask)
    return {
        "sequences": [*indices, -1],
        "offsets": torch.tensor(offsets, dtype=torch.int32),
        "mask": mask,
        "mask_here": mask[held],
        "tokens": torch.tensor(tokens)[held].view(shape),
        "labels": torch.tensor(labels)[held].view(shape),
        "positions": torch.tensor(positions)[held].view(shape),
        "coefficient": torch.tensor(coefficients, dtype=dtype)[held],
        "masked_here": mask[held] == 0,
        "packed": packed_at(offsets) if sequence_length is None else None,
    }


def packed_at(offsets):
    """Describe sequences packed at padded offsets to Megatron."""
    offsets_tensor = torch.tensor(offsets, dtype=torch.int32)
    longest = max(b - a for a, b in itertools.pairwise(offsets))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets_tensor,
        cu_seqlens_kv=offsets_tensor,
        cu_seqlens_q_padded=offsets_tensor,
        cu_seqlens_kv_padded=offsets_tensor,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def run_schedule(forward_step, chunk, batches, *, forward_only=False):
    """Zero the gradients and run Megatron's schedule over the batches, one per microbatch."""
    chunk.zero_grad_buffer()
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[chunk],
        num_microbatches=len(batches),
        seq_length=64,
        micro_batch_size=1,
        forward_only=forward_only,
    )
