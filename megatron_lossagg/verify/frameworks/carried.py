"""What the checks of slime and miles share: one rank, parsed arguments, the list of checks.

Both compute log-probabilities of packed sequences from logits, reduce the policy loss by their own
function, and multiply by what Megatron's average loss scaling divides by. With one rank a step's
loss is the sum over microbatches of what the loss function returns, over M.
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.check import Check, Comparison, FrameworkError, compare
from megatron_lossagg.verify.frameworks.step import PackedStep, aggregations

__all__ = ["carried_checks", "join_alone", "parsed"]

_CONSTANT = Aggregation("constant", divisor=40.0)
_CLIP = 0.2
_FLOAT32 = 1e-5
"""Both frameworks ask for float32 logits."""
_INTEGRATIONS = "megatron_lossagg.integrations"
_REDUCER = "custom_pg_loss_reducer_function_path"


def join_alone() -> None:
    """Make this process the only rank, with Megatron's groups and the stand-ins for CUDA."""
    import torch.distributed as dist

    from megatron_lossagg.cpu.training import install_training

    install_training()
    from megatron.core import parallel_state

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def parsed(provider: Any, *, carry_argument: str) -> Namespace:
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
    used = (carry_argument, _REDUCER, "custom_megatron_init_path", "custom_config_path")
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


def carried_checks(
    framework: str,
    function: str,
    args: Namespace,
    *,
    carry_argument: str,
    mask_sums: Callable[[Namespace, PackedStep], Any],
    loss: Callable[[Namespace, PackedStep, int, dict[str, Any]], Tensor],
) -> list[Check]:
    """List the checks of a framework: the weights carried in every mode, and the reducer.

    ``function``: the framework's loss function. ``mask_sums``: runs the framework up to the
    ``rollout_mask_sums`` of the step. ``loss``: runs ``function`` on a microbatch.
    """

    def run(given: dict[str, Any], wanted: Aggregation) -> Comparison:
        made, step = Namespace(**{**vars(args), **given}), PackedStep()
        d_S = mask_sums(made, step)
        losses = [loss(made, step, n, step.batch(n, d_S)) for n in range(len(step.logits))]
        got = torch.stack(losses).sum() / len(losses)
        return compare(got, step.wanted(wanted, step.ppo_losses(clip=_CLIP)), step.logits)

    given: dict[str, tuple[dict[str, Any], Aggregation]] = {}
    for name, aggregation in aggregations().items():
        if aggregation.mode == "token_sum":  # its denominators would be below 1
            aggregation = replace(aggregation, divisor=50.0)
        given[f"carry_weights, {name}"] = (
            _carried(framework, carry_argument, aggregation),
            aggregation,
        )
    reducer = f"{_INTEGRATIONS}.{framework}.constant_40"
    given[reducer] = ({_REDUCER: reducer}, _CONSTANT)
    return [
        Check(name=name, function=function, compare=partial(run, *of_check), tolerance=_FLOAT32)
        for name, of_check in given.items()
    ]


def _carried(framework: str, carry_argument: str, aggregation: Aggregation) -> dict[str, Any]:
    """Return a framework's arguments that ask for an aggregation and carry its weights."""
    return {
        "loss_aggregation": aggregation.mode,
        "loss_aggregation_divisor": aggregation.divisor,
        "loss_aggregation_count_empty": aggregation.count_empty,
        carry_argument: f"{_INTEGRATIONS}.{framework}.carry_weights",
    }
