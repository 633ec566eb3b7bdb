"""miles: its conversion with carried weights, and its own policy loss and scaling."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.verify.frameworks import rollouts
from megatron_lossagg.verify.frameworks.rollouts import CONSTANT, Rollouts
from megatron_lossagg.verify.frameworks.step import Check, Comparison

__all__ = ["checks"]

_LOSS = "miles.backends.training_utils.loss.loss_function"
_CARRY = "megatron_lossagg.integrations.miles.carry_weights"
_REDUCER = "megatron_lossagg.integrations.miles.constant_40"


def checks() -> list[Check]:
    """List the checks; imports miles' conversion and loss, and parses its default arguments."""
    rollouts.join_alone()
    from megatron.training import global_vars
    from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
    from miles.backends.training_utils.loss import loss_function
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.arguments import get_miles_extra_args_provider
    from miles.utils.ft_utils.process_group_utils import GroupInfo
    from miles.utils.misc import load_function

    args = rollouts.parsed(get_miles_extra_args_provider(None))
    args.true_on_policy_mode = True  # else Megatron-Core's cross entropy rounds to bfloat16
    args.global_batch_size = Rollouts().num_rollouts
    global_vars.set_args(args)
    set_parallel_state(create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))

    def carried(aggregation: Aggregation) -> Comparison:
        given = {**rollouts.flags(aggregation), "custom_convert_samples_to_train_data_path": _CARRY}
        made, data = Namespace(**{**vars(args), **given}), Rollouts()
        converted = convert_samples_to_train_data(
            made,
            _samples(data),
            metadata={},
            custom_convert_samples_to_train_data_func=load_function(_CARRY),
            custom_reward_post_process_func=None,
        )
        return run(made, data, converted["rollout_mask_sums"], aggregation)

    def reduced() -> Comparison:
        given = {"custom_pg_loss_reducer_function_path": _REDUCER}
        made, data = Namespace(**{**vars(args), **given}), Rollouts()
        converted = convert_samples_to_train_data(made, _samples(data), {}, None, None)
        return run(made, data, converted["rollout_mask_sums"], CONSTANT)

    def run(made: Namespace, data: Rollouts, denominators: Any, wanted: Aggregation) -> Comparison:
        scaled = {"apply_megatron_loss_scaling": True, "num_rollouts": data.num_rollouts}
        m = len(data.logits)
        shares = [
            loss_function(made, data.batch(index, denominators), m, logits, **scaled)[0]
            for index, logits in enumerate(data.logits)
        ]
        return data.compared(shares, wanted)

    return rollouts.carried_checks(_LOSS, _REDUCER, carried, reduced)


def _samples(data: Rollouts) -> list[Any]:
    """Make miles' samples of the step, one per sequence."""
    from miles.utils.types import Sample

    sequences = [
        (tokens, mask)
        for mb, of_mb in zip(data.step.microbatches, data.tokens, strict=True)
        for tokens, mask in zip(of_mb, mb.mask.int(), strict=True)
    ]
    return [
        Sample(
            group_index=prompt,
            index=index,
            rollout_id=rollout,
            tokens=tokens.tolist(),
            response_length=len(mask),
            reward=0.0,
            loss_mask=mask.tolist(),
            status=Sample.Status.COMPLETED,
        )
        for index, ((tokens, mask), rollout, prompt) in enumerate(
            zip(sequences, data.step.samples, data.step.prompts, strict=True)
        )
    ]
