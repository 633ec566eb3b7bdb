"""Distillation (GKD) of ms-swift on Megatron: ``install(aggregation)`` in an external plugin.

Its ``loss_func`` sums one divergence per trained token, and returns that sum. It runs as it is,
once per microbatch; the terms of the sum are kept while it runs, and they are the losses. Their sum
must be what ``loss_func`` returned. Gradients are compared too, except with ``sft_alpha``, because
Megatron's cross entropy allows one backward pass only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_lossagg.integrations.ms_swift import IGNORED, SwiftIntegration, bound_to, installed
from megatron_lossagg.loop.schedule_hook import FrameworkLoss, ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation, Options


class GKDIntegration(SwiftIntegration):
    """``MegatronGKDTrainer`` (``megatron rlhf --rlhf_type gkd``), padding-free or padded.

    A sequence is a conversation, on-policy or of the data set. Its active tokens are those whose
    label is not -100. A token's loss is ms-swift's divergence of teacher and student, plus
    ``sft_alpha`` times its negative log-likelihood. ms-swift ignores a ``loss_scale`` here. A
    teacher that gives no probabilities for a trained token raises when the step ends.
    """

    gives_token_weights = False
    trainer_at = ("swift.megatron.trainers.gkd_trainer", "MegatronGKDTrainer")
    commands = "megatron rlhf --rlhf_type gkd"
    log_reduces_loss = False

    def check(self, trainer: Any, call: Mapping[str, Any]) -> None:
        """Raise for a different layout."""
        self.check_layout(trainer, call)

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Run ``partial(trainer.loss_func, labels=...)``, and take what it sums."""
        labels = bound_to(loss_func, "labels")
        with _Sums() as sums:
            returned = loss_func(output)
        mask = labels != IGNORED
        found = torch.cat([output.flatten(0, 1)[:0].sum(-1), *sums.of_lines])
        num_trained = mask.sum().float()
        # A shorter list is an error that every rank raises when the step ends.
        filled = torch.cat([found, found.new_zeros(mask.numel() - len(found))])
        losses = filled.new_zeros(mask.shape).masked_scatter(mask, filled)
        of_sft = [one for one in sums.of_tables if one.shape == mask.shape]
        for one in of_sft:
            losses = losses + self.trainer.sft_alpha * one
        counts = [num_trained, torch.full_like(num_trained, len(found))]
        terms = torch.where(mask, losses.detach(), 0)
        theirs = returned[0].detach().clone()  # under a shadow Megatron divides it in place
        return FrameworkLoss(
            losses=losses.reshape(-1),
            mask=mask.reshape(-1),
            returned=returned,
            masked_sum=None if of_sft else returned[0],
            to_check=([*counts, theirs, terms.sum(), terms.abs().sum()], _describe),
        )


class _Sums(TorchFunctionMode):
    """Keeps what is summed to a scalar by ``Tensor.sum()``: ``[n]`` and ``[b, s]``."""

    def __init__(self) -> None:
        super().__init__()
        self.of_lines: list[Tensor] = []
        self.of_tables: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and keep what it sums."""
        if func is torch.Tensor.sum and len(args) == 1 and not kwargs:
            (summed,) = args
            if summed.is_floating_point() and summed.dim() in (1, 2):
                (self.of_lines if summed.dim() == 1 else self.of_tables).append(summed)
        return func(*args, **(kwargs or {}))


def _describe(values: list[float]) -> str:
    num_trained, num_found, theirs, ours, scale = values
    if num_trained == num_found:
        if not math.isfinite(theirs + scale) or abs(theirs - ours) <= 1e-4 * scale:
            return ""  # a loss that is not finite is found elsewhere
        return (
            f"ms-swift's GKD loss gave {theirs:.6g}, and what it sums per token gives {ours:.6g}: "
            "it has terms or factors that 4.6.0 has not, and they would be lost; use that release, "
            "or train without megatron_lossagg"
        )
    return (
        f"ms-swift's GKD loss summed {num_found:g} tokens, and the labels train {num_trained:g}: "
        "the teacher gave no log-probabilities for the others, which would still count; let the "
        "teacher's server take whole conversations"
    )


def install(
    aggregation: Aggregation | str | None, *, options: Options | None = None
) -> ScheduleHook:
    """Rebind ms-swift's schedule in this process; return the hook, which counts its steps.

    As :func:`megatron_lossagg.integrations.ms_swift.install`.
    """
    return installed(aggregation, GKDIntegration(), options)
