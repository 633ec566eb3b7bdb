"""Megatron-Core's own GPTModel, DistributedDataParallel and optimizer, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import task
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_lossagg import cpu

MAX_TOKENS = task.MAX_PROMPT_TOKENS + task.MAX_RESPONSE_TOKENS


class WeightsError(ValueError):
    """A file of weights that does not fit the model."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How one model and one batch are split over processes."""

    world_size: int
    tensor: int
    pipeline: int
    context: int

    @property
    def data(self) -> int:
        """DP: data-parallel size without context parallelism."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    def __str__(self) -> str:
        """Name the axes, as flags and metrics do."""
        return f"DP {self.data} x CP {self.context} x PP {self.pipeline} x TP {self.tensor}"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of the model."""

    num_layers: int
    hidden_size: int
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class OptimizerWithSchedule:
    """Megatron-Core's Adam and its learning-rate schedule."""

    optimizer: Any
    schedule: OptimizerParamScheduler

    def step(self) -> float:
        """Clip, update the weights, advance the schedule; return the gradient norm."""
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(increment=1)
        # In float32 the step leaves param.grad pointing into DDP's buffer: left there, the next
        # backward would add every gradient to it twice.
        self.optimizer.zero_grad()
        return float(grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def start_processes(processes: Processes, seed: int) -> None:
    """Join the job that torchrun started and make Megatron-Core's process groups."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=processes.tensor,
        pipeline_model_parallel_size=processes.pipeline,
        context_parallel_size=processes.context,
    )
    model_parallel_cuda_manual_seed(seed)


def stop_processes() -> None:
    """Wait for all ranks and leave the job."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build_model(
    shape: Shape, processes: Processes, *, per_token: bool, seed: int
) -> DistributedDataParallel:
    """Build this rank's part of the GPTModel, wrapped; its weights depend on the seed alone.

    ``per_token``: Megatron's ``--calculate-per-token-loss``, which decides how Megatron
    scales a loss and never which loss is trained.
    """
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        tensor_model_parallel_size=processes.tensor,
        pipeline_model_parallel_size=processes.pipeline,
        context_parallel_size=processes.context,
        pipeline_dtype=torch.float32,
        # Microbatches have as many tokens as their sequences; validation then wants this
        # dispatcher.
        variable_seq_lengths=processes.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        init_method_std=0.05,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = _gpt(config)
    cpu.initialize_weights([gpt], seed=seed)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def _gpt(config: TransformerConfig) -> GPTModel:
    return GPTModel(
        config,
        cpu.gpt_layer_spec(config),
        vocab_size=task.VOCABULARY_SIZE,
        max_sequence_length=MAX_TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )


def build_optimizer(
    model: DistributedDataParallel,
    *,
    lr: float,
    num_steps: int,
    decay: str,
    clip_grad: float,
    adam_eps: float,
    weight_decay: float,
) -> OptimizerWithSchedule:
    """Build Adam over the wrapped model, with a short linear rise and ``decay`` after it."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=0.1 * lr,
            weight_decay=weight_decay,
            adam_beta2=0.99,
            adam_eps=adam_eps,
            clip_grad=clip_grad,
        ),
        [model],
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=0.1 * lr,
        lr_warmup_steps=min(10, num_steps - 1),
        lr_decay_steps=num_steps,
        lr_decay_style=decay,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
        # A resumed run may be longer than the killed one.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return OptimizerWithSchedule(optimizer=optimizer, schedule=schedule)


def build_sampler(model: DistributedDataParallel) -> GPTModel:
    """Build an unsplit copy of the model's class that generates; call :func:`sync_weights`.

    Each rank samples alone, so the copy knows no context parallelism.
    """
    config = copy.copy(model.config)
    config.context_parallel_size = 1
    sampler = _gpt(config)
    sampler.requires_grad_(False)
    return sampler.eval()


def sync_weights(sampler: GPTModel, model: DistributedDataParallel) -> None:
    """Copy the trained weights into the sampler, as an inference engine is updated."""
    sources = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    with torch.no_grad():
        for shard in cpu.named_shards([sampler]):
            shard.parameter.copy_(sources[shard.name])


def save_weights(path: Path, model: DistributedDataParallel) -> None:
    """Write the weights of an unsplit model by their global names; one rank calls."""
    weights = {shard.name: shard.parameter.detach().clone() for shard in cpu.named_shards([model])}
    temporary = path.with_name(path.name + ".tmp")
    torch.save(weights, temporary)
    temporary.replace(path)


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Read weights by their global names and slice them to this rank's pieces, at any layout.

    Call it before the optimizer is built. Raises :class:`WeightsError`.
    """
    try:
        weights: dict[str, Tensor] = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise WeightsError(
            f"no weights at {path}: give --start-from a file of save_weights"
        ) from None
    for shard in cpu.named_shards([model]):
        full = weights.get(shard.name)
        if full is None or tuple(full.shape) != shard.full_shape:
            got = "nothing" if full is None else f"shape {tuple(full.shape)}"
            raise WeightsError(
                f"{path} has {got} for {shard.name}, the model has shape {shard.full_shape}: "
                "give the --num-layers and --hidden-size that the weights were trained with"
            )
        with torch.no_grad():
            shard.parameter.copy_(shard.cut(full))
