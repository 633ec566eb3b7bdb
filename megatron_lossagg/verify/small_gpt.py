"""Model, batches and schedule of a verification on the installed Megatron-Core.

Stock schedules, ``DistributedDataParallel`` and ``finalize_model_grads``; on a CPU with the
stand-ins of ``megatron_lossagg.cpu``, which must be installed before this is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

import megatron_lossagg.cpu as cpu
from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.reduction.layout import PADDING
from megatron_lossagg.verify.parallelism import ModelShape, Parallelism
from megatron_lossagg.verify.step_data import VOCABULARY, TrainingSequence, padding_sequence
from megatron_lossagg.verify.world import device, dtype_of

_SEED = 3
_ROTARY_BASE = 10_000
_LONGEST = 128
"""More than any sequence's length."""


def config_of(parallelism: Parallelism, *, per_token: bool) -> Any:
    """Build the model's configuration for a layout."""
    dtype = torch.bfloat16 if parallelism.bf16 else dtype_of(parallelism)
    more: dict[str, Any] = {}
    if parallelism.moe:
        more |= {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
        more |= {"expert_model_parallel_size": parallelism.ep, "expert_tensor_parallel_size": 1}
    if parallelism.mtp:
        more |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
    if parallelism.recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        more |= {"recompute_num_layers": 1}
    config = TransformerConfig(
        **_shape_options(parallelism.shape, dtype),
        **more,
        tensor_model_parallel_size=parallelism.tp,
        pipeline_model_parallel_size=parallelism.pp,
        virtual_pipeline_model_parallel_size=parallelism.vpp if parallelism.vpp > 1 else None,
        context_parallel_size=parallelism.cp,
        sequence_parallel=parallelism.sequence_parallel,
        overlap_p2p_comm=parallelism.vpp > 1,
        batch_p2p_comm=parallelism.vpp == 1,
        finalize_model_grads_func=finalize_model_grads,
        calculate_per_token_loss=per_token,
    )
    # Releases up to 0.19 have no such field: attention and LossAggregator read it.
    config.cp_partition_mode = parallelism.cp_partition
    return config


def _shape_options(shape: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        # Without rotary positions no score depends on the bias of a norm of the keys.
        "qk_layernorm": not shape.learned_positions,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "init_method_std": 0.2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "variable_seq_lengths": True,  # sequences are packed to uneven lengths
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths requires it, dense too
    }
    if shape.num_experts:
        options |= {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 2 * shape.hidden_size,
            "add_bias_linear": False,
        }
    return options


def wrapped_chunks(parallelism: Parallelism, config: Any) -> list[Any]:
    """Build this rank's model chunks in DistributedDataParallel or Megatron-FSDP."""
    interleaved = parallelism.vpp > 1
    models = [
        _model(parallelism.shape, config, vp_stage=stage if interleaved else None)
        for stage in range(parallelism.vpp)
    ]
    per_token = config.calculate_per_token_loss
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=parallelism.megatrons_losses,
        use_distributed_optimizer=parallelism.distributed_optimizer,
        num_distributed_optimizer_instances=parallelism.optimizer_instances,
        # Megatron refuses an average in the collective in the per-token loss scaling.
        average_in_collective=parallelism.average_in_collective and not per_token,
        overlap_grad_reduce=parallelism.overlap_grad_reduce,
    )
    wrapper: Any = DistributedDataParallel
    if parallelism.megatron_fsdp != "off":
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        wrapper = FullyShardedDataParallel
        ddp.use_megatron_fsdp = True
        ddp.data_parallel_sharding_strategy = parallelism.megatron_fsdp
        if parallelism.outer_sharding:
            ddp.outer_dp_sharding_strategy = "optim"
        # What else would reduce nothing, in releases before 0.18.
        ddp.overlap_grad_reduce |= parallelism.megatron_fsdp != "optim"
    chunks = [wrapper(config, ddp, model) for model in models]
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if interleaved else no_sync[0]
    return chunks


def _model(shape: ModelShape, config: Any, *, vp_stage: int | None) -> Any:
    at = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    mtp = cpu.gpt_mtp_spec(config, vp_stage=vp_stage) if config.mtp_num_layers else None
    return _gpt(
        shape,
        config,
        cpu.gpt_layer_spec(config, vp_stage=vp_stage),
        mtp_block_spec=mtp,
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        parallel_output=True,
        vp_stage=vp_stage,
    )


def reference_model(shape: ModelShape) -> Any:
    """Build the same model unsplit, with Megatron's own attention."""
    config = TransformerConfig(**_shape_options(shape, torch.float64))
    return _gpt(shape, config, cpu.gpt_layer_spec(config, own_attention=False))


def _gpt(shape: ModelShape, config: Any, spec: Any, **stage: Any) -> Any:
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=_LONGEST,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute" if shape.learned_positions else "rope",
        rotary_base=_ROTARY_BASE,
        **stage,
    ).to(device())
    cpu.initialize_weights([model], seed=_SEED)
    if shape.learned_positions:
        return model
    # Float32 frequencies would not do: cosines of other devices would differ in the last bit.
    rotary = model.rotary_pos_emb
    half = rotary.inv_freq.numel()
    exponents = torch.arange(half, dtype=torch.float64) / half
    rotary.inv_freq = (_ROTARY_BASE**-exponents).to(rotary.inv_freq.device)
    return model


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One microbatch: sequences and, last, a padding sequence; tokens sliced for this rank."""

    sequences: list[int]
    """Positions of the sequences among this rank's, -1 for the padding sequence."""
    offsets: Tensor
    """int32 ``[segments + 1]`` on the CPU: padded, before slicing."""
    mask: Tensor
    """int64, as the step is given it: before slicing, and sliced in a ``local`` layout."""
    mask_here: Tensor
    """Of the losses here: sliced, or whole if they are gathered."""
    weights: Tensor
    """v_t, at the positions of ``mask``."""
    side_mask_here: Tensor
    """Of the model's own multi-token-prediction loss: the padding sequence's tokens too, for stock
    divides by the tokens of a microbatch, which may have no others."""
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    coefficient: Tensor
    """Of the losses here likewise, flat; 1 at padding."""
    packed: Any
    gathered: Tensor | None
    """Where each token is in the ranks' tokens end to end; None if losses are not gathered."""


def pack(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], parallelism: Parallelism
) -> Batch:
    """Pack some of this rank's sequences and a padding sequence, padded, sliced for this rank."""
    multiple = parallelism.sequence_multiple
    bshd = parallelism.packing == "bshd"
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    mask: list[int] = []
    side_mask: list[int] = []
    weights: list[float] = []
    coefficient: list[float] = []
    offsets = [0]
    for index in [*indices, PADDING]:
        sequence = padding_sequence(multiple) if index == PADDING else sequences[index]
        goal = parallelism.padded(len(sequence))
        fill = goal - len(sequence)
        tokens += sequence.tokens + [0] * fill
        labels += sequence.labels + [0] * fill
        mask += sequence.trained + [0] * fill
        weights += sequence.weight + [0.0] * fill
        side_mask += [1] * goal if index == PADDING else sequence.trained + [0] * fill
        coefficient += sequence.coefficient + [1.0] * fill
        positions += range(goal)
        offsets.append(len(tokens))
    cp_rank = parallel_state.get_context_parallel_rank()
    of_rank = parallelism.held(offsets, cp_rank)
    of_losses, gathered = of_rank, None
    if parallelism.packing == "gathered":
        of_ranks = [parallelism.held(offsets, rank) for rank in range(parallelism.cp)]
        of_losses, gathered = [*range(len(tokens))], torch.tensor([*chain(*of_ranks)]).argsort()
    given = of_rank if parallelism.packing == "local" else [*range(len(tokens))]
    shape = (len(offsets) - 1, -1) if bshd else (1, -1)
    to = device()
    return Batch(
        sequences=[*indices, PADDING],
        offsets=torch.tensor(offsets, dtype=torch.int32),
        mask=torch.tensor(mask)[given],
        mask_here=torch.tensor(mask)[of_losses],
        weights=torch.tensor(weights, dtype=torch.float64)[given],
        side_mask_here=torch.tensor(side_mask)[of_rank],
        tokens=torch.tensor(tokens)[of_rank].view(shape).to(to),
        labels=torch.tensor(labels)[of_rank].view(shape).to(to),
        positions=torch.tensor(positions)[of_rank].view(shape).to(to),
        coefficient=torch.tensor(coefficient, dtype=dtype_of(parallelism))[of_losses].to(to),
        packed=None if bshd else packed_at(offsets),
        gathered=None if gathered is None else gathered.to(to),
    )


def packed_at(offsets: Sequence[int]) -> Any:
    """Describe sequences packed at padded offsets to Megatron."""
    at = torch.tensor(offsets, dtype=torch.int32, device=device())
    longest = max(end - begin for begin, end in pairwise(offsets))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=at,
        cu_seqlens_kv=at,
        cu_seqlens_q_padded=at,
        cu_seqlens_kv_padded=at,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def forward(model: Any, batch: Batch, parallelism: Parallelism) -> Tensor:
    """Run one microbatch through this stage: logits, or token losses by Megatron in float32."""
    options: dict[str, Any] = {"packed_seq_params": batch.packed}
    if parallelism.megatrons_losses:
        options["labels"] = batch.labels
    if parallelism.mtp:
        mask = batch.side_mask_here.view_as(batch.labels).to(device(), torch.get_default_dtype())
        options["loss_mask"] = mask
    output: Tensor = model(batch.tokens, batch.positions, None, **options)
    return output


def token_losses(output: Tensor, batch: Batch, parallelism: Parallelism) -> Tensor:
    """Return the last stage's negative log-probabilities, flat in this rank's order.

    Gathered: of all context-parallel ranks, in the order of the whole mask.
    """
    losses = _losses_here(output, batch, parallelism)
    if batch.gathered is None:
        return losses
    group = parallel_state.get_context_parallel_group()
    whole: Tensor = gather_from_sequence_parallel_region(losses, group=group)[batch.gathered]
    return whole


def _losses_here(output: Tensor, batch: Batch, parallelism: Parallelism) -> Tensor:
    if parallelism.megatrons_losses:
        return output.reshape(-1)
    if parallelism.tp > 1:
        output = gather_from_tensor_model_parallel_region(output)
    picked = batch.labels.reshape(-1, 1)
    log_probability = torch.log_softmax(output.reshape(-1, output.size(-1)), dim=-1)
    return -log_probability.gather(1, picked).squeeze(1)


def run_schedule(
    forward_step: Callable[..., Any],
    chunks: Sequence[Any],
    batches: Sequence[Batch],
    *,
    forward_only: bool = False,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda schedule: schedule,
    reads: bool = True,
) -> list[dict[str, Tensor]]:
    """Zero the gradients and run Megatron's schedule, one batch per microbatch.

    ``reads``: whether this rank has data iterators; without, they are None.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    iterators = [iter(batches) if reads else None for _ in chunks]
    reports: list[dict[str, Tensor]] = wrap(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=_LONGEST,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return reports


def reported(reports: Sequence[dict[str, Tensor]], name: str) -> float:
    """Reduce one reported value as :func:`all_reported` does."""
    return all_reported(reports, [name])[name]


def all_reported(reports: Sequence[dict[str, Tensor]], names: Sequence[str]) -> dict[str, float]:
    """Reduce reported values as Megatron-LM's train_step does; last pipeline stage only.

    NaN if a rank has no reports, because its step was ended by an error.
    """
    totals = torch.full((len(names), 2), torch.nan, dtype=torch.float64, device=device())
    if reports:
        values = [torch.stack([report[name].double() for name in names]) for report in reports]
        totals = torch.stack(values).sum(0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(totals, group=group)
    return {name: float(total / count) for name, (total, count) in zip(names, totals, strict=True)}


def whole_gradient(chunk: Any, parameter: Any) -> Tensor:
    """Put a parameter's gradient together from what an engine has reduced on each rank.

    If they have shards of it, one all-gather of objects over the ranks that share it.
    """
    engine = engine_of(chunk)
    own, first = engine.reduced(parameter)
    if not engine.shards:
        return own.view(parameter.shape)
    is_dense = getattr(parameter, "allreduce", True)
    group = engine.dp_cp_group if is_dense else engine.expert_group
    pieces: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(pieces, (own, first), group=group)
    whole = own.new_full((parameter.numel(),), torch.nan)
    for piece, at in pieces:
        whole[at : at + len(piece)] = piece
    return whole.view(parameter.shape)


def gather_gradients(chunks: Sequence[Any]) -> None:
    """Gather the gradients that a distributed optimizer's reduce-scatter left on each rank."""
    for chunk in chunks:
        for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group = bucket_group.intra_distributed_optimizer_instance_group
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            for bucket in bucket_group.buckets:
                pieces = bucket.grad_data.view(size, -1)
                own = pieces[rank].clone()
                pieces.fill_(torch.nan)
                dist.all_gather(list(pieces), own, group=group)
