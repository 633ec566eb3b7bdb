"""Which options of Megatron change who holds a token or how a loss is scaled: one table.

Each sequence was read in the source: megatron-core 0.13.1 to 0.19.2, Megatron-LM's development
branches at d98e8a64 (main) and d48bd6be0a (dev), Megatron-Bridge at 067f987d. :func:`check_options`
rejects what a live object sets. ``python -m megatron_lossagg.megatron_options`` prints the table as
``docs/compatibility.md`` has it. No torch, no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lossagg.errors import ContractError

__all__ = ["OPTIONS", "Holder", "Option", "Setting", "check_options", "table"]

Holder = Literal[
    "model config",
    "script arguments",
    "Bridge's dist config",
    "class of a chunk",
    "argument of vocab_parallel_cross_entropy",
]
"""Which object holds an option: the chunks' ``TransformerConfig`` (with ``ModelParallelConfig``),
what Megatron-LM's ``get_args()`` returns, ``ConfigContainer.dist``, or what wraps the model."""

Status = Literal["refused", "supported", "not affected"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a condition needs beside the option's value."""

    cp_size: int = 1
    num_chunks: int = 1
    holder: Any = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """Options that share one verdict.

    ``supported``: tests train with it. ``not affected``: by reading, it changes neither who
    holds a token nor how the main loss is scaled. ``refused``: :func:`check_options` raises where
    ``is_wrong`` holds for a value.
    """

    names: tuple[str, ...]
    since: str
    """The release of megatron-core that brought it, or where it was read."""
    status: Status
    why: str
    holder: Holder = "model config"
    default: Any = None
    """For a holder that lacks the option."""
    is_wrong: Callable[[Any, Setting], bool] | None = None
    when: str = ""
    """The condition in words."""
    change: str = ""
    """What to change."""


def _is_set(value: Any, setting: Setting) -> bool:
    return value is not None and value is not False


def _is_not_zigzag(value: Any, setting: Setting) -> bool:
    return setting.cp_size > 1 and value != "zigzag"


def _is_above_one(value: Any, setting: Setting) -> bool:
    return (value or 1) > 1


def _splits_documents(value: Any, setting: Setting) -> bool:
    is_sft = getattr(setting.holder, "sft", False)
    return bool(value) and not is_sft and setting.cp_size > 1


def _differs_from_training(value: Any, setting: Setting) -> bool:
    return value not in (None, setting.cp_size)


def _mixes_up_messages(value: Any, setting: Setting) -> bool:
    config = setting.holder
    overlaps = getattr(config, "overlap_p2p_comm", False)
    is_batched = getattr(config, "batch_p2p_comm", True)
    return bool(setting.num_chunks > 1 and value == 2 and (not overlaps or is_batched))


def _is_full_iteration(value: Any, setting: Setting) -> bool:
    return "full_iteration" in str(value).replace("full_iteration_inference", "")


OPTIONS = (
    Option(
        names=("cp_partition_mode",),
        since="dev d48bd6be0a",
        status="refused",
        default="zigzag",
        is_wrong=_is_not_zigzag,
        when="not `zigzag` at CP > 1",
        why="each context-parallel rank holds one interval of the packed sequences, and the "
        "weights are laid out for two chunks of each",
        change="set cp_partition_mode='zigzag', or train at context_parallel_size=1",
    ),
    Option(
        names=("linear_cp_layout", "attention_cp_layout"),
        since="main after d98e8a64 "
        "([#6776](https://github.com/NVIDIA/Megatron-LM/pull/6776)), 0.20",
        status="refused",
        default="zigzag",
        is_wrong=_is_not_zigzag,
        when="not `zigzag` at CP > 1",
        why="the batch is split as the layers want it, into one interval for each context-parallel "
        "rank, and the weights are laid out for two chunks of each sequence",
        change="set both to 'zigzag', or train at context_parallel_size=1",
    ),
    Option(
        names=("hybrid_context_parallel",),
        since="0.16",
        status="refused",
        is_wrong=_is_set,
        when="set",
        why="hybrid context parallelism changes CP with every microbatch, so that sequences have "
        "no single layout",
        change="drop --hybrid-context-parallel",
    ),
    Option(
        names=("dynamic_context_parallel",),
        since="dev d48bd6be0a; verl and Bridge read it too",
        status="refused",
        is_wrong=_is_set,
        when="set",
        why="each microbatch has context-parallel groups of its own, so that sequences have no "
        "single layout and a sequence may be counted on several ranks",
        change="drop --dynamic-context-parallel",
    ),
    Option(
        names=("sequence_packing_scheduler",),
        since="dev d48bd6be0a; Bridge's `enable_global_batch_packing` sets it",
        status="refused",
        is_wrong=_is_set,
        when="set; `--use-varlen-dataset` sets it",
        why="the scheduler moves sequences between data-parallel ranks and packs them into "
        "microbatches of its own, which are not counted here",
        change="drop --sequence-packing-scheduler (and --use-varlen-dataset, which sets it), and "
        "pack in the data set",
    ),
    Option(
        names=("pad_packed_seq_alignment",),
        since="dev d48bd6be0a",
        status="refused",
        is_wrong=_is_set,
        when="set",
        why="a packed batch is padded after it was read, so that there are more losses than were "
        "counted",
        change="drop --pad-packed-seq-alignment, and pad in the data set",
    ),
    Option(
        names=("thd_tail_padding_policy", "thd_max_packed_sequences"),
        since="dev d48bd6be0a",
        status="not affected",
        why="how `pad_packed_seq_alignment` pads and how many sequences "
        "`sequence_packing_scheduler` packs; without these two, which are refused, no loss is "
        "padded",
    ),
    Option(
        names=("dataloader_inter_document_masking",),
        since="0.19",
        status="refused",
        holder="script arguments",
        default=False,
        is_wrong=_splits_documents,
        when="set at CP > 1, without `sft`",
        why="an entry is split over context-parallel ranks as a whole, so that a document's tokens "
        "lie unevenly on them",
        change="use --context-parallel-size 1, or drop --dataloader-inter-document-masking",
    ),
    Option(
        names=("sft", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        since="Megatron-LM 0.16 or before",
        status="supported",
        holder="script arguments",
        why="sequences are those of `cu_seqlens`, else entries of the batch; the mask is read as "
        "the data gives it",
    ),
    Option(
        names=("eval_context_parallel_size",),
        since="Megatron-Bridge 0.6.2",
        status="refused",
        holder="Bridge's dist config",
        is_wrong=_differs_from_training,
        when="not the training CP",
        why="evaluation has other data-parallel and context-parallel groups than training, and "
        "groups and layouts are read once",
        change="leave dist.eval_context_parallel_size unset",
    ),
    Option(
        names=("context_parallel_size",),
        since="before 0.13",
        status="supported",
        why="with the layouts of [architecture.md](architecture.md#layouts)",
    ),
    Option(
        names=("cp_comm_type", "hierarchical_context_parallel_sizes"),
        since="before 0.13",
        status="not affected",
        why="how attention exchanges keys and values; who holds a token stays the same",
    ),
    Option(
        names=("linear_cp_mode",),
        since="dev d48bd6be0a",
        status="not affected",
        why="how a linear-attention layer splits its own work; its output is split as its input",
    ),
    Option(
        names=("tensor_model_parallel_size", "sequence_parallel", "expert_model_parallel_size"),
        since="before 0.13",
        status="supported",
        why="no factor on the loss; DDP scales experts to the same mean or sum",
    ),
    Option(
        names=("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        since="0.19, not on dev; `tensor_parallel_num_weight_shards` sets it",
        status="refused",
        default=1,
        is_wrong=_is_above_one,
        when="above 1",
        why="its ranks train microbatches of their own, outside the data-parallel group that is "
        "counted over",
        change="set it to 1, and leave the numbers of weight shards unset",
    ),
    Option(
        names=("pipeline_model_parallel_size",),
        since="before 0.13",
        status="refused",
        default=1,
        is_wrong=_mixes_up_messages,
        when="2 and interleaved, unless `overlap_p2p_comm` without `batch_p2p_comm`; else "
        "supported",
        why="interleaved pipelining over 2 stages mixes up its messages",
        change="set overlap_p2p_comm=True and batch_p2p_comm=False",
    ),
    Option(
        names=("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
        since="0.14; `delay_wgrad_compute` before 0.13",
        status="not affected",
        why="combined 1F1B calls loss_func once per microbatch, on the same stage; read, not run",
    ),
    Option(
        names=("cuda_graph_impl", "cuda_graph_scope"),
        since="0.15, scope 0.13; full iteration as a scope from 0.14, as an implementation "
        "from 0.18",
        status="refused",
        is_wrong=_is_full_iteration,
        when="full iteration; other graphs are not affected",
        why="a full-iteration CUDA graph freezes K at capture, and K changes with the step's "
        "tokens",
        change="use another --cuda-graph-impl or --cuda-graph-scope",
    ),
    Option(
        names=("Megatron-FSDP", "torch FSDP2"),
        since="before 0.13",
        status="refused",
        holder="class of a chunk",
        when="the chunk is wrapped by one of them",
        why="they reduce gradients by rules of their own that are not compensated here",
    ),
    Option(
        names=("MimoModel",),
        since="before 0.13; a grid of ranks for each of its modules 0.17",
        status="refused",
        holder="class of a chunk",
        when="the schedule gets a chunk that DistributedDataParallel does not wrap",
        why="the modules have data-parallel groups of their own",
    ),
    Option(
        names=("flextron",),
        since="main d98e8a64",
        status="refused",
        is_wrong=_is_set,
        when="set",
        why="the model returns a penalty beside its losses, which the configured loss would drop",
        change="drop --flextron",
    ),
    Option(
        names=("logits_load_dir", "modelopt_enabled"),
        since="0.19; `modelopt_enabled` 0.16 or before",
        status="refused",
        holder="script arguments",
        when="distillation; found in the first microbatch, by comparing the script's loss with "
        "the masked sum",
        why="the script's loss has terms that the configured loss would drop",
    ),
    Option(
        names=("calculate_per_token_loss",),
        since="before 0.13",
        status="supported",
        why="both loss scalings; the value is frozen when the model is wrapped, and compared "
        "before each step",
    ),
    Option(
        names=("grad_scale_func",),
        since="before 0.13",
        status="supported",
        why="the optimizer divides by the same scale; main loss and side losses alike",
    ),
    Option(
        names=("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_grad_scale_func"),
        since="before 0.13; `mtp_grad_scale_func` 0.19",
        status="not affected",
        why="the MTP loss stays stock's, bit for bit; it depends on CP in the average "
        "loss scaling, and "
        "from 0.17 on in the per-token loss scaling",
    ),
    Option(
        names=("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_grad_scale_func"),
        since="before 0.13; `moe_grad_scale_func` 0.19",
        status="not affected",
        why="the routers' losses stay stock's, bit for bit; they depend on CP before 0.16 in the "
        "average loss scaling and before 0.19 in the per-token loss scaling",
    ),
    Option(
        names=("dsa_indexer_loss_coeff", "experimental_attention_variant_loss_scale_func"),
        since="0.16; the function 0.19",
        status="not affected",
        why="the indexer's loss stays stock's; before 0.19 the schedule does not scale it; read, "
        "not run",
    ),
    Option(
        names=("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
        since="before 0.13; `linear` on dev",
        status="not affected",
        why="still one loss per token; a fused loss that is already a scalar cannot be weighted "
        "and is refused by its shape",
    ),
    Option(
        names=("label_smoothing",),
        since="before 0.13",
        status="not affected",
        holder="argument of vocab_parallel_cross_entropy",
        why="changes each token's loss before it is weighted",
    ),
    Option(
        names=("fp8", "fp4", "moe_router_padding_for_quantization"),
        since="before 0.13; `fp4` 0.15, the padding 0.16 (before: `moe_router_padding_for_fp8`)",
        status="not affected",
        why="padding to the kernels' alignment is removed inside the layer; read, not run",
    ),
    Option(
        names=("moe_expert_capacity_factor", "moe_token_drop_policy"),
        since="before 0.13",
        status="not affected",
        why="an expert skips a token, whose loss stays",
    ),
    Option(
        names=("moe_paged_stash", "moe_expert_rank_capacity_factor"),
        since="0.18",
        status="not affected",
        why="a step that overflows is run again by a schedule call of its own, which is counted "
        "anew; read, not run",
    ),
    Option(
        names=("use_mup", "mup_output_mult"),
        since="0.17",
        status="not affected",
        why="scales logits before the loss, and learning rates",
    ),
    Option(
        names=("variable_seq_lengths",),
        since="before 0.13",
        status="supported",
        why="lengths come from the data",
    ),
)


def check_options(holder: Holder, settings: Any, *, cp_size: int, num_chunks: int = 1) -> None:
    """Raise :class:`ContractError` for the first option of ``settings`` that is refused.

    ``holder``: what ``settings`` is. ``cp_size``: the training CP size. ``num_chunks``: model
    chunks of this rank. An option that ``settings`` lacks has its default. No collective.
    """
    setting = Setting(cp_size=cp_size, num_chunks=num_chunks, holder=settings)
    for option in OPTIONS:
        if option.holder != holder or option.is_wrong is None:
            continue
        for name in option.names:
            value = getattr(settings, name, option.default)
            if option.is_wrong(value, setting):
                raise ContractError(
                    f"{name} is {value!r}, which is not supported here ({option.when}): "
                    f"{option.why}. Change: {option.change}."
                )


def table() -> str:
    """Lay the table out in Markdown."""
    lines = [
        "| option | where it is set | since | verdict | why |",
        "|---|---|---|---|---|",
    ]
    for option in OPTIONS:
        names = ", ".join(f"`{name}`" for name in option.names)
        verdict = f"**refused**: {option.when}" if option.status == "refused" else option.status
        cells = [names, option.holder, option.since, verdict, option.why]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
