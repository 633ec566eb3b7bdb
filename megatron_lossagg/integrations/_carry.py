"""Weights carried to slime and miles as one denominator per sequence.

Both frameworks reduce the policy loss, entropy, KL and every metric of a microbatch alike, on
each context-parallel rank, and multiply by what Megatron's average loss scaling divides by::

    (sum_s sum_t m_t x_t / max(d_s, 1)) * M * DP CP / G

G is the step's number of rollouts. d_s (``rollout_mask_sums``) is a field of the data that
travels with its sequence, by default n_b, the active tokens of the sequence's rollout. So ::

    d_s = 1 / (w_s G)

trains sum_s w_s sum_t m_t x_t, whatever the mode, the layout and the microbatches. A d_s
below 1 would be raised to 1 by the framework: it is refused, on all ranks. In the per-token loss
scaling
the framework ignores d_s: refused as well. Sources: slime 624b824a and miles 31f1ca96,
``loss_function`` and ``get_sum_of_sample_mean``.

Shape suffix: S = sequences of the framework's lists.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import CUSTOM, Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.options import EmptyStep, Options
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.sequences import Ids, Sequences

__all__ = [
    "REDUCER",
    "Framework",
    "FrameworkStep",
    "carried",
    "check_set_up",
    "denominators",
    "is_ours",
    "log_carried",
    "log_set_up",
]

_Floats = npt.NDArray[np.float64]

_OURS = "megatron_lossagg."
REDUCER = "custom_pg_loss_reducer_function_path"
_INIT = "custom_megatron_init_path"
_REDUCERS = "constant_<L>"
_FLOAT32_ROUNDING = 1e-6

_REMEDIES = {
    "constant": "give a divisor (loss_aggregation_divisor) of at least 1",
    "token_sum": "give a divisor (loss_aggregation_divisor) of at least G",
    "prompt_mean": "drop prompts with fewer active tokens than rollouts, or choose token_mean or "
    "sample_mean",
}


@dataclass(frozen=True, kw_only=True)
class Framework:
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
    def hooks(self) -> dict[str, str]:
        """What each argument that takes a function of ours may name."""
        return {
            self.carry_argument: self.carry_path,
            _INIT: f"{self.module}.check",
            REDUCER: f"{self.module}.{_REDUCERS}",
        }


@dataclass(frozen=True, kw_only=True)
class FrameworkStep:
    """One optimizer step: its sequences of the framework's lists, and the rollouts it is divided
    by.
    """

    sequences: Sequence[int]
    rollouts: int
    """G."""
    microbatch: Sequence[int] | None = None
    """Index of each sequence's microbatch on this rank."""
    num_microbatches: int | None = None
    """M."""


def check_set_up(
    args: Any, framework: Framework, *, is_carried: bool | None = None
) -> Aggregation | None:
    """Read the framework's arguments and refuse those that would train another loss.

    ``is_carried``: whether ``carry_weights`` runs; None: what the arguments say. Returns the
    aggregation, None where no argument asks for one. Raises :class:`ContractError` for hooks
    that contradict each other or are not called, and :class:`AggregationError` for arguments
    that are misspelled, contradict each other or would be ignored. No collective, no host sync.
    """
    _check_names(args, framework)
    aggregation = aggregation_from_args(args)
    carry = getattr(args, framework.carry_argument, None)
    reducer = getattr(args, REDUCER, None)
    if is_carried is None:
        is_carried = carry == framework.carry_path
    if is_carried:
        if aggregation is None:
            raise AggregationError(
                f"got {framework.carry_argument} and no loss_aggregation, expected the mode "
                f"to carry: "
                f"set loss_aggregation in the file of --custom-config-path. {framework.about_flags}"
            )
        if reducer is not None:
            raise ContractError(
                f"got {REDUCER} {reducer} beside {framework.carry_argument}, expected one "
                f"of them: the "
                "reducer would replace the carried weights for the policy loss alone. Drop "
                f"{REDUCER}"
            )
        _check_carried(args, aggregation)
    is_from_args = is_ours(reducer) and str(reducer).endswith(".constant_from_args")
    if aggregation is not None and not is_carried and not carry and not is_from_args:
        raise ContractError(
            f"got loss_aggregation ({aggregation}) and nothing that reads it: set "
            f"{framework.carry_argument} to {framework.carry_path}, or drop loss_aggregation"
        )
    if is_ours(reducer):
        _check_reducer(args, framework, str(reducer))
    if (is_carried or is_ours(reducer)) and getattr(args, "calculate_per_token_loss", False):
        raise ContractError(
            f"got --calculate-per-token-loss, expected the average loss scaling: with it "
            f"{framework.name} "
            "ignores every denominator and divides by all tokens. Drop that flag"
        )
    return aggregation


def _check_reducer(args: Any, framework: Framework, reducer: str) -> None:
    """Refuse a reducer that the framework cannot load, or calls for no loss of this run."""
    module, _, name = reducer.rpartition(".")
    getattr(importlib.import_module(module), name)  # an invalid name fails here, at startup
    if not name.startswith("constant_"):
        raise ContractError(
            f"got {REDUCER} {reducer}, expected {framework.hooks[REDUCER]}: {name} is not a reducer"
        )
    loss_type = getattr(args, "loss_type", None) or "policy_loss"
    if loss_type != "policy_loss":
        raise ContractError(
            f"got {REDUCER} {reducer} with --loss-type {loss_type}, expected policy_loss: "
            f"{framework.name} calls the reducer in its policy loss alone, and this loss "
            f"would keep "
            f"{framework.name}'s mean. Carry the weights instead: set loss_aggregation and "
            f"{framework.carry_argument} {framework.carry_path}, and drop {REDUCER}"
        )


def carried(plan: StepPlan, rollouts: int) -> _Floats:
    """Turn weights into the framework's denominators: d_s = 1 / (w_s G), float64 ``[S]``.

    A sequence with no active tokens has 1: it adds nothing. Raises :class:`PlanError` on this rank
    alone where d_s is below 1, which the framework would raise to 1.
    """
    weight_S = plan.weights.numpy()
    above = np.flatnonzero(weight_S * rollouts > 1 + _FLOAT32_ROUNDING)
    if len(above):
        sequence = above[0]
        raise PlanError(
            f"{plan.aggregation} gives sequence {sequence} of this step, with "
            f"{plan.active_tokens[sequence]} "
            f"active tokens, a weight of {weight_S[sequence]:.6g}, expected at most 1/G = "
            f"1/{rollouts} "
            "(G: rollouts of the step): the framework raises a denominator below 1 to 1 "
            "and would train "
            f"the sequence with a weight {weight_S[sequence] * rollouts:.4g} times too small. "
            f"{_remedy(plan.aggregation)}"
        )
    denominator_S = np.ones(len(weight_S))
    np.divide(1.0, weight_S * rollouts, out=denominator_S, where=weight_S > 0)
    return denominator_S


def denominators(
    aggregation: Aggregation,
    steps: Sequence[FrameworkStep],
    *,
    active_tokens: Sequence[int],
    sample: Sequence[int],
    prompt: Sequence[int] | Sequence[str] | None = None,
    samples_per_prompt: int | None = None,
    dropped: Sequence[int] = (),
    group: ProcessGroup | None = None,
    empty_step: EmptyStep = "zero",
    fault: str = "",
) -> _Floats:
    """Compute d_s of every sequence of a rollout batch, float64 ``[S]``; NaN for a sequence of no
    step.

    ``active_tokens``, ``sample`` and ``prompt`` have one entry per sequence. ``dropped``: sequences
    that
    the framework leaves out. Every rank of ``group`` calls, with the same number of steps: per step
    the collectives of :func:`plan_step`, once more where prompts are given and there are
    several steps, and one all-gather for a d_s below 1 in the last step. ``fault``: why this
    rank has no counts. Raises :class:`PlanError`, on all ranks.
    """
    denominator_S = np.full(len(active_tokens), np.nan)

    def plan_of(step: FrameworkStep, check: int | None) -> StepPlan:
        return plan_step(
            aggregation,
            Sequences(
                active_tokens=[active_tokens[sequence] for sequence in step.sequences],
                sample=[sample[sequence] for sequence in step.sequences],
                prompt=_at(prompt, step.sequences),
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
        plan = plan_of(step, samples_per_prompt)  # raises the fault of the step before as well
        try:
            denominator_S[list(step.sequences)] = carried(plan, step.rollouts)
        except PlanError as error:  # of this rank's sequences: the others may have none
            fault = str(error)
        num_prompts += plan.totals.prompts or 0
    _raise_together(fault, Exchange(group))
    if prompt is not None and (len(steps) > 1 or dropped):
        sequences = [sequence for step in steps for sequence in step.sequences]
        whole = plan_of(FrameworkStep(sequences=sequences, rollouts=1), None).totals.prompts or 0
        halved = {prompt[sequence] for sequence in dropped} & {
            prompt[sequence] for sequence in sequences
        }
        if num_prompts != whole or halved:
            raise PlanError(
                f"got {whole} prompts in {len(steps)} steps, {num_prompts - whole + len(halved)} "
                "of which continue in another step or are dropped in part, expected each prompt "
                "within one step: make --global-batch-size a multiple of --n-samples-per-prompt"
            )
    return denominator_S


def _raise_together(fault: str, exchange: Exchange) -> None:
    """Raise the first rank's fault on every rank; one all-gather."""
    for rank, text in enumerate(exchange.messages(fault)):
        if text:
            raise PlanError(f"{exchange.name(rank)}: {text}")


@cache
def log_carried(framework: Framework, aggregation: Aggregation) -> None:
    """Log on rank 0 that weights were carried; ``cache`` keeps it to once per process."""
    _log(
        "megatron_lossagg trains %s, carried to %s as rollout_mask_sums = 1 / (w_s G): for the "
        "policy loss, entropy, KL and the logged metrics alike",
        aggregation,
        framework.name,
    )


def log_set_up(args: Any, framework: Framework, aggregation: Aggregation | None) -> None:
    """Log on rank 0 what the arguments ask for: nothing is carried yet."""
    carry, reducer = getattr(args, framework.carry_argument, None), getattr(args, REDUCER, None)
    if is_ours(reducer):
        _log(
            "megatron_lossagg: %s is to divide its policy loss by the constant of %s; KL, entropy "
            "and the logged metrics keep %s's mean",
            framework.name,
            reducer,
            framework.name,
        )
    elif aggregation is not None:
        _log(
            "megatron_lossagg: %s is to train %s by %s %s; the line 'megatron_lossagg trains' "
            "follows when the weights of the first batch are carried",
            framework.name,
            aggregation,
            framework.carry_argument,
            carry,
        )


def _log(message: str, *values: object) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger(__name__).info(message, *values)


def _check_carried(args: Any, aggregation: Aggregation) -> None:
    if aggregation.mode == CUSTOM:
        raise AggregationError(
            f"got loss_aggregation_reducer_path {aggregation.reducer_path}, expected a mode: one "
            "denominator per sequence is carried, and a custom reducer knows none. Set "
            "loss_aggregation"
        )
    if getattr(args, "loss_aggregation_probe", None) is not None:
        raise AggregationError(
            f"got loss_aggregation_probe {args.loss_aggregation_probe}, expected none: the "
            f"framework "
            "compensates for Megatron itself and nothing is measured. Drop it"
        )
    if not aggregation.count_empty:
        return
    divisor, rollouts = aggregation.divisor or 1.0, getattr(args, "global_batch_size", None) or 1
    least = {"constant": 1, "token_sum": rollouts}.get(aggregation.mode, 0)
    if divisor < least:
        raise AggregationError(
            f"got {aggregation} with a divisor of {divisor:g}, expected at least {least}: "
            f"the framework "
            f"raises a denominator below 1 to 1. {_remedy(aggregation)}"
        )


def _remedy(aggregation: Aggregation) -> str:
    remedy = _REMEDIES.get(aggregation.mode, "choose another mode, or train more tokens per step")
    return remedy[0].upper() + remedy[1:]


def _check_names(args: Any, framework: Framework) -> None:
    """Refuse what a file of arguments may hold without any effect."""
    for name, value in vars(args).items():
        plain = name.replace("-", "_").lower()
        near = difflib.get_close_matches(plain, _flags(), n=1, cutoff=0.8)
        if name not in _flags() and (near or plain.startswith(("lossagg", "loss_agg"))):
            raise AggregationError(
                f"got {name}: {value!r}, which nothing reads, expected one of "
                f"{', '.join(_flags())}: write {(near or ['loss_aggregation'])[0]}"
            )
        if not is_ours(value):
            continue
        if ":" in value:
            raise ContractError(
                f"got {name} {value}, expected dots only: {framework.name} splits a path at "
                f"its last "
                f"dot. Write {value.replace(':', '.')}"
            )
        if name not in framework.hooks:
            raise ContractError(
                f"got {name} {value}, which {framework.name} does not call, expected one of "
                f"{', '.join(framework.hooks)}: correct the name"
            )
        if name != REDUCER and value != framework.hooks[name]:
            raise ContractError(
                f"got {name} {value}, expected {framework.hooks[name]}: correct the path"
            )


def is_ours(value: object) -> bool:
    """Whether an argument is a path into this package."""
    return isinstance(value, str) and value.startswith(_OURS)


def _at(ids: Sequence[int] | Sequence[str] | None, sequences: Sequence[int]) -> Ids | None:
    return None if ids is None else [ids[sequence] for sequence in sequences]  # type: ignore[return-value]


@cache
def _flags() -> tuple[str, ...]:
    parser = add_loss_aggregation_args(argparse.ArgumentParser())
    return tuple(vars(parser.parse_args([])))
