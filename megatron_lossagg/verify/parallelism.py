"""How a verification splits its step: parallel sizes and Megatron options, frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.step_data import VOCABULARY, contiguous, zigzag

WEIGHT_SUM_TOLERANCE = 1e-6
"""Largest relative error of the weight sum that passes: it is computed in float32."""

_BSHD_LENGTH = 32
"""Padded length of every sequence of a bshd batch, more than any sequence's length."""

_HEAD_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What determines the weights of the model: two equal shapes have one reference.

    A multi-token-prediction layer has a loss of its own and is not part of the shape.
    """

    num_layers: int
    num_heads: int
    num_experts: int
    learned_positions: bool
    """Learned position embeddings; rotary ones if not."""
    bf16: bool = False
    """Weights are rounded to bfloat16."""

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return self.num_heads * _HEAD_SIZE


def _size(text: str, *, default: int = 1) -> Any:
    return field(default=default, metadata={"help": text})


def _switch(name: str, text: str) -> Any:
    """``name``: how a layout's name has it."""
    return field(default=False, metadata={"help": text, "name": name})


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Parallel sizes, microbatches and Megatron options of one layout.

    Each field is an option of ``lossagg verify``, and its help. Raises :class:`ProofError` if the
    sizes contradict each other.
    """

    dp: int = _size("data-parallel size, without context parallelism")
    tp: int = _size("tensor-parallel size")
    pp: int = _size("pipeline-parallel size")
    vpp: int = _size("model chunks per pipeline stage; above 1 the pipeline is interleaved")
    cp: int = _size("context-parallel size")
    ep: int = _size("expert-parallel size over DP * CP * TP, with --moe")
    microbatches: int | tuple[int, ...] = _size(
        "M, microbatches of the step on each data-parallel rank (default 3)", default=3
    )
    """M, or one M per data-parallel rank; reported values assume one M."""
    optimizer_instances: int = _size("distributed optimizer instances")
    packing: str = field(
        default="thd",
        metadata={
            "help": "packed sequences, one sequence per batch entry, sequences that the framework "
            "slices, or packed sequences whose losses it gathers on every context-parallel rank "
            "(default thd)",
            "choices": ("thd", "bshd", "local", "gathered"),
        },
    )
    cp_partition: str = field(
        default="zigzag",
        metadata={
            "help": "what a context-parallel rank holds (Megatron's cp_partition_mode): two chunks "
            "of each sequence, or one interval of the packed sequences and of each unpacked one "
            "(default zigzag)",
            "choices": ("zigzag", "contiguous"),
        },
    )
    megatron_fsdp: str = field(
        default="off",
        metadata={
            "help": "wrap the model in Megatron-FSDP with this sharding strategy, with --float32 "
            "or --bf16 (default off)",
            "choices": ("off", "no_shard", "optim", "optim_grads", "optim_grads_params"),
        },
    )
    outer_sharding: bool = _switch(
        "outer sharding", "shard over optimizer instances too, with --megatron-fsdp"
    )
    moe: bool = _switch("MoE", "experts, with router and z losses in addition to the main loss")
    mtp: bool = _switch(
        "MTP", "a multi-token-prediction layer with a loss of its own; with --float32"
    )
    float32: bool = _switch(
        "float32", "weights in float32 and Megatron's own cross entropy; float64 if not"
    )
    bf16: bool = _switch(
        "bf16", "weights in bfloat16, gradients in float32 and Megatron's own cross entropy"
    )
    sequence_parallel: bool = _switch("sequence parallel", "sequence parallelism, with --tp")
    distributed_optimizer: bool = _switch(
        "distributed optimizer", "shard the gradients as the distributed optimizer does"
    )
    average_in_collective: bool = _switch(
        "average in collective", "average in the collective, in the average loss scaling"
    )
    overlap_grad_reduce: bool = _switch(
        "overlap grad reduce", "overlap the reduction with the backward pass"
    )
    recompute: bool = _switch("recompute", "recompute all activations")
    hooked: bool = _switch(
        "hooked schedule",
        "through the schedule hook, as frameworks use it, not in a loop of our own",
    )

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "vpp", "cp", "ep", "optimizer_instances"):
            if getattr(self, name) < 1:
                raise ProofError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if len(self.m_of_ranks) != self.dp or min(self.m_of_ranks) < 1:
            raise ProofError(
                f"microbatches: got {self.microbatches}, expected one number from 1, or one for "
                f"each of the {self.dp} data-parallel ranks"
            )
        self._check_options()

    def _check_options(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ProofError("sequence parallelism is over tensor-parallel ranks: give tp above 1")
        if self.moe and self.tp > 1 and not self.sequence_parallel:
            raise ProofError("Megatron-Core runs experts with tp above 1 under sequence_parallel")
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata.get("choices")
            if choices and value not in choices:
                expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ProofError(f"{option.name}: got {value!r}, expected {expected}")
        if self.cp_partition == "contiguous" and self.cp == 1:
            raise ProofError("cp_partition is over context-parallel ranks: give cp above 1")
        if VOCABULARY % self.tp:
            raise ProofError(
                f"tp {self.tp} does not divide the model's {VOCABULARY} token ids: take a power of "
                "two up to it"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ProofError(f"vpp {self.vpp} needs pp above 1: an interleaved pipeline has stages")
        if self.vpp > 1 and any(m % self.pp for m in self.m_of_ranks):
            raise ProofError(
                f"microbatches: got {self.microbatches}, expected a multiple of pp {self.pp} for "
                "an interleaved pipeline. Change --microbatches"
            )
        if self.ep > 1 and not self.moe:
            raise ProofError(f"ep {self.ep} needs experts: add --moe")
        if (self.dp * self.cp * self.tp) % self.ep:
            raise ProofError(
                f"ep {self.ep} does not divide dp * cp * tp = {self.dp * self.cp * self.tp}"
            )
        is_fsdp = self.megatron_fsdp != "off"
        if self.optimizer_instances > 1 and not (self.distributed_optimizer or is_fsdp):
            raise ProofError("several optimizer instances need --distributed-optimizer")
        if is_fsdp and not self.megatrons_losses:
            raise ProofError("Megatron-FSDP has no float64 gradients: add --float32 or --bf16")
        if is_fsdp and self.pp > 1:
            raise ProofError(
                f"Megatron-Core builds no Megatron-FSDP with pp {self.pp} (its mesh of ranks has "
                "no pipeline stages): leave pp at 1"
            )
        if self.outer_sharding and not (is_fsdp and self.optimizer_instances > 1):
            raise ProofError("outer_sharding needs --megatron-fsdp and several optimizer instances")
        if (self.dp * self.cp) % self.optimizer_instances:
            raise ProofError(
                f"{self.optimizer_instances} optimizer instances do not divide dp * cp = "
                f"{self.dp * self.cp}"
            )
        if self.float32 and self.bf16:
            raise ProofError("got float32 with bf16, expected one of them: drop one")
        if self.mtp and not self.float32:
            raise ProofError(
                "a multi-token-prediction model uses Megatron's cross entropy, which is float32: "
                "add --float32"
            )
        if self.packing == "local" and self.mtp:
            raise ProofError("packing: got local with mtp, expected another")
        if self.cp_partition == "contiguous" and self.mtp:
            raise ProofError(
                "cp_partition: got contiguous with mtp, expected zigzag: Megatron-Core rolls the "
                "labels of its multi-token prediction over zigzag chunks"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def m_of_ranks(self) -> list[int]:
        """M of each data-parallel rank."""
        m = self.microbatches
        return [m] * self.dp if isinstance(m, int) else list(m)

    @property
    def dp_cp(self) -> int:
        """Number of ranks whose gradients are reduced together."""
        return self.dp * self.cp

    @property
    def shape(self) -> ModelShape:
        """The smallest model that these sizes divide, at least four heads.

        Experts in two layers or more: an auxiliary loss has no gradient in its own layer's experts.
        """
        stages = self.pp * self.vpp
        return ModelShape(
            num_layers=stages * math.ceil(2 / stages) if self.moe else stages,
            num_heads=math.lcm(4, self.tp),
            num_experts=math.lcm(4, self.ep) if self.moe else 0,
            # Rotary ones are split over context-parallel ranks by Megatron-Core, as zigzag chunks.
            learned_positions=self.cp_partition == "contiguous",
            bf16=self.bf16,
        )

    @property
    def reference(self) -> tuple[ModelShape, int, int]:
        """What the reference depends on: model, how often the 14 sequences are drawn, padding.

        They are drawn so often that most microbatches get one, at most four times.
        """
        return self.shape, min(4, math.ceil(sum(self.m_of_ranks) / 14)), self.padded(1)

    @property
    def sequence_multiple(self) -> int:
        """A sequence's length is padded to a multiple of this: 2 CP, times TP under SP."""
        return 2 * self.cp * (self.tp if self.sequence_parallel else 1)

    def padded(self, length: int) -> int:
        """Return the length of a sequence as it is packed."""
        if self.packing == "bshd":
            length = max(length, _BSHD_LENGTH)
        return -(-length // self.sequence_multiple) * self.sequence_multiple

    def held(self, offsets: Sequence[int], cp_rank: int) -> list[int]:
        """List the positions of a microbatch, packed at padded offsets, that a rank holds."""
        if self.cp_partition == "zigzag":
            return zigzag(offsets, self.cp, cp_rank)
        parts = offsets if self.packing == "bshd" else [0, offsets[-1]]
        return contiguous(parts, self.cp, cp_rank)

    @property
    def megatrons_losses(self) -> bool:
        """Whether losses are Megatron's, in float32; float64 log-probabilities if not."""
        return self.float32 or self.bf16

    @property
    def tolerance(self) -> float:
        """Largest relative error that passes: rounding of the least precise part, and a margin."""
        if self.bf16:
            # Rounding leaves 0.07, 0.11 and 0.12 in 1, 4 and 8 layers (docs/verify.md).
            return 0.1 * math.sqrt(self.shape.num_layers)
        if self.float32:
            return 1e-5
        return 1e-6 if self.moe else 1e-12  # Megatron's routers compute in float32

    def __str__(self) -> str:
        """Sizes above 1, then options."""
        names = ("dp", "tp", "pp", "vpp", "cp", "ep")
        sizes = [f"{n.upper()} {getattr(self, n)}" for n in names if getattr(self, n) > 1]
        options = [
            option.metadata["name"]
            for option in fields(self)
            if "name" in option.metadata and getattr(self, option.name)
        ]
        if self.optimizer_instances > 1:
            options.append(f"{self.optimizer_instances} instances")
        if self.megatron_fsdp != "off":
            options.append(f"Megatron-FSDP {self.megatron_fsdp}")
        if self.packing != "thd":
            options.append(self.packing)
        if self.cp_partition != "zigzag":
            options.append(self.cp_partition)
        ms = self.m_of_ranks
        m = "+".join(map(str, ms if len(set(ms)) > 1 else ms[:1]))
        return ", ".join([" x ".join(sizes or ["DP 1"]), f"M {m}", *options])


def standard(*, moe: bool = False) -> list[Parallelism]:
    """Return the layouts that ``lossagg verify`` runs by default: each split, on four ranks."""
    layouts = [
        Parallelism(dp=4, microbatches=3),
        Parallelism(dp=2, cp=2, microbatches=3),
        Parallelism(cp=4, microbatches=5),
        Parallelism(cp=2, pp=2, microbatches=3),
        Parallelism(dp=2, tp=2, sequence_parallel=True, microbatches=3),
        Parallelism(dp=2, pp=2, vpp=2, microbatches=4),
        Parallelism(dp=2, cp=2, microbatches=3, distributed_optimizer=True),
    ]
    if moe:
        # At EP 1 stock 0.16.1 does not sum experts' gradients over TP (Megatron-LM#5916).
        layouts = [replace(layout, moe=True, ep=layout.tp) for layout in layouts]
        layouts.append(Parallelism(dp=2, cp=2, ep=2, moe=True, microbatches=3))
    return layouts
