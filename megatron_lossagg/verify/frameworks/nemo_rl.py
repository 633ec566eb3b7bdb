"""NeMo-RL: its ``ClippedPGLossFn`` by itself, and under this package's weights.

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
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.frameworks.step import (
    Check,
    Comparison,
    Microbatch,
    Step,
    compare,
    ppo_losses,
)

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
        make = partial(
            _loss_function, ClippedPGLossFn, ClippedPGLossConfig, token_level_loss=token_level
        )
        own = Aggregation(f"nemo-rl:{level}")
        run = partial(_compared, make, own)
        listed.append(Check(name=f"nemo-rl:{level}", function=_FUNCTION, compare=run))
        for aggregation in _aggregations():
            run = partial(_compared, make, aggregation, aggregated)
            name = f"aggregated({level}), {aggregation.mode}"
            listed.append(Check(name=name, function=_FUNCTION, compare=run))
    return listed


def _aggregations() -> list[Aggregation]:
    """List the modes that an unmodified NeMo-RL can train."""
    terms = [case.aggregation for case in CASES if case.second is None]
    return [term for term in terms if term.mode in _MODES and term.count_empty]


def _loss_function(loss: Any, config: Any, **options: Any) -> Any:
    return loss(
        config(
            ratio_clip_min=_CLIP,
            ratio_clip_max=_CLIP,
            ratio_clip_c=_DUAL_CLIP,
            reference_policy_kl_penalty=0.0,
            **options,
        )
    )


def _compared(
    make: Callable[[], Any],
    aggregation: Aggregation,
    wrap: Callable[[Any, Aggregation], Any] | None = None,
) -> Comparison:
    step, loss_function = Step(), make()
    if wrap is not None:
        loss_function = wrap(loss_function, aggregation)
    counts = {
        "global_valid_seqs": torch.tensor(float(len(step.lengths)), dtype=torch.float64),
        "global_valid_toks": torch.tensor(float(sum(step.lengths)), dtype=torch.float64),
    }
    shares = [loss_function(mb.log_probs, data=_data(mb), **counts)[0] for mb in step.microbatches]
    losses = [ppo_losses(mb, clip=_CLIP, dual_clip=_DUAL_CLIP) for mb in step.microbatches]
    return compare(torch.stack(shares).sum(), step.wanted(aggregation, losses), step.leaves)


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
