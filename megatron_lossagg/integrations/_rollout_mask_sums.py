"""Weights carried to slime and miles as ``rollout_mask_sums``, one denominator per sequence.

Both frameworks reduce the policy loss, entropy, KL and every metric of a microbatch alike, on
each context-parallel rank, and multiply by what Megatron's average loss scaling divides by::

    (sum_s sum_t m_t x_t / max(d_s, 1)) * M * DP CP / G

G is the step's number of rollouts. d_s (``rollout_mask_sums``) is a field of the data that
travels with its sequence, by default n_b, the active tokens of the sequence's rollout. So ::

    d_s = 1 / (w_s G)

trains sum_s w_s sum_t m_t x_t, whatever the mode, the layout and the microbatches. The framework
does not raise a d_s below 1 if it is one of ``_denominators.py``. In the per-token loss scaling the
framework ignores d_s: refused. Sources: slime 624b824a and miles 31f1ca96, ``loss_function`` and
``get_sum_of_sample_mean``.

Shape suffix: S = sequences of the framework's lists.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations._framework_options import requested, spelled
from megatron_lossagg.loop.first_step import say_counted
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.reduction.aggregation import Aggregation, require_mask_count
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.reduction.options import EmptyStep, Options
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Sequences

_Floats = npt.NDArray[np.float64]

REDUCER = "custom_pg_loss_reducer_function_path"
_FLOAT32_ROUNDING = 1e-6
_LEAVE_OUT = "loss_aggregation_count_empty: false"
"""What takes the samples of ``Sample.remove_sample`` out of the counts, which the mask hides."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Where a framework takes our functions, and how its users write arguments."""

    name: str
    module: str
    """Of our entry points for it."""
    carry_argument: str
    """The argument that names ``carry_weights``."""
    about_flags: str
    """What the framework does with a flag that it does not know."""

    @property
    def carry_path(self) -> str:
        """Path of our function, as the framework's loader reads it."""
        return f"{self.module}.carry_weights"

    @property
    def check_path(self) -> str:
        """Path of our function for ``custom_megatron_init_path``."""
        return f"{self.module}.check"

    @property
    def weigh_path(self) -> str:
        """Path of our function for the same argument that checks, and weighs the first step."""
        return f"megatron_lossagg.integrations.weigh_rollouts.{self.name}"


@dataclass(frozen=True, kw_only=True)
class FrameworkStep:
    """One optimizer step: its sequences by place in the framework's lists, and its rollouts."""

    sequences: Sequence[int]
    rollouts: int
    """G."""
    microbatch: Sequence[int] | None = None
    """Index of each sequence's microbatch on this rank."""
    num_microbatches: int | None = None
    """M."""


def checked_aggregation(args: Any, hooks: Hooks) -> Aggregation | None:
    """Read the framework's arguments and refuse those that would silently train a different loss.

    Returns the aggregation, None if no argument asks for one. Raises :class:`ContractError` or
    :class:`AggregationError`. No collective, no host sync.
    """
    ours = requested(args, hooks.name)
    Options.from_args(ours)  # an invalid value fails here, at startup
    aggregation = aggregation_from_args(ours)
    reducer, loss_type = getattr(args, REDUCER, None), getattr(args, "loss_type", None)
    if aggregation is not None:
        _check_carried(args, aggregation, hooks)
    if is_ours(reducer):
        resolve_name(str(reducer))  # an invalid divisor fails here, at startup
        if loss_type not in (None, "policy_loss"):
            raise ContractError(
                f"got {REDUCER} {reducer} with --loss-type {loss_type}, expected policy_loss: "
                f"{hooks.name} calls the reducer for no other loss, which would keep "
                f"{hooks.name}'s mean. Carry the weights instead: set loss_aggregation and "
                f"{hooks.carry_argument} {hooks.carry_path}, and drop {REDUCER}"
            )
    is_per_token = getattr(args, "calculate_per_token_loss", False)
    if is_per_token and (aggregation is not None or is_ours(reducer)):
        raise ContractError(
            f"got --calculate-per-token-loss, expected the average loss scaling: with it "
            f"{hooks.name} ignores every denominator and divides by all tokens. Drop that flag"
        )
    return aggregation


def carried_aggregation(args: Any, hooks: Hooks) -> Aggregation:
    """Return the aggregation whose weights are carried now; raises if no argument asks for one."""
    aggregation = checked_aggregation(args, hooks)
    if aggregation is None:
        raise AggregationError(
            f"got {hooks.carry_argument} and no loss_aggregation, expected the mode to carry: "
            f"set {spelled('loss_aggregation', hooks.name)} in the file of --custom-config-path. "
            f"{hooks.about_flags}"
        )
    return aggregation


def _check_carried(args: Any, aggregation: Aggregation, hooks: Hooks) -> None:
    """Refuse what the carried weights would not reach."""
    require_mask_count(aggregation, hooks.name)
    reducer = getattr(args, REDUCER, None)
    if reducer is not None:
        raise ContractError(
            f"got {REDUCER} {reducer} alongside loss_aggregation ({aggregation}), expected one of "
            f"them: the reducer would replace the carried weights in the policy loss. Drop one"
        )
    if aggregation.mode == CUSTOM:
        raise AggregationError(
            f"got loss_aggregation_reducer_path {aggregation.reducer_path}, expected a mode: one "
            "denominator per sequence is carried, and a custom reducer knows none. Set "
            "loss_aggregation"
        )
    if aggregation.mode == "balanced":
        raise AggregationError(
            f"got loss_aggregation balanced, which needs group ids, and {hooks.name} has none: "
            "choose another mode"
        )
    if getattr(args, "loss_type", None) == "custom_loss":
        warn_once(
            "custom_loss",
            f"--loss-type custom_loss trains the configured loss only in what it sums with the "
            f"sum_of_sample_mean that {hooks.name} passes it",
        )


def rollout_mask_sums(
    aggregation: Aggregation,
    steps: Sequence[FrameworkStep],
    *,
    active_tokens: Sequence[int],
    sample: Sequence[int],
    prompt: Sequence[int] | None = None,
    samples_per_prompt: int | None = None,
    dropped: Sequence[int] = (),
    group: ProcessGroup | None = None,
    empty_step: EmptyStep = "zero",
    remedy: str | None = None,
    fault: str = "",
) -> _Floats:
    """Compute d_s of each sequence of a rollout batch, float64 ``[S]``; NaN outside of all steps.

    ``active_tokens``, ``sample`` and ``prompt`` have one entry per sequence. ``dropped``: sequences
    that the framework leaves out. ``samples_per_prompt``: as of :class:`Sequences`, in
    each step. Every rank of ``group`` calls, with the same number of steps, and
    all of them or none with ``dropped``: per step the collectives of :func:`plan_step`, once more
    if prompts are given with several steps or with ``dropped``. ``remedy``: how the framework is
    told not to raise a d_s below 1, if it does; None if it does not. ``fault``: why this rank has
    no counts. Raises :class:`PlanError`, on all ranks; for a d_s below 1 on this one, so that only
    a process without a group passes a ``remedy``.
    """
    d_S = np.full(len(active_tokens), np.nan)

    def plan_of(step: FrameworkStep, check: int | None) -> StepPlan:
        return plan_step(
            aggregation,
            Sequences(
                active_tokens=[active_tokens[sequence] for sequence in step.sequences],
                sample=[sample[sequence] for sequence in step.sequences],
                prompt=None if prompt is None else [prompt[s] for s in step.sequences],
                microbatch=step.microbatch,
                num_microbatches=step.num_microbatches,
                samples_per_prompt=check,
            ),
            group=group,
            options=Options(empty_step=empty_step),
            fault=fault,
        )

    num_prompts = 0
    for step in steps:
        plan = say_counted(plan_of(step, samples_per_prompt), leave_out=_LEAVE_OUT)
        d_S[list(step.sequences)] = _of_plan(plan, step.rollouts, remedy)
        num_prompts += plan.totals.prompts or 0
    if prompt is not None and (len(steps) > 1 or dropped):
        sequences = [sequence for step in steps for sequence in step.sequences]
        whole = plan_of(FrameworkStep(sequences=sequences, rollouts=1), None).totals.prompts or 0
        in_steps, left_out = ({prompt[s] for s in places} for places in (sequences, dropped))
        _check_prompts(whole, len(steps), num_prompts - whole + len(in_steps & left_out))
    return d_S


def _check_prompts(num_prompts: int, num_steps: int, num_cut: int) -> None:
    """Raise :class:`PlanError` if prompts are cut by the end of a step, or by what is dropped."""
    if num_cut:
        raise PlanError(
            f"got {num_prompts} prompts in {num_steps} steps, {num_cut} of which continue in "
            "another step or are dropped in part, expected each prompt within one step: make "
            "--global-batch-size a multiple of --n-samples-per-prompt"
        )


def _of_plan(plan: StepPlan, rollouts: int, remedy: str | None) -> _Floats:
    """Turn weights into d_s = 1 / (w_s G), float64 ``[S]``; 1 for a sequence of no active tokens.

    inf for a weight of 0. Raises :class:`PlanError` for a d_s that the framework would raise to 1.
    """
    weight_S = plan.weights.numpy()
    above = np.flatnonzero(weight_S * rollouts > 1 + _FLOAT32_ROUNDING)
    if len(above) and remedy is not None:
        sequence = above[0]
        raise PlanError(
            f"{plan.aggregation} gives sequence {sequence} of this step, with "
            f"{plan.active_tokens[sequence]} active tokens, a weight of "
            f"{weight_S[sequence]:.6g}, expected at most 1/G = 1/{rollouts} (G: rollouts of the "
            "step): the framework raises a denominator below 1 to 1, and the weight would be "
            f"{weight_S[sequence] * rollouts:.4g} times too small. {remedy}"
        )
    d_S = np.where(plan.active_tokens > 0, np.inf, 1.0)
    np.divide(1.0, weight_S * rollouts, out=d_S, where=weight_S > 0)
    return d_S


@cache
def log_carried(hooks: Hooks, aggregation: Aggregation) -> None:
    """Log on rank 0 that weights were carried; ``cache`` keeps it to once per process."""
    _log(
        f"megatron_lossagg trains {aggregation}, carried to {hooks.name} as rollout_mask_sums = "
        "1 / (w_s G): for the policy loss, entropy, KL and the logged metrics alike"
    )


def log_set_up(
    args: Any,
    hooks: Hooks,
    aggregation: Aggregation | None,
    not_covered: Sequence[tuple[str, str]],
) -> None:
    """Log on rank 0 what the arguments ask for: nothing is carried yet.

    ``not_covered``: arguments whose loss keeps the framework's own scale, each with that loss; a
    warning for each that is set.
    """
    reducer = getattr(args, REDUCER, None)
    if not is_ours(reducer) and aggregation is None:
        return
    for name, loss in not_covered:
        if getattr(args, name, False):
            text = f"megatron_lossagg does not cover {loss} ({name}): it keeps "
            _log(f"{text}{hooks.name}'s own scale", logging.WARNING)
    if is_ours(reducer):
        mean = f"KL, entropy and the logged metrics keep {hooks.name}'s mean"
        _log(f"megatron_lossagg: the policy loss is to be divided by {reducer}; {mean}")
    else:
        _log(f"megatron_lossagg: {hooks.name} is to train {aggregation}")


def _log(message: str, level: int = logging.INFO) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger(__name__).log(level, message)


def is_ours(value: object) -> bool:
    """Whether an argument is a path into this package."""
    return isinstance(value, str) and value.startswith("megatron_lossagg.")
