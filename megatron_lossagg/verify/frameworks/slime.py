"""slime: carried weights and the constant's reducer in its own policy loss and scaling."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.integrations.slime import HOOKS
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.check import Check
from megatron_lossagg.verify.frameworks.drawn_step import PackedStep
from megatron_lossagg.verify.frameworks.slime_and_miles import (
    arguments,
    join_alone,
    policy_loss_checks,
)

_LOSS = "slime.backends.megatron_utils.loss.loss_function"


def checks(_: Aggregation) -> list[Check]:
    """List the checks; imports slime's loss function and parses its default arguments."""
    join_alone()
    from slime.backends.megatron_utils.loss import loss_function
    from slime.utils.misc import load_function

    def mask_sums(made: Namespace, step: PackedStep) -> Any:
        data = _rollout_data(step)
        if made.rollout_data_postprocess_path:
            load_function(made.rollout_data_postprocess_path)(made, 0, data)
        return data["rollout_mask_sums"]

    def loss(made: Namespace, step: PackedStep, index: int, batch: dict[str, Any]) -> Tensor:
        m, g = step.num_microbatches, step.num_samples
        partial_loss: Tensor = loss_function(made, batch, m, g, step.logits[index])[0]
        return partial_loss

    return policy_loss_checks(HOOKS, _LOSS, arguments(HOOKS), mask_sums=mask_sums, loss=loss)


def _rollout_data(step: PackedStep) -> dict[str, Any]:
    """Return the rollout batch of this rank as slime's actor has it, with prompt ids."""
    return {
        "loss_masks": [torch.tensor(one.mask, dtype=torch.int32) for one in step.drawn],
        "rollout_ids": step.samples,
        "prompt": list(step.prompts),
        "micro_batch_indices": [list(mb.sequences) for mb in step.microbatches],
        "num_microbatches": [step.num_microbatches],
        "global_batch_sizes": [step.num_samples],
        "rollout_mask_sums": torch.ones(len(step.drawn)),
    }
