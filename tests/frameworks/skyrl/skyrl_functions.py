"""SkyRL: its reductions of advantages, and its trainers under this package's weights.

SkyRL's losses sum over tokens. Advantages carry the weights, and SFT's loss masks; the sum over the
microbatches of a mini-batch is the step's loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from drawn_step import Microbatch, Step, aliases
from function_checks import Check, Comparison
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import aggregations
from megatron_lossagg.verify.drivers.skyrl import prompt_boundaries

DIVISOR = 9.0
"""``max_seq_len`` of the drawn step."""
ALIASES = aliases("skyrl", divisor=DIVISOR)
_UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
_REDUCTION = "apply_loss_reduction_to_advantages_minibatch"
_TRAINER = "skyrl.train.trainer.RayPPOTrainer"
_SFT = "skyrl.train.sft_trainer.SFTTrainer"


def checks() -> list[Check]:
    """List the checks; imports SkyRL's trainer."""
    if sys.version_info < (3, 12):  # its pydantic models ask for this one there
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.trainer import RayPPOTrainer

    listed = [
        Check(f"skyrl:{name}", f"{_UTILS}.{_REDUCTION}", partial(_reduced, ppo_utils, name))
        for name in ALIASES
    ]
    for name, aggregation in aggregations().items():
        run = partial(_trained, ppo_utils, RayPPOTrainer, aggregation)
        trained = f"aggregated(RayPPOTrainer), {name}"
        listed.append(Check(trained, f"{_TRAINER}._normalize_advantages", run))
        if aggregation.mode != "prompt_mean":
            for packs in (False, True):
                run = partial(_trained_sft, ppo_utils, aggregation, packs)
                trained = f"aggregated_sft(SFTTrainer{', packed' * packs}), {name}"
                listed.append(Check(trained, f"{_SFT}.build_train_dataloader", run))
    return listed


def _whole(step: Step, field: str) -> Tensor:
    """Stack a field of all microbatches to the mini-batch that the trainer has, ``[B, s]``."""
    width = max(mb.mask.shape[1] for mb in step.microbatches)
    fields = [getattr(mb, field) for mb in step.microbatches]
    return torch.cat([pad(one, (0, width - one.shape[1])) for one in fields])


def _reduced(utils: Any, name: str) -> Comparison:
    """Compare reduced log-probabilities as per-token losses: SkyRL scales advantages that are 1."""
    step = Step()
    mask = _whole(step, "mask").double()
    scale = getattr(utils, _REDUCTION)(
        advantages=torch.ones_like(mask),
        loss_mask=mask,
        loss_reduction=name,
        micro_batch_size=len(step.microbatches[0].sequences),
        max_seq_len=DIVISOR,
        prompt_boundaries=prompt_boundaries(step.prompts),
    )
    got = utils.reduce_loss(_whole(step, "log_probs") * scale, mask)
    return step.compared(got, ALIASES[name], step.leaves)


def _trained(utils: Any, base: Any, aggregation: Aggregation) -> Comparison:
    """Compare r A w_s, reduced by microbatch, with the reference's loss of r A."""
    from megatron_lossagg.integrations.skyrl import aggregated

    step = Step()
    made = trainer(aggregated(base, aggregation), "token_mean")
    boundaries = [(0, len(step.lengths))]
    out = made._normalize_advantages(batch(step), boundaries, prompt_boundaries(step.prompts))
    partial_losses = []
    for mb in step.microbatches:
        sequences = slice(mb.sequences.start, mb.sequences.stop)
        advantages = out["advantages"][sequences, : mb.mask.shape[1]]
        partial_losses.append(utils.reduce_loss(_ratio(mb) * advantages, mb.mask.double()))
    losses = [_ratio(mb) * mb.advantages for mb in step.microbatches]
    return step.compared(torch.stack(partial_losses).sum(), aggregation, losses)


def _trained_sft(utils: Any, aggregation: Aggregation, packs: bool) -> Comparison:
    """Compare SkyRL's cross-entropy of its batch of a step, summed, with the reference's loss."""
    from skyrl.train.config.sft_config import SFTConfig

    step = Step()
    cfg = SFTConfig(strategy="megatron", sampler="sequential", max_length=64)
    cfg.batch_size, cfg.use_sequence_packing = 16, packs  # the last rows are padding
    cfg.placement.num_gpus_per_node = 2
    megatron = cfg.megatron_config
    megatron.tensor_model_parallel_size = megatron.pipeline_model_parallel_size = 1
    megatron.context_parallel_size = 1
    # Packed sequences are then padded, by a number of tokens that depends on the release.
    megatron.transformer_config_kwargs = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    log_probs, examples = [torch.zeros(1, dtype=torch.float64)], []  # by token, all different
    of_sequences = [row for mb in step.microbatches for row in mb.log_probs]
    for one, row in zip(step.drawn, of_sequences, strict=True):
        n, start = len(one.mask), sum(map(len, log_probs))
        log_probs += [torch.zeros(len(one.tokens) - n), row[:n]]
        tokens = [start + t for t in range(len(one.tokens))]
        examples.append(
            {
                "input_ids": tokens,
                "attention_mask": [1] * len(tokens),
                "num_actions": n,
                "loss_mask": one.mask,
            }
        )
    _, batch = sft_batch(aggregation, cfg, examples)
    mask = batch["loss_mask"]
    trained = torch.cat(log_probs)[batch["sequences"][:, -mask.shape[1] :]]
    got, _ = utils.cross_entropy_loss(trained, trained, trained, None, loss_mask=mask)
    return step.compared(got, aggregation, [-x for x in step.leaves])


def sft_batch(aggregation: Aggregation, cfg: Any, examples: Sequence[Any]) -> tuple[Any, Any]:
    """Return SkyRL's SFT trainer, in our subclass, and the batch of its training loader.

    ``cfg``: its ``SFTConfig``. ``examples``: tokenized ones, of one step.
    """
    from skyrl.train.sft_trainer import SFTTrainer

    from megatron_lossagg.integrations.skyrl import aggregated_sft

    made = object.__new__(aggregated_sft(SFTTrainer, aggregation))
    made.sft_cfg = cfg
    made.collator = made._build_collator(SimpleNamespace(pad_token_id=0))
    (batch,) = made.build_train_dataloader(examples)
    return made, batch


def _ratio(mb: Microbatch) -> Tensor:
    return (mb.log_probs - mb.old_log_probs).exp()


def batch(step: Step) -> Any:
    """Make SkyRL's training batch of the step, padded to a multiple of 8 sequences."""
    from skyrl.backends.skyrl_train.training_batch import (
        TrainingInputBatch,
        pad_training_input_batch,
    )

    mask = _whole(step, "mask").double()
    sequences = len(mask)
    made = TrainingInputBatch(
        {
            "sequences": torch.zeros(sequences, 20, dtype=torch.long),
            "advantages": _whole(step, "advantages"),
            "loss_mask": mask,
            "response_mask": mask.clone(),
        }
    )
    made.metadata = {"uids": [f"p{prompt}" for prompt in step.prompts]}
    return pad_training_input_batch(made, -sequences % 8)


def trainer(cls: Any, reduction: str, *, normalize: bool = False) -> Any:
    """Make a trainer with no more than ``_normalize_advantages`` reads."""
    algorithm = SimpleNamespace(
        advantage_batch_normalize=normalize,
        loss_reduction=reduction,
        max_seq_len=DIVISOR,
        policy_loss_type="regular",
    )
    made = object.__new__(cls)
    settings = SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=3)
    made.cfg = SimpleNamespace(trainer=settings)
    return made
