"""What the checks of slime and miles share: one rank, parsed arguments, the list of checks.

Both compute log-probabilities of packed sequences from logits, reduce the policy loss by their own
function, and multiply by what Megatron's average loss scaling divides by. With one rank a step's
loss is the sum over microbatches of what the loss function returns, over M.
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._framework_options import spelled
from megatron_lossagg.integrations._rollout_mask_sums import REDUCER, Hooks
from megatron_lossagg.loop.flags import args_of
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.check import (
    Check,
    Comparison,
    FrameworkError,
    NotRunError,
)
from megatron_lossagg.verify.frameworks.drawn_step import Drawn, PackedStep, aggregations

_CONSTANT = Aggregation("constant", divisor=40.0)
_CLIP = 0.2
_FLOAT32 = 1e-5
"""Both frameworks ask for float32 logits."""


def join_alone() -> None:
    """Make this process the only rank, with Megatron's groups and the stand-ins for CUDA.

    Raises :class:`NotRunError` without the Megatron-LM that these frameworks need.
    """
    import torch.distributed as dist

    from megatron_lossagg.cpu.training import install_training

    try:
        install_training()
    except ContractError as error:
        raise NotRunError(str(error)) from error
    from megatron.core import parallel_state

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def arguments(hooks: Hooks) -> Namespace:
    """Return a framework's default arguments, with only the policy loss."""
    provider = f"get_{hooks.name}_extra_args_provider"
    return parsed(hooks, getattr(import_module(f"{hooks.name}.utils.arguments"), provider)(None))


def parsed(hooks: Hooks, provider: Any) -> Namespace:
    """Parse a framework's defaults by Megatron-LM's parser; ``provider`` adds its options.

    What the checks set is only the policy loss: no KL, no entropy, one clip. Raises
    :class:`FrameworkError` if the framework has no option that the integration uses.
    """
    from megatron.training.arguments import parse_args

    argv, sys.argv = sys.argv, ["train.py", "--rollout-batch-size", "4"]
    try:
        args: argparse.Namespace = parse_args(provider, ignore_unknown_args=True)
    finally:
        sys.argv = argv
    used = (hooks.carry_argument, REDUCER, "custom_megatron_init_path", "custom_config_path")
    lacking = [f"--{name.replace('_', '-')}" for name in used if not hasattr(args, name)]
    if lacking:
        raise FrameworkError(f"its arguments lack {', '.join(lacking)}")
    given = {
        "loss_type": "policy_loss",
        "eps_clip": _CLIP,
        "eps_clip_high": _CLIP,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "rollout_temperature": 1.0,
    }
    vars(args).update(given)
    return args


def make_samples(drawn: Sequence[Drawn], sample: Any) -> list[Any]:
    """Make a framework's sample of each drawn sequence; it numbers rollouts of one sequence."""
    of_rollout = Counter(one.sample for one in drawn)
    return [
        sample(
            group_index=one.prompt,
            index=100 + index,  # which miles takes for the id of an unsplit rollout
            rollout_id=one.sample if of_rollout[one.sample] > 1 else None,
            tokens=one.tokens.tolist(),
            response_length=len(one.mask),
            reward=0.0,
            loss_mask=one.mask,
            status=sample.Status.COMPLETED,
        )
        for index, one in enumerate(drawn)
    ]


def policy_loss_checks(
    hooks: Hooks,
    function: str,
    args: Namespace,
    *,
    mask_sums: Callable[[Namespace, PackedStep], Any],
    loss: Callable[[Namespace, PackedStep, int, dict[str, Any]], Tensor],
) -> list[Check]:
    """List the checks of a framework: the weights carried in every mode, and the reducer.

    ``function``: the framework's loss function. ``mask_sums``: runs the framework up to the
    ``rollout_mask_sums`` of the step. ``loss``: runs ``function`` on a microbatch.
    """

    def run(given: dict[str, Any], wanted: Aggregation) -> Comparison:
        made, step = Namespace(**{**vars(args), **given}), PackedStep()
        if made.custom_megatron_init_path:
            resolve_name(made.custom_megatron_init_path)(made)
        d_S = mask_sums(made, step)
        losses = [loss(made, step, n, step.batch(n, d_S)) for n in range(len(step.logits))]
        got = torch.stack(losses).sum() / len(losses)
        return step.compared(got, wanted, step.ppo_losses(clip=_CLIP))

    given: dict[str, tuple[dict[str, Any], Aggregation]] = {
        f"carry_weights, {name}": (args_with_weights(hooks, aggregation), aggregation)
        for name, aggregation in aggregations().items()
    }
    reducer = f"{hooks.module}.constant_40"
    given[reducer] = ({REDUCER: reducer}, _CONSTANT)
    return [
        Check(name, function, partial(run, *of_check), tolerance=_FLOAT32)
        for name, of_check in given.items()
    ]


def args_with_weights(hooks: Hooks, aggregation: Aggregation) -> dict[str, Any]:
    """Return a framework's arguments that ask for an aggregation and carry its weights."""
    of_hooks = {
        hooks.carry_argument: hooks.carry_path,
        "custom_megatron_init_path": hooks.check_path,
    }
    asked = {spelled(name, hooks.name): value for name, value in args_of(aggregation).items()}
    return {**asked, **of_hooks}
