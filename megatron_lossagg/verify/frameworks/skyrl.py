"""SkyRL: its reductions of advantages, and its trainer under this package's weights.

SkyRL's policy losses sum over tokens, and advantages carry the weights; the sum over the
microbatches of a mini-batch is the step's loss.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.aggregation import ALIASES, Aggregation
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.frameworks.step import Check, Comparison, Microbatch, Step, compare

__all__ = [
    "DIVISOR",
    "alias",
    "batch",
    "checks",
    "prompt_boundaries",
    "reduced",
    "reductions",
    "trainer",
]

DIVISOR = 9.0
"""``max_seq_len`` of the drawn step."""
_UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
_REDUCTION = "apply_loss_reduction_to_advantages_minibatch"
_TRAINER = "skyrl.train.trainer.RayPPOTrainer"


def checks() -> list[Check]:
    """List the checks; imports SkyRL's trainer."""
    if sys.version_info < (3, 12):  # its pydantic models ask for this one there
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.trainer import RayPPOTrainer

    listed = [
        Check(
            name=f"skyrl:{name}",
            function=f"{_UTILS}.{_REDUCTION}",
            compare=partial(_reduced, ppo_utils, name),
        )
        for name in reductions()
    ]
    for aggregation in _aggregations():
        empty = "" if aggregation.count_empty else ", count_empty=False"
        listed.append(
            Check(
                name=f"aggregated(RayPPOTrainer), {aggregation.mode}{empty}",
                function=f"{_TRAINER}._normalize_advantages",
                compare=partial(_trained, ppo_utils, RayPPOTrainer, aggregation),
            )
        )
    return listed


def reductions() -> list[str]:
    """Return SkyRL's names of its reductions, as the aliases have them."""
    return [name.removeprefix("skyrl:") for name in ALIASES if name.startswith("skyrl:")]


def alias(name: str) -> Aggregation:
    """Return the aggregation of a reduction of SkyRL, with the drawn step's divisor."""
    return Aggregation(f"skyrl:{name}", divisor=DIVISOR if name.endswith("norm") else None)


def _aggregations() -> Iterator[Aggregation]:
    for case in CASES:
        if case.second is None and case.aggregation.mode != "microbatch_token_mean":
            yield case.aggregation


def prompt_boundaries(prompts: Sequence[int]) -> list[tuple[int, int]]:
    """Write contiguous prompts as SkyRL's pairs of first sequence and end."""
    bounds, start = [], 0
    for _, sequences in groupby(prompts):
        end = start + len(list(sequences))
        bounds.append((start, end))
        start = end
    return bounds


def whole(step: Step, field: str) -> Tensor:
    """Stack a field of all microbatches to the mini-batch that the trainer has, ``[B, s]``."""
    width = max(mb.mask.shape[1] for mb in step.microbatches)
    fields = [getattr(mb, field) for mb in step.microbatches]
    return torch.cat([pad(one, (0, width - one.shape[1])) for one in fields])


def _reduced(utils: Any, name: str) -> Comparison:
    step = Step()
    got = reduced(step, utils, name)
    return compare(got, step.wanted(alias(name), step.leaves), step.leaves)


def reduced(step: Step, utils: Any, name: str) -> Tensor:
    """Reduce log-probabilities as per-token losses: SkyRL scales advantages that are 1."""
    mask = whole(step, "mask").double()
    scale = getattr(utils, _REDUCTION)(
        advantages=torch.ones_like(mask),
        loss_mask=mask,
        loss_reduction=name,
        micro_batch_size=len(step.microbatches[0].sequences),
        max_seq_len=DIVISOR,
        prompt_boundaries=prompt_boundaries(step.prompts),
    )
    loss: Tensor = utils.reduce_loss(whole(step, "log_probs") * scale, mask)
    return loss


def _trained(utils: Any, base: Any, aggregation: Aggregation) -> Comparison:
    """Compare r A w_s, reduced by microbatch, with the oracle's loss of r A."""
    from megatron_lossagg.integrations.skyrl import aggregated

    step = Step()
    made = trainer(aggregated(base, aggregation), "token_mean")
    boundaries = [(0, len(step.lengths))]
    out = made._normalize_advantages(batch(step), boundaries, prompt_boundaries(step.prompts))
    shares = []
    for mb in step.microbatches:
        sequences = slice(mb.sequences.start, mb.sequences.stop)
        advantages = out["advantages"][sequences, : mb.mask.shape[1]]
        shares.append(utils.reduce_loss(_ratio(mb) * advantages, mb.mask.double()))
    losses = [_ratio(mb) * mb.advantages for mb in step.microbatches]
    return compare(torch.stack(shares).sum(), step.wanted(aggregation, losses), step.leaves)


def _ratio(mb: Microbatch) -> Tensor:
    return (mb.log_probs - mb.old_log_probs).exp()


def batch(step: Step) -> Any:
    """Make SkyRL's training batch of the step, padded to a multiple of 8 sequences."""
    from skyrl.backends.skyrl_train.training_batch import (
        TrainingInputBatch,
        pad_training_input_batch,
    )

    mask = whole(step, "mask").double()
    sequences = len(mask)
    made = TrainingInputBatch(
        {
            "sequences": torch.zeros(sequences, 20, dtype=torch.long),
            "advantages": whole(step, "advantages"),
            "loss_mask": mask,
            "response_mask": mask.clone(),
        }
    )
    made.metadata = {"uids": [f"p{prompt}" for prompt in step.prompts]}
    return pad_training_input_batch(made, -sequences % 8)


def trainer(cls: Any, reduction: str, *, normalize: bool = False) -> Any:
    """Make a trainer with no more than ``_normalize_advantages`` reads."""
    algorithm = SimpleNamespace(
        advantage_batch_normalize=normalize,
        loss_reduction=reduction,
        max_seq_len=DIVISOR,
        policy_loss_type="regular",
    )
    made = object.__new__(cls)
    settings = SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=3)
    made.cfg = SimpleNamespace(trainer=settings)
    return made
