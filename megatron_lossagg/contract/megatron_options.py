"""Which options of Megatron are refused: they change who holds a token or how a loss is scaled.

:func:`check_options` rejects what a live object sets. ``docs/reference/options.md`` has
these options, others that need no refusal, and the release that brought each. A test compares the
two. What only a step can refuse is in ``guards/before.py``, a layout that is not the model's in
``guards/each_step.py``, what a framework cannot do in the framework's file of ``integrations/``.
No torch; Megatron's version is read when :func:`megatron_version` is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lossagg.errors import ContractError


def megatron_version() -> str:
    """Return the version of the Megatron-Core that is imported."""
    import megatron.core

    return str(megatron.core.__version__)


def megatron_release() -> tuple[int, ...]:
    """Return its major and minor version."""
    return tuple(int(part) for part in re.findall(r"\d+", megatron_version())[:2])


Holder = Literal["model config", "script arguments", "Bridge's dist config"]
"""Which object holds an option: the chunks' ``TransformerConfig`` (with ``ModelParallelConfig``),
what Megatron-LM's ``get_args()`` returns, or ``ConfigContainer.dist``."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a condition needs next to the option's value."""

    cp_size: int = 1
    num_chunks: int = 1
    counts_parts: bool = False
    holder: Any = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """Options of which a value is refused, for one reason."""

    names: tuple[str, ...]
    holder: Holder = "model config"
    default: Any = None
    """For a holder that lacks the option."""
    is_wrong: Callable[[Any, Setting], bool]
    """Whether a value is refused."""
    when: str
    """The same in words."""
    why: str
    change: str
    """What to change."""
    moves_tokens: bool = False
    """Whether it changes which rank holds a token."""


OPTIONS = (
    Option(
        names=("cp_partition_mode",),
        default="zigzag",
        is_wrong=lambda value, at: at.cp_size > 1 and value not in ("zigzag", "contiguous"),
        when="neither `zigzag` nor `contiguous` at CP > 1",
        why="packed sequences take the layout that the model's config names",
        change="set cp_partition_mode to 'zigzag' or 'contiguous', or train at "
        "context_parallel_size=1",
        moves_tokens=True,
    ),
    Option(
        names=("linear_cp_layout", "attention_cp_layout"),
        default="zigzag",
        is_wrong=lambda value, at: at.cp_size > 1 and value != "zigzag",
        when="not `zigzag` at CP > 1",
        why="the layers choose the split, and the weights are laid out for two chunks of each "
        "sequence",
        change="set both to 'zigzag', or train at context_parallel_size=1",
        moves_tokens=True,
    ),
    Option(
        names=("hybrid_context_parallel",),
        is_wrong=lambda value, at: value is not None and value is not False,
        when="set",
        why="CP changes with every microbatch, so that sequences have no single layout",
        change="drop --hybrid-context-parallel",
        moves_tokens=True,
    ),
    Option(
        names=("dynamic_context_parallel",),
        is_wrong=lambda value, at: bool(value) and not at.counts_parts,
        when="set, but in Megatron-LM's own loop and in verl, which have it",
        why="each microbatch has CP groups of its own, so that sequences have no single layout: "
        "each rank counts its parts of them",
        change="drop --dynamic-context-parallel",
        moves_tokens=True,
    ),
    Option(
        names=("sequence_packing_scheduler",),
        is_wrong=lambda value, at: (
            value not in (None, "dp_balanced")
            and not (at.counts_parts and value == "default_dynamic_cp")
        ),
        when="neither unset nor `dp_balanced`",
        why="sequences are counted after `dp_balanced` has packed them; `default_dynamic_cp` is "
        "dynamic context parallelism",
        change="use --sequence-packing-scheduler dp_balanced, or drop it and pack in the data set",
    ),
    Option(
        names=("dataloader_inter_document_masking",),
        holder="script arguments",
        default=False,
        is_wrong=lambda value, at: (
            bool(value) and not getattr(at.holder, "sft", False) and at.cp_size > 1
        ),
        when="set at CP > 1, without `sft`",
        why="an entry is split as a whole, so that a document's tokens lie unevenly on CP ranks",
        change="use --context-parallel-size 1, or drop --dataloader-inter-document-masking",
    ),
    Option(
        names=("eval_context_parallel_size",),
        holder="Bridge's dist config",
        is_wrong=lambda value, at: value not in (None, at.cp_size),
        when="not the training CP",
        why="groups and layouts are read once, and evaluation would have others than training",
        change="leave dist.eval_context_parallel_size unset",
    ),
    Option(
        names=("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        default=1,
        is_wrong=lambda value, at: (value or 1) > 1,
        when="above 1",
        why="its ranks train microbatches of their own, outside the data-parallel group that is "
        "counted over",
        change="set it to 1, and leave the numbers of weight shards unset",
    ),
    Option(
        names=("pipeline_model_parallel_size",),
        default=1,
        is_wrong=lambda value, at: (
            at.num_chunks > 1
            and value == 2
            and not (
                getattr(at.holder, "overlap_p2p_comm", False)
                and not getattr(at.holder, "batch_p2p_comm", True)
            )
        ),
        when="2 and interleaved, unless `overlap_p2p_comm` without `batch_p2p_comm`",
        why="interleaved pipelining over 2 stages mixes up its messages",
        change="set overlap_p2p_comm=True and batch_p2p_comm=False",
    ),
    Option(
        names=("cuda_graph_scope", "cuda_graph_impl"),
        is_wrong=lambda value, at: (
            "full_iteration" in str(value).replace("full_iteration_inference", "")
        ),
        when="full iteration",
        why="a full-iteration CUDA graph freezes K at capture",
        change="use another --cuda-graph-impl or --cuda-graph-scope",
    ),
    Option(
        names=("flextron",),
        is_wrong=lambda value, at: value is not None and value is not False,
        when="set",
        why="the model returns a penalty, which the configured loss would drop",
        change="drop --flextron",
    ),
)


def check_options(
    holder: Holder,
    settings: Any,
    *,
    cp_size: int,
    num_chunks: int = 1,
    counts_parts: bool = False,
    only_moves: bool = False,
) -> None:
    """Raise :class:`ContractError` for the first option of ``settings`` that is refused.

    ``holder``: what ``settings`` is. ``cp_size``: the training CP size. ``num_chunks``: model
    chunks of this rank. ``counts_parts``: whether each rank counts the parts of sequences that it
    holds, as dynamic context parallelism needs. ``only_moves``: only the options that change which
    rank holds a token. An option that ``settings`` lacks has its default. No collective.
    """
    setting = Setting(
        cp_size=cp_size, num_chunks=num_chunks, counts_parts=counts_parts, holder=settings
    )
    for option in OPTIONS:
        if option.holder != holder or (only_moves and not option.moves_tokens):
            continue
        for name in option.names:
            value = getattr(settings, name, option.default)
            if option.is_wrong(value, setting):
                raise ContractError(
                    f"{name} is {value!r}, which is not supported here ({option.when}): "
                    f"{option.why}. Change: {option.change}."
                )
