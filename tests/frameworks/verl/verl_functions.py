"""verl: ``agg_loss`` in every mode, and its policy losses under this package's weights.

The engine calls a policy loss per microbatch, multiplies by M because Megatron divides by it, and
averages over data-parallel ranks: a step's loss is the sum over microbatches, over DP.

Some of verl's policy losses fix their mode, whatever ``loss_agg_mode`` says (sapo; at 1dda039b
gspo too). What is wanted of a loss is therefore verl's own per-token losses under the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from drawn_step import Microbatch, Step, aliases
from function_checks import Check, Comparison
from torch import Tensor

from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences

DIVISOR = 8.0
"""``loss_scale_factor`` of the drawn step."""
ALIASES = aliases("verl", divisor=DIVISOR)
_CORE = "verl.trainer.ppo.core_algos"
_CLIP, _DUAL_CLIP = 0.2, 3.0


def checks() -> list[Check]:
    """List the checks; imports verl and registers this package's losses with it."""
    import verl.workers.config  # noqa: F401  what a check imports is missing before the first one
    from verl.trainer.ppo import core_algos

    from megatron_lossagg.integrations import verl as integration

    names: Any = integration.plugin  # registers with verl, as its own loader does
    listed = [
        Check(f"verl:{mode}", f"{_CORE}.agg_loss", partial(_agg_loss, mode)) for mode in ALIASES
    ]
    registry = core_algos.POLICY_LOSS_REGISTRY
    of_verl = {of_alias.mode for of_alias in ALIASES.values()}
    for name in names:  # verl's default loss in every mode, its others in verl's modes
        read: Any = integration.LossMode.named(name)
        if not read.count_zero:  # drawn sequences have no weights
            continue
        if read.loss == "vanilla" or (read.mode in of_verl and read.count_empty):
            function = f"{_CORE}.{registry[read.loss].__name__}"
            listed.append(Check(name, function, partial(_policy_loss, read)))
    return listed


def actor_config(step: Step, **changes: Any) -> Any:
    """Make verl's ``ActorConfig`` with the step's counts, and with what its loss ``dro`` asks."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    given = {"policy_loss": PolicyLossConfig(dro_beta=0.1), "clip_ratio": _CLIP, **changes}
    config = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **given)
    config.global_batch_info.update(
        dp_size=step.dp_size,
        batch_num_tokens=sum(step.lengths),
        global_batch_size=len(step.lengths),
        loss_scale_factor=DIVISOR,
    )
    return config


def _agg_loss(mode: str) -> Comparison:
    from verl.trainer.ppo.core_algos import agg_loss

    step = Step()
    counts = actor_config(step).global_batch_info
    losses = [agg_loss(mb.log_probs, mb.mask, mode, **counts) for mb in step.microbatches]
    got = torch.stack(losses).sum() / step.dp_size
    return step.compared(got, ALIASES[mode], step.leaves)


def _policy_loss(mode: Any) -> Comparison:
    """Compare one registered loss: of verl's default the per-token losses are PPO's."""
    step = Step()
    config, aggregation = actor_config(step), mode.aggregation(DIVISOR)
    got = run_loss(step, mode.name, config)
    losses = step.ppo_losses(clip=_CLIP, dual_clip=_DUAL_CLIP)
    if mode.loss != "vanilla":
        with asked() as given:
            run_loss(step, mode.loss, config)
        losses = [loss_mat for loss_mat, _ in given]
    return step.compared(got, aggregation, losses)


@contextmanager
def asked() -> Iterator[list[tuple[Tensor, str]]]:
    """Yield what verl's policy losses ask of ``agg_loss``: per-token losses, and a mode."""
    from verl.trainer.ppo import core_algos

    own = core_algos.agg_loss
    given: list[tuple[Tensor, str]] = []

    def agg_loss(*args: Any, **kwargs: Any) -> Tensor:
        call = signature(own).bind(*args, **kwargs)
        given.append((call.arguments["loss_mat"], call.arguments["loss_agg_mode"]))
        loss: Tensor = own(*args, **kwargs)
        return loss

    core_algos.agg_loss = agg_loss
    try:
        yield given
    finally:
        core_algos.agg_loss = own


def run_loss(step: Step, name: str, config: Any, mode: str = "token-mean") -> Tensor:
    """Sum a policy loss over the step as verl's Megatron engine does, and this package's."""
    from megatron_lossagg.integrations.verl import SEQUENCE, LossMode, with_plan

    torch.manual_seed(3)  # clip_cov and kl_cov draw tokens
    calls = [partial(run_microbatch, mb, name, config, mode) for mb in step.microbatches]
    read = LossMode.named(name)
    if read is None:
        losses = [call()[0] for call in calls]
    else:
        sequences = Sequences(active_tokens=step.lengths, prompt=step.prompts, group=step.groups)
        options = Options(rejects_tokens=True)
        plan = plan_step(read.aggregation(DIVISOR), sequences, options=options)
        losses = []
        for mb, call in zip(step.microbatches, calls, strict=True):
            data = {SEQUENCE: torch.tensor(mb.sequences)}
            losses.append(with_plan(call, plan, step.dp_size, data=data)[0])
        plan.check()
    return torch.stack(losses).sum() / step.dp_size


def run_microbatch(
    mb: Microbatch, name: str, config: Any, mode: str = "token-mean", **_: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Call a policy loss of verl's registry; returns its loss and metrics."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    result: tuple[Tensor, dict[str, Any]] = get_policy_loss_fn(name)(
        old_log_prob=mb.old_log_probs,
        log_prob=mb.log_probs,
        advantages=mb.advantages,
        response_mask=mb.mask,
        loss_agg_mode=mode,
        config=config,
    )
    return result
