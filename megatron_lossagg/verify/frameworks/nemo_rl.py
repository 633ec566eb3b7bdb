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

__all__ = ["checks"]

_FUNCTION = "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn"
_MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "token_sum")
_CLIP, _DUAL_CLIP = 0.2, 3.0


def checks() -> list[Check]:
    """List the checks; imports NeMo-RL's loss functions."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from megatron_lossagg.integrations.nemo_rl import aggregated

    listed = []
    for token_level in (True, False):
        level = f"token_level_loss={token_level}"

        def make(token_level: bool = token_level) -> Any:
            config = ClippedPGLossConfig(
                ratio_clip_min=_CLIP,
                ratio_clip_max=_CLIP,
                ratio_clip_c=_DUAL_CLIP,
                reference_policy_kl_penalty=0.0,
                token_level_loss=token_level,
            )
            return ClippedPGLossFn(config)

        own = Aggregation(f"nemo-rl:{level}")
        runs = {f"nemo-rl:{level}": partial(_compared, make, own)}
        for aggregation in aggregations().values():
            if aggregation.mode in _MODES and aggregation.count_empty:
                wrapped = partial(_compared, make, aggregation, aggregated)
                runs[f"aggregated({level}), {aggregation.mode}"] = wrapped
        listed += [Check(name=name, function=_FUNCTION, compare=run) for name, run in runs.items()]
    return listed


def _compared(
    make: Callable[[], Any],
    aggregation: Aggregation,
    wrap: Callable[[Any, Aggregation], Any] = lambda loss_function, _: loss_function,
) -> Comparison:
    step, loss_function = Step(), wrap(make(), aggregation)
    counts = {
        "global_valid_seqs": torch.tensor(float(len(step.lengths)), dtype=torch.float64),
        "global_valid_toks": torch.tensor(float(sum(step.lengths)), dtype=torch.float64),
    }
    partial_losses = [
        loss_function(mb.log_probs, data=_data(mb), **counts)[0] for mb in step.microbatches
    ]
    wanted = step.wanted(aggregation, step.ppo_losses(clip=_CLIP, dual_clip=_DUAL_CLIP))
    return compare(torch.stack(partial_losses).sum(), wanted, step.leaves)


def _data(mb: Microbatch) -> dict[str, Tensor]:
    """Return a microbatch's fields as NeMo-RL has them: whose first token has no loss."""
    fields = {
        "advantages": mb.advantages,
        "prev_logprobs": mb.old_log_probs,
        "generation_logprobs": mb.old_log_probs,
        "reference_policy_logprobs": mb.old_log_probs,
        "token_mask": mb.mask.double(),
    }
    data = {name: pad(field, (1, 0)) for name, field in fields.items()}
    return {**data, "sample_mask": torch.ones(len(mb.sequences), dtype=torch.float64)}
