"""miles: its conversion with carried weights, and its own policy loss and scaling."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import Tensor

from megatron_lossagg.integrations.miles import HOOKS
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.check import Check
from megatron_lossagg.verify.frameworks.drawn_step import PackedStep
from megatron_lossagg.verify.frameworks.slime_and_miles import (
    arguments,
    join_alone,
    make_samples,
    policy_loss_checks,
)

_LOSS = "miles.backends.training_utils.loss.loss_function"


def checks(_: Aggregation) -> list[Check]:
    """List the checks; imports miles' conversion and loss, and parses its default arguments."""
    join_alone()
    from miles.backends.training_utils.loss import loss_function
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.misc import load_function
    from miles.utils.types import Sample

    args = arguments(HOOKS)
    args.true_on_policy_mode = True  # else Megatron-Core's cross entropy rounds to bfloat16
    args.global_batch_size = PackedStep().num_samples
    take(args)

    def mask_sums(made: Namespace, step: PackedStep) -> Any:
        hook = load_function(made.custom_convert_samples_to_train_data_path)
        samples = make_samples(step.drawn, Sample)
        converted = convert_samples_to_train_data(made, samples, {}, hook, None)
        return converted["rollout_mask_sums"]

    def loss(made: Namespace, step: PackedStep, index: int, batch: dict[str, Any]) -> Tensor:
        scaled = {"apply_megatron_loss_scaling": True, "num_rollouts": step.num_samples}
        logits, m = step.logits[index], step.num_microbatches
        partial_loss: Tensor = loss_function(made, batch, m, logits, **scaled)[0]
        return partial_loss

    return policy_loss_checks(HOOKS, _LOSS, args, mask_sums=mask_sums, loss=loss)


def take(args: Namespace) -> None:
    """Make ``args`` the process's, and miles' parallel state from Megatron's groups."""
    from megatron.training import global_vars
    from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    global_vars.set_args(args)
    set_parallel_state(create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
