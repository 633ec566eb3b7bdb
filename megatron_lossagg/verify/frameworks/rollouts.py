"""What slime and miles share: one process with Megatron's groups, and the step as rollouts.

Both frameworks compute log-probabilities of packed sequences from logits, reduce the policy loss by
their own
function, and multiply by what Megatron's average loss scaling divides by. With one rank a step's
loss is
the sum over microbatches of what the loss function returns, over M.

Shape suffixes: b = sequences of a microbatch, s = its responses' length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.frameworks.step import Check, Comparison, Step, compare, ppo_losses

__all__ = ["CONSTANT", "Rollouts", "carried_checks", "flags", "join_alone", "parsed"]

CONSTANT = Aggregation("constant", divisor=40.0)
"""What ``constant_40`` names."""
CLIP = 0.2
_LENGTHS = (((5, 0, 3), (3, 0, 4), (6, 6, 0), (0, 0, 5)),)
_SAMPLES = (0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9)
"""Rollout of each sequence: 3 and 5 were split into two sequences, 5 over two microbatches."""
_VOCABULARY, _PROMPT_LENGTH = 16, 2
_FLOAT32 = 1e-5
"""Both frameworks ask for float32 logits."""


class Rollouts:
    """The drawn step with logits, for loss functions that read a packed microbatch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        step = Step(_LENGTHS, samples=_SAMPLES, dtype=torch.float32)
        self.step, self.logits, self.tokens = step, list[Tensor](), list[Tensor]()
        for index, mb in enumerate(step.microbatches):
            b, s = mb.mask.shape
            shape = (b, _PROMPT_LENGTH + s)
            logits = torch.randn(1, b * shape[1], _VOCABULARY, generator=generator).requires_grad_()
            tokens = torch.randint(_VOCABULARY, shape, generator=generator)
            log_p = torch.log_softmax(logits.double().reshape(*shape, _VOCABULARY), -1)
            at, labels = slice(_PROMPT_LENGTH - 1, -1), tokens[:, _PROMPT_LENGTH:, None]
            log_probs = log_p[:, at].gather(-1, labels)[..., 0]
            noise = 0.3 * torch.randn(b, s, generator=generator)
            old = log_probs.detach().float() + noise
            step.microbatches[index] = replace(mb, log_probs=log_probs, old_log_probs=old)
            self.logits.append(logits)
            self.tokens.append(tokens)

    @property
    def num_rollouts(self) -> int:
        """G."""
        return len(set(self.step.samples))

    def batch(self, index: int, denominators: Sequence[float] | Tensor) -> dict[str, Any]:
        """Return a microbatch as both frameworks' loss functions read it.

        ``denominators``: d_s of every sequence of the step.
        """
        mb, tokens = self.step.microbatches[index], self.tokens[index]
        sequences, s = len(tokens), mb.mask.shape[1]
        return {
            "unconcat_tokens": list(tokens),
            "total_lengths": [tokens.shape[1]] * sequences,
            "response_lengths": [s] * sequences,
            "loss_masks": list(mb.mask.int()),
            "advantages": list(mb.advantages),
            "log_probs": list(mb.old_log_probs),
            "rollout_mask_sums": torch.as_tensor(denominators, dtype=torch.float32)[
                mb.sequences.start : mb.sequences.stop
            ],
        }

    def counts(self) -> list[float]:
        """Return what both frameworks carry by default: active tokens of each sequence's
        rollout.
        """
        of_rollout = dict.fromkeys(self.step.samples, 0)
        for sample, length in zip(self.step.samples, self.step.lengths, strict=True):
            of_rollout[sample] += length
        return [float(of_rollout[sample]) for sample in self.step.samples]

    def compared(self, shares: Sequence[Tensor], aggregation: Aggregation) -> Comparison:
        """Compare what the framework's loss function returned per microbatch with the oracle."""
        losses = [ppo_losses(mb, clip=CLIP) for mb in self.step.microbatches]
        got = torch.stack(list(shares)).sum() / len(shares)
        return compare(got, self.step.wanted(aggregation, losses), self.logits)


def carried_checks(
    function: str,
    reducer: str,
    carried: Callable[[Aggregation], Comparison],
    reduced: Callable[[], Comparison],
) -> list[Check]:
    """List the checks of a framework: the weights carried in every mode, and the constant's
    reducer.

    ``function``: the framework's loss function. ``reducer``: the path that the framework is given.
    """
    listed = [
        Check(
            name=f"carry_weights, {name}",
            function=function,
            compare=partial(carried, aggregation),
            tolerance=_FLOAT32,
        )
        for name, aggregation in _aggregations().items()
    ]
    hub = Check(name=reducer, function=function, compare=reduced, tolerance=_FLOAT32)
    return [*listed, hub]


def _aggregations() -> dict[str, Aggregation]:
    """Name the aggregations whose denominators are at least 1 on the drawn step."""
    named = {}
    for case in CASES:
        aggregation = case.aggregation
        if case.second is not None or aggregation.mode == "microbatch_token_mean":
            continue
        if aggregation.mode == "token_sum":
            aggregation = replace(aggregation, divisor=50.0)
        named[str(case)] = aggregation
    return named


def flags(aggregation: Aggregation) -> dict[str, Any]:
    """Return a framework's arguments that ask for an aggregation."""
    return {
        "loss_aggregation": aggregation.mode,
        "loss_aggregation_divisor": aggregation.divisor,
        "loss_aggregation_count_empty": aggregation.count_empty,
    }


def parsed(provider: Any) -> argparse.Namespace:
    """Parse a framework's defaults by Megatron-LM's parser; ``provider`` adds the framework's
    options.

    What the checks set is the policy loss alone: no KL, no entropy, one clip.
    """
    from megatron.training.arguments import parse_args

    argv, sys.argv = sys.argv, ["train.py", "--rollout-batch-size", "4"]
    try:
        args: argparse.Namespace = parse_args(provider, ignore_unknown_args=True)
    finally:
        sys.argv = argv
    given = {
        "loss_type": "policy_loss",
        "eps_clip": CLIP,
        "eps_clip_high": CLIP,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "rollout_temperature": 1.0,
    }
    vars(args).update(given)
    return args


def join_alone() -> None:
    """Make this process the only rank, with Megatron's groups and the stand-ins for CUDA."""
    import torch.distributed as dist

    from megatron_lossagg.cpu.training import install_training

    install_training()
    from megatron.core import parallel_state

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
