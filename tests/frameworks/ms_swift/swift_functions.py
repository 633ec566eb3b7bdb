"""The loss of ms-swift's Megatron trainer for GRPO by itself, in a process group of one.

Run as it is, its names are aliases: Megatron averages what it returns over microbatches and
data-parallel ranks. Taken apart by the integration, whose counts weigh the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from drawn_step import Microbatch, Step, aliases
from function_checks import Check, Comparison
from one_rank import one_rank
from torch import Tensor

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences

_GRPO = "swift.megatron.trainers.grpo_trainer.MegatronGRPOTrainer"
_LENGTH, _TAU, _CLIP = 11, 1.05, 0.2

ALIASED = aliases("ms-swift", divisor=_LENGTH)
"""The aggregation of each ``loss_type``."""


def checks() -> list[Check]:
    """List a check of each ``loss_type``, as it is and taken apart."""
    function, listed = f"{_GRPO}.loss_func", []
    for loss_type in ALIASED:
        run = partial(taken_apart, Aggregation("sample_mean"), loss_type)
        listed.append(Check(f"grpo, {loss_type}", function, run))
        listed.append(Check(f"ms-swift:{loss_type}", function, partial(_grpo, loss_type)))
    return listed


def _counted(given: Iterable[Sequences], *, prompts: Sequence[int] | None = None) -> Sequences:
    """Put together what an integration has counted in each microbatch."""
    counts = [n for one in given for n in torch.as_tensor(one.active_tokens).tolist()]
    return Sequences(active_tokens=counts, prompt=prompts)


def taken_apart(
    aggregation: Aggregation,
    loss_type: str,
    *,
    changed: Callable[..., Any] | None = None,
    cp_size: int = 1,
) -> Comparison:
    """Weigh what the integration takes out of the trainer's loss for GRPO, over the step.

    ``changed``: wraps ``loss_func``, as a release with a different loss would. ``cp_size``:
    context-parallel ranks, one after the other.
    """
    from megatron_lossagg.integrations.ms_swift_grpo import GRPOIntegration

    integration, step = GRPOIntegration(), Step()
    integration.prepare([aggregation])
    total: Any = 0
    with one_rank(dp_size=step.dp_size):
        trainers = [_trainer(step, mb, loss_type) for mb in step.microbatches]
        data = [{"grpo_batch": _batch(step, mb)} for mb in step.microbatches]
        for trainer in trainers:
            trainer.args.context_parallel_size = cp_size
        for mb, one in zip(step.microbatches, data, strict=True):
            one["grpo_batch"].lossagg_prompt = [step.prompts[n] for n in mb.sequences]
        integration.applies({"forward_step_func": trainers[0].forward_step})
        given = [integration.sequences(one) for one in data]
        plan = plan_step(aggregation, _counted(given, prompts=step.prompts))
        for n, mb in enumerate(step.microbatches):
            integration.applies({"forward_step_func": trainers[n].forward_step})
            loss_func = trainers[n].loss_func
            loss_func = partial(changed(loss_func) if changed else loss_func, data=data[n])
            for rank in range(cp_size):
                found = integration.loss(loss_func, mb.log_probs)
                assert found.to_check is not None
                plan.state.faults.record(*found.to_check)
                sizes = SimpleNamespace(cp_size=cp_size, cp_rank=rank)
                lengths = np.asarray(given[n].lengths).tolist()
                layout = integration.layout(cast(Any, sizes), lengths)
                total = total + plan.reducer(list(mb.sequences), found.mask, layout)(found.losses)
        plan.check()
        return step.compared(total, aggregation, grpo_losses(step, loss_type))


def _grpo(loss_type: str) -> Comparison:
    step = Step()
    losses = grpo_losses(step, loss_type)
    return step.compared(grpo_loss(step, loss_type), ALIASED[loss_type], losses)


def grpo_loss(step: Step, loss_type: str) -> Tensor:
    """Return the mean of the trainer's losses over ranks and microbatches.

    It is what Megatron trains in the average loss scaling.
    """
    with one_rank(dp_size=step.dp_size):
        losses = [_microbatch_loss(step, mb, loss_type) for mb in step.microbatches]
    return torch.stack(losses).sum() / (step.num_microbatches * step.dp_size)


def grpo_losses(step: Step, loss_type: str) -> list[Tensor]:
    """Compute the per-token losses of :func:`grpo_loss`, each ``[b, s]``.

    The ratio is x against old log-probabilities of 0, unclipped; the advantage is -1.
    """
    ratios = [mb.log_probs.exp() for mb in step.microbatches]
    if loss_type == "cispo":
        return [x.detach() * mb.log_probs for x, mb in zip(ratios, step.microbatches, strict=True)]
    if loss_type == "fipo":  # without a future, a token's influence is its own ratio, clipped
        return [x.detach().clamp(1 - _CLIP, 1 + _CLIP) * x for x in ratios]
    if loss_type == "sapo":
        return [torch.sigmoid(_TAU * (x - 1)) * 4 / _TAU for x in ratios]
    return ratios


def _microbatch_loss(step: Step, mb: Microbatch, loss_type: str) -> Tensor:
    trainer = _trainer(step, mb, loss_type)
    loss: Tensor
    loss, _ = trainer.loss_func(mb.log_probs, {"grpo_batch": _batch(step, mb)})
    return loss


def _trainer(step: Step, mb: Microbatch, loss_type: str) -> Any:
    """Make the trainer of a microbatch's loss, without a model and an engine."""
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    trainer: Any = object.__new__(MegatronGRPOTrainer)
    vars(trainer).update(
        micro_batch_size=len(mb.sequences),
        args=SimpleNamespace(
            report_to=[],
            overlong_filter=False,
            delta=None,
            num_microbatches=step.num_microbatches,
            context_parallel_size=1,
        ),
        disable_rollout_importance_sampling=True,
        beta=0.0,
        kl_in_reward=False,
        importance_sampling_level="token",
        _has_teacher=False,
        loss_type=loss_type,
        off_policy_sequence_mask_delta=None,
        epsilon_low=1e9,
        epsilon_high=1e9,
        tau_pos=1.0,
        tau_neg=_TAU,
        compute_entropy=False,
        max_completion_length=_LENGTH,
        unwrapped_models=[SimpleNamespace(training=True)],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _all_reduce_metric=lambda metric: metric,
        fipo_gamma=0.0,
        fipo_clip_range=_CLIP,
        fipo_clip_high_only=False,
        fipo_safety_threshold=None,
        _step=1,
        steps_per_generation=1,
        _flush_log_completions=lambda: None,
    )
    return trainer


def _batch(step: Step, mb: Microbatch) -> Any:
    """Make what the trainer's loss reads of a microbatch."""
    from swift.rl_core.data import GRPOBatch

    return GRPOBatch(
        completion_mask=mb.mask,
        truncated_mask=torch.zeros(len(mb.sequences), dtype=torch.bool),
        seq_lengths=torch.full((len(mb.sequences),), mb.mask.shape[1]),
        advantages=-torch.ones_like(mb.log_probs),
        old_per_token_logps=torch.zeros_like(mb.log_probs),
        num_items_in_batch=torch.tensor(float(sum(step.lengths))),
    )
