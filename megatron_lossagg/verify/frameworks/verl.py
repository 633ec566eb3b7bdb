"""verl: ``agg_loss`` in every mode, and its policy losses under this package's weights.

The engine calls a policy loss per microbatch, multiplies by M where Megatron divides by it, and
averages over data-parallel ranks: a step's loss is the sum over microbatches, over DP.

Some of verl's policy losses fix their mode, whatever ``loss_agg_mode`` says (sapo; at 1dda039b
gspo too). What is wanted of a loss in a mode is therefore verl's own per-token losses, under
verl's own ``agg_loss`` in that mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.aggregation import ALIASES, Aggregation
from megatron_lossagg.verify.frameworks.step import Check, Comparison, Step, compare, ppo_losses

__all__ = [
    "DIVISOR",
    "SELF_AVERAGED",
    "actor_config",
    "alias",
    "checks",
    "in_mode",
    "modes",
    "run_loss",
]

DIVISOR = 8.0
"""``loss_scale_factor`` of the drawn step."""
SELF_AVERAGED = ("geo_mean",)
"""Policy losses that do not go through ``agg_loss``."""
_CORE = "verl.trainer.ppo.core_algos"
_CLIP, _DUAL_CLIP = 0.2, 3.0


def checks() -> list[Check]:
    """List the checks; imports verl and registers this package's losses with it."""
    import verl.workers.config  # noqa: F401  what a check imports is missing before the first one
    from verl.trainer.ppo import core_algos

    from megatron_lossagg.integrations import verl as integration

    _ = integration.plugin  # registers with verl, as its own loader does
    listed = [
        Check(
            name=f"verl:{mode}",
            function=f"{_CORE}.agg_loss",
            compare=partial(_agg_loss, core_algos.agg_loss, mode),
        )
        for mode in modes()
    ]
    registry = core_algos.POLICY_LOSS_REGISTRY
    own = [name for name in registry if name not in SELF_AVERAGED and "lossagg_" not in name]
    return listed + [_policy_loss(registry, mode, loss) for loss in own for mode in modes()]


def modes() -> list[str]:
    """Return verl's names of its modes, as the aliases have them."""
    return [name.removeprefix("verl:") for name in ALIASES if name.startswith("verl:")]


def alias(mode: str) -> Aggregation:
    """Return the aggregation of a mode of verl, with the drawn step's divisor."""
    return Aggregation(f"verl:{mode}", divisor=DIVISOR if mode.endswith("norm") else None)


def actor_config(step: Step, *, divisor: float | None = DIVISOR, **changes: Any) -> Any:
    """Make verl's ``ActorConfig`` with the step's counts, as its engines set them.

    With what its policy loss ``dro`` asks for.
    """
    from verl.workers.config import ActorConfig, PolicyLossConfig

    options = {"policy_loss": PolicyLossConfig(dro_beta=0.1), **changes}
    config = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options
    )
    config.global_batch_info.update(_counts(step, divisor))
    return config


def _counts(step: Step, divisor: float | None) -> dict[str, Any]:
    return {
        "dp_size": step.dp_size,
        "batch_num_tokens": sum(step.lengths),
        "global_batch_size": len(step.lengths),
        "loss_scale_factor": divisor,
    }


def _agg_loss(agg_loss: Any, mode: str) -> Comparison:
    step = Step()
    counts = _counts(step, DIVISOR)
    shares = [agg_loss(mb.log_probs, mb.mask, mode, **counts) for mb in step.microbatches]
    got = torch.stack(shares).sum() / step.dp_size
    return compare(got, step.wanted(alias(mode), step.leaves), step.leaves)


def _policy_loss(registry: Any, mode: str, loss: str) -> Check:
    """Check one registered loss: vanilla against the oracle, others as :func:`in_mode`."""
    from megatron_lossagg.integrations.verl import LossMode

    name = LossMode(alias(mode).mode, True, loss).name
    function = f"{_CORE}.{registry[loss].__name__}"
    return Check(name=name, function=function, compare=partial(_registered, name, mode, loss))


def _registered(name: str, mode: str, loss: str) -> Comparison:
    step = Step()
    config = actor_config(
        step,
        divisor=DIVISOR if mode.endswith("norm") else None,  # token_sum takes one, verl's does not
        clip_ratio=_CLIP,
    )
    got = run_loss(step, name, config, "token-mean")
    if loss == "vanilla":
        losses = [ppo_losses(mb, clip=_CLIP, dual_clip=_DUAL_CLIP) for mb in step.microbatches]
        wanted = step.wanted(alias(mode), losses)
    else:
        with in_mode(mode):
            wanted = run_loss(step, loss, config, mode)
    return compare(got, wanted, step.leaves)


@contextmanager
def in_mode(mode: str) -> Iterator[list[str]]:
    """Let verl's ``agg_loss`` aggregate in one mode; yields the modes that it was asked for."""
    from verl.trainer.ppo import core_algos

    own, asked = core_algos.agg_loss, []

    def agg_loss(*args: Any, **kwargs: Any) -> Tensor:
        call = signature(own).bind(*args, **kwargs)
        asked.append(call.arguments["loss_agg_mode"])
        call.arguments["loss_agg_mode"] = mode
        share: Tensor = own(*call.args, **call.kwargs)
        return share

    core_algos.agg_loss = agg_loss
    try:
        yield asked
    finally:
        core_algos.agg_loss = own


def run_loss(step: Step, name: str, config: Any, mode: str) -> Tensor:
    """Sum a policy loss over the step as verl's Megatron engine does."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    torch.manual_seed(3)  # clip_cov and kl_cov draw tokens
    losses = []
    for mb in step.microbatches:
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=mb.old_log_probs,
            log_prob=mb.log_probs,
            advantages=mb.advantages,
            response_mask=mb.mask,
            loss_agg_mode=mode,
            config=config,
        )
        losses.append(loss)
    return torch.stack(losses).sum() / step.dp_size
