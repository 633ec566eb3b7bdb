"""NeMo-RL: its own ``ClippedPGLossFn``, and the same under this package's weights.

NeMo-RL divides by the step's counts in the loss function: what it returns for each microbatch adds
up to the step's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.check import Check, Comparison, compare
from megatron_lossagg.verify.frameworks.step import Microbatch, Step, aggregations

__all__ = ["CLIP", "DUAL_CLIP", "checks", "compared", "losses_of"]

_FUNCTION = "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn"
_MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "token_sum")
CLIP, DUAL_CLIP = 0.2, 3.0


def checks(_: Aggregation) -> list[Check]:
    """List the checks; imports NeMo-RL's loss functions."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    def make(token_level: bool) -> Any:
        config = ClippedPGLossConfig(
            ratio_clip_min=CLIP,
            ratio_clip_max=CLIP,
            ratio_clip_c=DUAL_CLIP,
            reference_policy_kl_penalty=0.0,
            token_level_loss=token_level,
        )
        return ClippedPGLossFn(config)

    runs = {}
    for token_level in (True, False):
        level = f"token_level_loss={token_level}"
        made = partial(make, token_level)
        runs[f"nemo-rl:{level}"] = partial(compared, made, Aggregation(f"nemo-rl:{level}"))
        for aggregation in aggregations().values():
            if aggregation.mode in _MODES and aggregation.count_empty:
                wrapped = partial(compared, made, aggregation, is_wrapped=True)
                runs[f"aggregated({level}), {aggregation.mode}"] = wrapped
    return [Check(name=name, function=_FUNCTION, compare=run) for name, run in runs.items()]


def compared(
    make: Callable[[], Any], aggregation: Aggregation, *, is_wrapped: bool = False
) -> Comparison:
    """Compare a loss function's step, in our integration or by itself, with the reference."""
    from megatron_lossagg.integrations.nemo_rl import aggregated

    loss_function = aggregated(make(), aggregation) if is_wrapped else make()
    step = Step()
    partial_losses = [loss for loss, _ in losses_of(loss_function, step)]
    wanted = step.wanted(aggregation, step.ppo_losses(clip=CLIP, dual_clip=DUAL_CLIP))
    return compare(torch.stack(partial_losses).sum(), wanted, step.leaves)


def losses_of(
    loss_function: Any, step: Step, *, num_excluded: int = 0
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return loss and metrics of each microbatch, with the step's counts as NeMo-RL takes them.

    ``num_excluded``: the step's last sequences, of one microbatch, have ``sample_mask`` 0.
    """
    batches = [_data(mb) for mb in step.microbatches]
    if num_excluded:
        batches[-1]["sample_mask"][-num_excluded:] = 0
    tokens = [(one["token_mask"] * one["sample_mask"][:, None]).sum() for one in batches]
    counts = {
        "global_valid_seqs": torch.stack([one["sample_mask"].sum() for one in batches]).sum(),
        "global_valid_toks": torch.stack(tokens).sum(),
    }
    return [
        loss_function(mb.log_probs, data=data, **counts)
        for mb, data in zip(step.microbatches, batches, strict=True)
    ]


def _data(mb: Microbatch) -> dict[str, Tensor]:
    """Return a microbatch's fields as NeMo-RL has them: whose first token has no loss."""
    other = (2 * mb.old_log_probs + mb.log_probs.detach()) / 3
    fields = {
        "advantages": mb.advantages,
        "prev_logprobs": mb.old_log_probs,
        "generation_logprobs": other,
        "reference_policy_logprobs": other,
        "token_mask": mb.mask.double(),
    }
    data = {name: pad(field, (1, 0)) for name, field in fields.items()}
    return {**data, "sample_mask": torch.ones(len(mb.sequences), dtype=torch.float64)}
