"""Which options of Megatron change who holds a token or how a loss is scaled: one table.

Each line was read in the source: megatron-core 0.13.1 to 0.19.2, Megatron-LM's development
branches at d98e8a64 (main) and d48bd6be0a (dev), Megatron-Bridge at 067f987d. :func:`check_options`
rejects what a live object sets. ``python -m megatron_lossagg.megatron_options`` prints the table as
``docs/compatibility.md`` has it. No torch, no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    counts_parts: bool = False
    holder: Any = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """Options that share one verdict.

    ``supported``: tests train with it. ``not affected``: by reading, it changes neither who
    holds a token nor how the main loss is scaled. ``refused``: a value is. :func:`check_options`
    raises for a value that ``is_wrong``, of a supported option as well.
    """

    names: tuple[str, ...]
    since: str
    """The first release that has it, 0.13 for those before; ``dev``: that branch only."""
    status: Status
    why: str
    by: str = "read"
    """What shows the verdict, by its name in ``docs/compatibility.md``."""
    later: Mapping[str, str] = field(default_factory=dict)
    """The first release of a name that came after the others."""
    lacks: tuple[str, ...] = ()
    """Branches without it."""
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


def _is_unknown_partition(value: Any, setting: Setting) -> bool:
    return setting.cp_size > 1 and value not in ("zigzag", "contiguous")


def _is_dynamic(value: Any, setting: Setting) -> bool:
    return bool(value) and not setting.counts_parts


def _is_unknown_scheduler(value: Any, setting: Setting) -> bool:
    known = ("dp_balanced", "default_dynamic_cp") if setting.counts_parts else ("dp_balanced",)
    return value is not None and value not in known


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
        since="dev",
        status="supported",
        by="versions, contiguous",
        default="zigzag",
        is_wrong=_is_unknown_partition,
        when="neither `zigzag` nor `contiguous` at CP > 1",
        why="packed sequences take the layout that the model's config names",
        change="set cp_partition_mode to 'zigzag' or 'contiguous', or train at "
        "context_parallel_size=1",
    ),
    Option(
        names=("linear_cp_layout", "attention_cp_layout"),
        since="0.20",
        status="refused",
        by="versions",
        default="zigzag",
        is_wrong=_is_not_zigzag,
        when="not `zigzag` at CP > 1",
        why="the layers choose the split, and the weights are laid out for two chunks of each "
        "sequence",
        change="set both to 'zigzag', or train at context_parallel_size=1",
    ),
    Option(
        names=("hybrid_context_parallel",),
        since="0.16",
        status="refused",
        by="versions",
        is_wrong=_is_set,
        when="set",
        why="CP changes with every microbatch, so that sequences have no single layout",
        change="drop --hybrid-context-parallel",
    ),
    Option(
        names=("dynamic_context_parallel",),
        since="dev",
        status="refused",
        by="versions, packing",
        is_wrong=_is_dynamic,
        when="set, but in Megatron-LM's own loop and in verl, which have it",
        why="each microbatch has CP groups of its own, so that sequences have no single layout: "
        "each rank counts its parts of them",
        change="drop --dynamic-context-parallel",
    ),
    Option(
        names=("sequence_packing_scheduler",),
        since="dev",
        status="supported",
        by="packing",
        is_wrong=_is_unknown_scheduler,
        when="neither unset nor `dp_balanced`",
        why="sequences are counted after `dp_balanced` has packed them; `default_dynamic_cp` is "
        "dynamic context parallelism",
        change="use --sequence-packing-scheduler dp_balanced, or drop it and pack in the data set",
    ),
    Option(
        names=("pad_packed_seq_alignment", "thd_tail_padding_policy"),
        since="dev",
        status="supported",
        by="packing",
        why="the tail that pads a pack has a mask of 0; its length follows from these options",
    ),
    Option(
        names=("thd_max_packed_sequences",),
        since="dev",
        status="not affected",
        why="how many sequences the scheduler packs",
    ),
    Option(
        names=("dataloader_inter_document_masking",),
        since="0.19",
        status="refused",
        by="documents",
        holder="script arguments",
        default=False,
        is_wrong=_splits_documents,
        when="set at CP > 1, without `sft`",
        why="an entry is split as a whole, so that a document's tokens lie unevenly on CP ranks",
        change="use --context-parallel-size 1, or drop --dataloader-inter-document-masking",
    ),
    Option(
        names=("sft", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        since="0.13",
        status="supported",
        by="Megatron-LM: `sft`, `eod_mask_loss`; the others read",
        holder="script arguments",
        why="sequences are those of `cu_seqlens`, else entries of the batch",
    ),
    Option(
        names=("eval_context_parallel_size",),
        since="Bridge 0.6.2",
        status="refused",
        by="Bridge",
        holder="Bridge's dist config",
        is_wrong=_differs_from_training,
        when="not the training CP",
        why="groups and layouts are read once, and evaluation would have others than training",
        change="leave dist.eval_context_parallel_size unset",
    ),
    Option(
        names=(
            "context_parallel_size",
            "tensor_model_parallel_size",
            "sequence_parallel",
            "expert_model_parallel_size",
            "variable_seq_lengths",
        ),
        since="0.13",
        status="supported",
        by="verify",
        why="with the [layouts](architecture.md#layouts); no factor on the loss but CP's",
    ),
    Option(
        names=("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        since="0.19",
        lacks=("dev",),
        status="refused",
        by="versions",
        default=1,
        is_wrong=_is_above_one,
        when="above 1",
        why="its ranks train microbatches of their own, outside the data-parallel group that is "
        "counted over",
        change="set it to 1, and leave the numbers of weight shards unset",
    ),
    Option(
        names=("pipeline_model_parallel_size",),
        since="0.13",
        status="refused",
        by="verify, versions",
        default=1,
        is_wrong=_mixes_up_messages,
        when="2 and interleaved, unless `overlap_p2p_comm` without `batch_p2p_comm`; else "
        "supported",
        why="interleaved pipelining over 2 stages mixes up its messages",
        change="set overlap_p2p_comm=True and batch_p2p_comm=False",
    ),
    Option(
        names=("cuda_graph_scope", "cuda_graph_impl"),
        since="0.13",
        later={"cuda_graph_impl": "0.15"},
        status="refused",
        by="versions",
        is_wrong=_is_full_iteration,
        when="full iteration; other graphs are not affected",
        why="a full-iteration CUDA graph freezes K at capture",
        change="use another --cuda-graph-impl or --cuda-graph-scope",
    ),
    Option(
        names=("Megatron-FSDP", "torch FSDP2"),
        since="0.13",
        status="refused",
        by="versions",
        holder="class of a chunk",
        when="a chunk is wrapped by one",
        why="their rules for reducing gradients are not compensated here",
    ),
    Option(
        names=("MimoModel",),
        since="0.13",
        status="refused",
        by="versions",
        holder="class of a chunk",
        when="a chunk is not wrapped by DistributedDataParallel",
        why="the modules have data-parallel groups of their own",
    ),
    Option(
        names=("flextron",),
        since="0.18",
        status="refused",
        by="versions",
        is_wrong=_is_set,
        when="set",
        why="the model returns a penalty, which the configured loss would drop",
        change="drop --flextron",
    ),
    Option(
        names=("modelopt_enabled", "logits_load_dir"),
        since="0.15",
        later={"logits_load_dir": "0.19"},
        status="refused",
        holder="script arguments",
        by="schedule",
        when="distillation; found in the first microbatch",
        why="the script's loss has terms that the configured loss would drop",
    ),
    Option(
        names=("calculate_per_token_loss",),
        since="0.13",
        status="supported",
        by="verify",
        why="both loss scalings; flipped after wrapping, it is refused",
    ),
    Option(
        names=("grad_scale_func",),
        since="0.13",
        status="supported",
        by="verify",
        why="the optimizer divides by the same scale",
    ),
    Option(
        names=(
            "mtp_num_layers",
            "mtp_loss_scaling_factor",
            "mtp_grad_scale_func",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_grad_scale_func",
        ),
        since="0.13",
        later={"mtp_grad_scale_func": "0.19", "moe_grad_scale_func": "0.19"},
        status="not affected",
        by="matrix",
        why="side losses stay stock's, bit for bit, which may depend on CP",
    ),
    Option(
        names=("dsa_indexer_loss_coeff", "experimental_attention_variant_loss_scale_func"),
        since="0.16",
        later={"experimental_attention_variant_loss_scale_func": "0.19"},
        status="not affected",
        why="the indexer's loss stays stock's",
    ),
    Option(
        names=("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
        since="0.13",
        status="not affected",
        why="still one loss per token; a fused scalar is refused by its shape",
    ),
    Option(
        names=("label_smoothing",),
        since="0.13",
        status="not affected",
        holder="argument of vocab_parallel_cross_entropy",
        why="changes each token's loss before it is weighted",
    ),
    Option(
        names=(
            "cp_comm_type",
            "hierarchical_context_parallel_sizes",
            "linear_cp_mode",
            "moe_expert_capacity_factor",
            "moe_token_drop_policy",
            "fp8",
            "fp4",
            "moe_router_padding_for_quantization",
            "use_mup",
            "mup_output_mult",
        ),
        since="0.13",
        later={
            "linear_cp_mode": "dev",
            "fp4": "0.15",
            "moe_router_padding_for_quantization": "0.16",
            "use_mup": "0.17",
            "mup_output_mult": "0.17",
        },
        status="not affected",
        why="what a layer computes; its tokens stay where they are",
    ),
    Option(
        names=(
            "delay_wgrad_compute",
            "overlap_moe_expert_parallel_comm",
            "moe_paged_stash",
            "moe_expert_rank_capacity_factor",
        ),
        since="0.13",
        later={
            "overlap_moe_expert_parallel_comm": "0.14",
            "moe_paged_stash": "0.18",
            "moe_expert_rank_capacity_factor": "0.18",
        },
        status="not affected",
        why="each microbatch's loss is made once; a step that runs again is counted again",
    ),
)


def check_options(
    holder: Holder,
    settings: Any,
    *,
    cp_size: int,
    num_chunks: int = 1,
    counts_parts: bool = False,
) -> None:
    """Raise :class:`ContractError` for the first option of ``settings`` that is refused.

    ``holder``: what ``settings`` is. ``cp_size``: the training CP size. ``num_chunks``: model
    chunks of this rank. ``counts_parts``: whether each rank counts the parts of sequences that it
    holds, as dynamic context parallelism needs. An option that ``settings`` lacks has its default.
    No collective.
    """
    setting = Setting(
        cp_size=cp_size, num_chunks=num_chunks, counts_parts=counts_parts, holder=settings
    )
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
    lines = ["| option | since | verdict | why | shown by |", "|---|---|---|---|---|"]
    for option in OPTIONS:
        names = ", ".join(
            f"`{name}`" + (f" ({option.later[name]})" if name in option.later else "")
            for name in option.names
        )
        holder = "" if option.holder == "model config" else f"; {option.holder}"
        since = option.since + "".join(f", not {branch}" for branch in option.lacks)
        verdict = f"**refused**: {option.when}" if option.status == "refused" else option.status
        lines.append(
            "| " + " | ".join([names + holder, since, verdict, option.why, option.by]) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
