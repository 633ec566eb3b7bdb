"""How Megatron-Core scales a loss on its way to the gradient: two loss scalings, K, its factors.

Pure arithmetic, and the only place for it: ``outputs`` multiplies by K, ``probe`` measures
K, ``explain`` prints the factors and ``verify`` names the wrong ones from here. For
``loss_func`` that returns ``(loss, num_tokens, report)``, megatron-core 0.13 to 0.19:

============  ==================  =================  =======================  =======
loss scaling  schedule            DDP                finalize                 K
============  ==================  =================  =======================  =======
average       / num_tokens, / M   mean over DP * CP  nothing                  M DP CP
per-token     nothing             sum                / sum of all num_tokens  N
============  ==================  =================  =======================  =======

A step makes one: M is the caller's, DP CP and the loss scaling are of ``model.py``, N of the
plan's totals. K is what a partial loss is multiplied by so that the step's gradient is the
sum of the partial losses' gradients. Sources: ``schedules.forward_step_calc_loss``,
``DistributedDataParallel.__init__``, ``finalize_model_grads``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

LossScaling = Literal["average", "per_token"]
LOSS_SCALINGS: tuple[LossScaling, LossScaling] = ("average", "per_token")

MOST_TOKENS_PER_TOKEN = 2**31 - 1
"""The largest N of a step in the per-token loss scaling: Megatron-Core sums num_tokens in int32."""


@dataclass(frozen=True)
class Factor:
    """One place between a partial loss and the gradient, and what it multiplies by."""

    where: str
    does: str
    factor: Fraction


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The factors of one schedule call."""

    loss_scaling: LossScaling
    num_microbatches: int
    """M of this schedule call."""
    dp_cp_size: int
    """DP * CP."""
    active_tokens: int | None = None
    """N of the step; needed in the per-token loss scaling."""
    is_deferred: bool = False
    """Whether it is a call of a deferred step, whose gradients are divided at its end."""

    @cached_property
    def k(self) -> int:
        """K: M DP CP in the average loss scaling, N in the per-token loss scaling.

        Where N is 0 Megatron divides by 1, so K is 1. In a call of a deferred step N is not known
        yet and K is 1: :func:`deferred_factor` has it.
        """
        if self.loss_scaling == "average":
            return self.m_dp_cp
        if self.is_deferred:
            return 1
        return int(self.active_tokens or 1)

    @property
    def m_dp_cp(self) -> int:
        """M DP CP, with this rank's own M."""
        return self.num_microbatches * self.dp_cp_size

    @cached_property
    def report_count(self) -> float:
        """1 / (M DP CP): a report ``[partial loss, 1 / (M DP CP)]`` comes out as the step's loss.

        Megatron adds both entries over microbatches and DP * CP ranks and divides; each rank's
        counts add up to 1 / (DP CP), whatever its M is. In an evaluation both entries are times D,
        the total of the step's mode, for Megatron adds them over evaluation steps too: what comes
        out is the mode's loss over all of them.
        """
        return 1 / self.m_dp_cp

    @property
    def schedule_factor(self) -> float:
        """What the schedule multiplies a returned loss by: 1 / M or 1."""
        return 1 / self.num_microbatches if self.loss_scaling == "average" else 1.0

    def num_tokens(self, counted: int, cp_rank: int) -> int:
        """Return the num_tokens that loss_func reports for a microbatch.

        ``counted``: active tokens of its sequences by the plan, complete over CP. The average
        loss scaling divides by it immediately, so it is 1. In the per-token loss scaling CP rank 0
        reports ``counted`` and the other CP ranks 0, so that the sum over the step is N.
        """
        if self.loss_scaling == "average":
            return 1
        return counted if cp_rank == 0 else 0

    def factors(self) -> tuple[Factor, ...]:
        """List what multiplies a partial loss on its way to the gradient; the product is 1.

        Not of a deferred step.
        """
        m, ranks, k = self.num_microbatches, self.dp_cp_size, Fraction(self.k)
        if self.loss_scaling == "average":
            mean = "mean over the DP CP ranks: their sum / (DP CP)"
            return (
                Factor("loss_func", "returns partial loss * K, K = M DP CP", k),
                Factor("schedule", "/ num_tokens, which is 1; / M", Fraction(1, m)),
                Factor("DDP", mean, Fraction(1, ranks)),
                Factor("finalize_model_grads", "nothing", Fraction(1)),
            )
        return (
            Factor("loss_func", "returns partial loss * K, K = N", k),
            Factor("schedule", "nothing", Fraction(1)),
            Factor("DDP", "sum over the DP CP ranks", Fraction(1)),
            Factor("finalize_model_grads", "/ sum of the step's num_tokens, which is N", 1 / k),
        )


def deferred_factor(loss_scaling: LossScaling, total: float, active_tokens: int) -> float:
    """Return what multiplies the reduced gradients of a deferred step: 1 / total, or N / total.

    In the per-token loss scaling finalize has divided by N, the ``active_tokens`` of all calls, or
    by 1 where N is 0.
    """
    return (1 if loss_scaling == "average" else max(active_tokens, 1)) / total


K_FORMULA: dict[LossScaling, str] = {"average": "M DP CP", "per_token": "N"}


def ddp_factor(loss_scaling: LossScaling, dp_cp_size: int, *, average_in_collective: bool) -> float:
    """Return the ``gradient_scaling_factor`` that DDP freezes in a dense buffer when it is built.

    1 / (DP CP) in the average loss scaling, unless the collective itself averages; else 1. A dense
    parameter only: experts' buffers have a factor of their own in the average loss scaling.
    """
    if loss_scaling == "per_token" or average_in_collective:
        return 1.0
    return 1.0 / dp_cp_size
