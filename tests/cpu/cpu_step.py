"""One small GPT model, one step's data and one train step, at any layout.

Shared by what the tests of ``megatron_lossagg.cpu`` launch; importing it installs the stand-ins.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_lossagg.cpu import install

install()

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
from step_data import zigzag  # noqa: E402

from megatron_lossagg.cpu import gpt_layer_spec, gpt_mtp_spec, initialize_weights  # noqa: E402

VOCABULARY = 48
NUM_MICROBATCHES = 4
# Padded to a multiple of 4, for CP 2; (length, padded length) of each packed sequence.
THD_SEQUENCES = (
    ((7, 8), (12, 12)),
    ((4, 4), (15, 16), (3, 8)),
    ((24, 24),),
    ((10, 12), (5, 8), (1, 4)),
)
SBHD_SHAPE = (2, 16)


class Layout:
    """One way to split the model over the world, from initialization to teardown."""

    def __init__(
        self, *, tp=1, pp=1, vpp=1, cp=1, ep=1, sp=False, moe=False, mtp=False, sharded=False
    ):
        self.tp, self.pp, self.vpp, self.cp, self.ep = tp, pp, vpp, cp, ep
        self.sp, self.moe, self.mtp, self.sharded = sp, moe, mtp, sharded
        self.interleaved = vpp if vpp > 1 else None
        self.kind = "moe" if moe else "mtp" if mtp else "dense"

    def __enter__(self):
        parallel_state.initialize_model_parallel(
            self.tp,
            self.pp,
            virtual_pipeline_model_parallel_size=self.interleaved,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=1,  # gloo gathers no uneven splits
        )
        try:
            model_parallel_cuda_manual_seed(1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        parallel_state.destroy_model_parallel()

    def config(self, dtype, **changes):
        sizes = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.interleaved,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": self.sp,
        }
        experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0}
        prediction = {
            "mtp_num_layers": 1,
            "mtp_loss_scaling_factor": 0.1,
            "calculate_per_token_loss": True,
        }
        kept = sizes | (experts if self.moe else {}) | (prediction if self.mtp else {})
        kept = {name: value for name, value in kept.items() if name not in changes}
        return TransformerConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=24,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            qk_layernorm=True,
            add_bias_linear=not self.moe,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.2,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            variable_seq_lengths=self.pp > 1,
            moe_token_dispatcher_type="alltoall",
            overlap_p2p_comm=self.vpp > 1,
            batch_p2p_comm=self.vpp == 1,
            finalize_model_grads_func=finalize_model_grads,
            **kept,
            **changes,
        )

    def chunks(self, dtype):
        config = self.config(dtype)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=self.sharded)
        models = [
            build(config, vp_stage=stage if self.interleaved else None) for stage in range(self.vpp)
        ]
        wrapped = [DistributedDataParallel(config, ddp, model) for model in models]
        initialize_weights(wrapped, seed=5)
        return wrapped


def build(config, *, vp_stage=None, spec=None, **arguments):
    is_at = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return GPTModel(
        config,
        spec or gpt_layer_spec(config, vp_stage=vp_stage),
        mtp_block_spec=gpt_mtp_spec(config, vp_stage=vp_stage) if config.mtp_num_layers else None,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(**is_at),
        post_process=parallel_state.is_pipeline_last_stage(**is_at),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
        **arguments,
    )


def batches():
    """Draw the step: tokens, labels and float64 loss weights, packed and padded sequences."""
    generator = torch.Generator().manual_seed(3)
    thd, sbhd = [], []
    for sequences in THD_SEQUENCES:
        offsets = torch.tensor([0, *(padded for _, padded in sequences)]).cumsum(0).int()
        total = int(offsets[-1])
        mask = torch.cat([torch.arange(padded) < length - 1 for length, padded in sequences])
        drawn = torch.randint(VOCABULARY, (2, 1, total), generator=generator)
        thd.append((*drawn, mask[None] * torch.rand(1, total, generator=generator), offsets))
    for _ in range(NUM_MICROBATCHES):
        drawn = torch.randint(VOCABULARY, (2, *SBHD_SHAPE), generator=generator)
        sbhd.append((*drawn, torch.rand(SBHD_SHAPE, generator=generator), None))
    return {"thd": thd, "sbhd": sbhd}


def cp_index(offsets, cp):
    """Index the tokens that this context-parallel rank holds, sequence by sequence."""
    rank = parallel_state.get_context_parallel_rank()
    return torch.tensor(zigzag(offsets.tolist(), cp, rank))


def packed(offsets):
    if offsets is None:
        return None
    longest = int(offsets.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def step(layout, chunks, microbatches):
    """Run forward and backward through Megatron's schedule; return the step's loss."""
    dp = parallel_state.get_data_parallel_world_size()
    dp_rank = parallel_state.get_data_parallel_rank()
    num_microbatches = NUM_MICROBATCHES // dp
    own_microbatches = microbatches[dp_rank * num_microbatches :][:num_microbatches]
    scale = num_microbatches * dp * layout.cp

    def forward_step(iterator, model):
        tokens, labels, weight, offsets = next(iterator)
        sequence_offsets = offsets if offsets is not None else torch.tensor([0, tokens.size(1)])
        index = cp_index(sequence_offsets, layout.cp)
        tokens, labels, weight = (x[:, index] for x in (tokens, labels, weight))
        by_megatron = {"labels": labels} if layout.tp > 1 or layout.mtp else {}
        if layout.mtp:
            by_megatron["loss_mask"] = (weight > 0).to(weight.dtype)
        output = model(
            tokens, index.expand_as(tokens), None, packed_seq_params=packed(offsets), **by_megatron
        )

        def loss_func(output):
            if not by_megatron:  # Megatron's own cross entropy computes in float32
                flat = output.flatten(0, 1)
                output = torch.nn.functional.cross_entropy(flat, labels.flatten(), reduction="none")
            loss = (output.view_as(weight) * weight.to(output.dtype)).sum()
            report = {"loss": loss.detach().clone()}
            if layout.mtp:  # the per-token loss scaling
                return loss.clone(), (weight > 0).sum().int(), report
            return loss * scale, torch.tensor(1, dtype=torch.int), report

        return output, loss_func

    iterators = [iter(own_microbatches) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=SBHD_SHAPE[1],
        micro_batch_size=SBHD_SHAPE[0],
        forward_only=False,
    )
    loss = sum((report["loss"].double() for report in reports), torch.zeros((), dtype=torch.double))
    dist.all_reduce(loss)
    return loss.item() / layout.tp
