"""slime: carried weights and the constant's reducer in its own policy loss and scaling."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.verify.frameworks import rollouts
from megatron_lossagg.verify.frameworks.rollouts import CONSTANT, Rollouts
from megatron_lossagg.verify.frameworks.step import Check, Comparison

__all__ = ["checks"]

_LOSS = "slime.backends.megatron_utils.loss.loss_function"
_CARRY = "megatron_lossagg.integrations.slime.carry_weights"
_REDUCER = "megatron_lossagg.integrations.slime.constant_40"


def checks() -> list[Check]:
    """List the checks; imports slime's loss function and parses its default arguments."""
    rollouts.join_alone()
    from slime.backends.megatron_utils.loss import loss_function
    from slime.utils.arguments import get_slime_extra_args_provider
    from slime.utils.misc import load_function

    args = rollouts.parsed(get_slime_extra_args_provider(None))

    def carried(aggregation: Aggregation) -> Comparison:
        given = {**rollouts.flags(aggregation), "rollout_data_postprocess_path": _CARRY}
        made, data = _with(args, given), Rollouts()
        rollout_data = _rollout_data(data)
        load_function(_CARRY)(made, 0, rollout_data)
        return run(made, data, rollout_data["rollout_mask_sums"], aggregation)

    def reduced() -> Comparison:
        made, data = _with(args, {"custom_pg_loss_reducer_function_path": _REDUCER}), Rollouts()
        return run(made, data, data.counts(), CONSTANT)

    def run(made: Namespace, data: Rollouts, denominators: Any, wanted: Aggregation) -> Comparison:
        m, g = len(data.logits), data.num_rollouts
        shares = [
            loss_function(made, data.batch(index, denominators), m, g, logits)[0]
            for index, logits in enumerate(data.logits)
        ]
        return data.compared(shares, wanted)

    return rollouts.carried_checks(_LOSS, _REDUCER, carried, reduced)


def _with(args: Namespace, given: dict[str, Any]) -> Namespace:
    return Namespace(**{**vars(args), **given})


def _rollout_data(data: Rollouts) -> dict[str, Any]:
    """Return the rollout batch of this rank as slime's actor has it, with prompt ids."""
    step = data.step
    return {
        "loss_masks": [mask for mb in step.microbatches for mask in mb.mask.int()],
        "rollout_ids": step.samples,
        "prompt": list(step.prompts),
        "micro_batch_indices": [list(mb.sequences) for mb in step.microbatches],
        "num_microbatches": [len(step.microbatches)],
        "global_batch_sizes": [data.num_rollouts],
        "rollout_mask_sums": torch.tensor(data.counts()),
    }
