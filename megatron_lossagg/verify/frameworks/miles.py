"""miles: its conversion with carried weights, and its own policy loss and scaling."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import Tensor

from megatron_lossagg.verify.frameworks import carried
from megatron_lossagg.verify.frameworks.check import Check
from megatron_lossagg.verify.frameworks.step import PackedStep

__all__ = ["checks"]

_LOSS = "miles.backends.training_utils.loss.loss_function"
_ARGUMENT = "custom_convert_samples_to_train_data_path"


def checks() -> list[Check]:
    """List the checks; imports miles' conversion and loss, and parses its default arguments."""
    carried.join_alone()
    from megatron.training import global_vars
    from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
    from miles.backends.training_utils.loss import loss_function
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.arguments import get_miles_extra_args_provider
    from miles.utils.ft_utils.process_group_utils import GroupInfo
    from miles.utils.misc import load_function
    from miles.utils.types import Sample

    args = carried.parsed(get_miles_extra_args_provider(None), carry_argument=_ARGUMENT)
    args.true_on_policy_mode = True  # else Megatron-Core's cross entropy rounds to bfloat16
    args.global_batch_size = PackedStep().num_samples
    global_vars.set_args(args)
    set_parallel_state(create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))

    def mask_sums(made: Namespace, step: PackedStep) -> Any:
        hook = load_function(getattr(made, _ARGUMENT))
        samples = _samples(step, Sample)
        converted = convert_samples_to_train_data(made, samples, {}, hook, None)
        return converted["rollout_mask_sums"]

    def loss(made: Namespace, step: PackedStep, index: int, batch: dict[str, Any]) -> Tensor:
        scaled = {"apply_megatron_loss_scaling": True, "num_rollouts": step.num_samples}
        logits, m = step.logits[index], step.num_microbatches
        partial_loss: Tensor = loss_function(made, batch, m, logits, **scaled)[0]
        return partial_loss

    return carried.carried_checks(
        "miles", _LOSS, args, carry_argument=_ARGUMENT, mask_sums=mask_sums, loss=loss
    )


def _samples(step: PackedStep, sample: Any) -> list[Any]:
    """Make miles' sample of each sequence of the step."""
    return [
        sample(
            group_index=one.prompt,
            index=index,
            rollout_id=one.sample,
            tokens=one.tokens.tolist(),
            response_length=len(one.mask),
            reward=0.0,
            loss_mask=one.mask,
            status=sample.Status.COMPLETED,
        )
        for index, one in enumerate(step.drawn)
    ]
