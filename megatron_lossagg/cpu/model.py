"""Stock GPT models for a CPU, and weights that do not depend on how they are split.

A parameter's *global name* counts layers over the whole model and experts over the
whole expert-parallel group, so the same tensor has the same name at every layout.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_lossagg.cpu.attention import ContextParallelAttention, UnsupportedModelError

_SPLIT_MODULES = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


class SequenceParallelNorm:
    """Megatron-Core's ``WrappedTorchNorm``, with parameters marked for sequence parallelism.

    Under sequence parallelism each tensor-parallel rank normalizes its own tokens, so the
    gradients of the norm's parameters are parts to be summed. Megatron-Core's
    ``finalize_model_grads`` sums those marked ``sequence_parallel``; PyTorch's norms are
    not, and ``WrappedTorchNorm`` refuses.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        """Build the norm that ``config.normalization`` names; without collectives."""
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        unsplit.persist_layer_norm = False
        norm = WrappedTorchNorm(unsplit, hidden_size, eps, **kwargs)
        norm.to(config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def gpt_layer_spec(config: Any, *, vp_stage: int | None = None, own_attention: bool = True) -> Any:
    """Return Megatron-Core's local block spec with our attention and norms in their slots.

    Pass it to ``GPTModel`` as ``transformer_layer_spec``. It covers this pipeline stage's
    layers (dense or mixture of experts, ``config.moe_layer_freq``) and the final norm, so
    call it after ``initialize_model_parallel``, with ``vp_stage`` if the stages of an
    interleaved pipeline differ. ``own_attention=False`` leaves Megatron-Core's own, for whole
    unpacked sequences. Source: ``gpt_layer_specs.get_gpt_decoder_block_spec``.
    """
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    table = _replacements()
    if not own_attention:
        del table[DotProductAttention]
    _swap(spec, table)
    return spec


def gpt_mtp_spec(config: Any, *, vp_stage: int | None = None) -> Any:
    """Return Megatron-Core's local multi-token-prediction spec with the same replacements.

    Pass it to ``GPTModel`` as ``mtp_block_spec``; ``None`` on a stage without such layers.
    Source: ``gpt_layer_specs.get_gpt_mtp_block_spec``.
    """
    layer_spec = gpt_layer_spec(config, vp_stage=vp_stage)
    return use_own_modules(
        gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layer_spec, use_transformer_engine=False, vp_stage=vp_stage
        )
    )


def use_own_modules(spec: Any) -> Any:
    """Put our attention and norms into a built spec, in place, and return it."""
    _swap(spec, _replacements())
    return spec


def _replacements() -> dict[Any, Any]:
    # The local spec takes Apex's fused norm if Apex is installed.
    norms = {WrappedTorchNorm, gpt_layer_specs.LNImpl}
    return {
        DotProductAttention: ContextParallelAttention,
        **dict.fromkeys(norms, SequenceParallelNorm),
    }


def _swap(spec: Any, table: dict[Any, Any]) -> None:
    """Replace, in place and at any depth, the modules of a spec that ``table`` names."""
    if isinstance(spec, list):
        for item in spec:
            _swap(item, table)
    elif isinstance(spec, ModuleSpec):
        _swap(spec.submodules, table)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if isinstance(value, type) and value in table:
                setattr(spec, field.name, table[value])
            else:
                _swap(value, table)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Shard:
    """A parameter of this rank as a piece of the whole model's tensor."""

    name: str
    """The global name: equal for the same tensor at every layout."""

    parameter: torch.nn.Parameter
    """The piece that this rank holds."""

    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    dim: int
    """The dimension that tensor parallelism splits."""

    stride: int
    """Number of blocks along ``dim`` that are split one by one: 2 for gate and up of a GLU."""

    index: int
    """This rank's place among the pieces."""

    num_pieces: int
    """Number of pieces; 1 for a tensor that every rank holds whole."""

    def cut(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a tensor shaped like the whole parameter."""
        if tuple(full.shape) != self.full_shape:
            raise UnsupportedModelError(
                f"got a tensor of shape {tuple(full.shape)} for {self.name}, expected the whole "
                f"tensor's {self.full_shape}"
            )
        if self.num_pieces == 1:
            return full
        pieces = full.chunk(self.num_pieces * self.stride, dim=self.dim)
        return torch.cat(pieces[self.index :: self.num_pieces], dim=self.dim)


def named_shards(chunks: Iterable[torch.nn.Module]) -> Iterator[Shard]:
    """Walk this rank's parameters under their global names; no collective.

    ``chunks``: the GPT model chunks of this rank, wrapped in Megatron-Core's
    ``DistributedDataParallel``, in Megatron-FSDP, or not. Tied embeddings are refused: their weight
    lies on two pipeline stages under two names.
    """
    for chunk in chunks:
        model = _unwrap(chunk)
        if model.share_embeddings_and_output_weights:
            raise UnsupportedModelError(
                "got tied embeddings, one tensor under two names: build the model with "
                "share_embeddings_and_output_weights=False"
            )
        for name, parameter in model.named_parameters():
            module = model.get_submodule(name.rpartition(".")[0])
            # Megatron-FSDP keeps the parameter that it has split.
            own = getattr(parameter, "orig_param", parameter)
            yield _shard(_global_name(model, name), own, module, model.config)


def initialize_weights(chunks: Iterable[torch.nn.Module], *, seed: int) -> None:
    """Overwrite the weights by ones that do not depend on the layout; no collective.

    Every parameter's whole tensor is drawn in float64 from a generator seeded by (seed, global
    name), sliced to this rank's piece and rounded to the parameter's dtype. Normal, with
    ``config.init_method_std``, divided by sqrt(2 num_layers) if a layer adds to the residual; the
    gains of norms have mean 1, biases are drawn too. Call it before the optimizer is built:
    optimizers copy the weights.
    """
    chunks = list(chunks)
    for shard in named_shards(chunks):
        config = _unwrap(chunks[0]).config
        std = config.init_method_std
        if shard.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= math.sqrt(2 * config.num_layers)
        digest = hashlib.sha256(f"{seed} {shard.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        full = std * torch.randn(shard.full_shape, generator=generator, dtype=torch.float64)
        if shard.name.endswith("weight") and full.dim() == 1:
            full += 1.0
        with torch.no_grad():
            shard.parameter.copy_(shard.cut(full))


def _unwrap(chunk: Any) -> Any:
    while not hasattr(chunk, "share_embeddings_and_output_weights"):
        chunk = chunk.module
    return chunk


def _global_name(model: torch.nn.Module, name: str) -> str:
    parts = name.split(".")
    for i, part in enumerate(parts):
        if not part.isdigit():
            continue
        owner: Any = model.get_submodule(".".join(name.split(".")[: i + 1]))
        if isinstance(getattr(owner, "layer_number", None), int):
            parts[i] = str(owner.layer_number - 1)
        elif parts[i - 1] == "local_experts":
            moe_layer: Any = model.get_submodule(".".join(name.split(".")[: i - 2]))
            parts[i] = str(moe_layer.local_expert_indices[int(part)])
    return ".".join(parts)


def _shard(name: str, parameter: Any, module: Any, config: Any) -> Shard:
    is_split = getattr(parameter, "tensor_model_parallel", None)
    if is_split is None and isinstance(module, _SPLIT_MODULES) and name.endswith("weight"):
        raise UnsupportedModelError(
            f"{name} does not record how it is split: build the model with "
            "perform_initialization=True"
        )
    shape = list(parameter.shape)
    dim, stride, index, num_pieces = 0, 1, 0, 1
    if is_split:
        dim, stride = parameter.partition_dim, parameter.partition_stride
        index, num_pieces = _place(is_expert=getattr(module, "is_expert", False))
        shape[dim] *= num_pieces
        if config.gated_linear_unit and ".linear_fc1." in name:
            # Megatron-Core before 0.16 lays gate and up out the same way without recording it.
            stride = 2
    return Shard(
        name=name,
        parameter=parameter,
        full_shape=tuple(shape),
        dim=dim,
        stride=stride,
        index=index,
        num_pieces=num_pieces,
    )


def _place(*, is_expert: bool) -> tuple[int, int]:
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
