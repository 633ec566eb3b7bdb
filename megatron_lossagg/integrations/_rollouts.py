"""What slime and miles share: their options, and weights carried to them as ``rollout_mask_sums``.

**Options** among the framework's arguments, whose file takes any name, are named as the flags are:
``loss_aggregation``, ``loss_aggregation_divisor``, ...

**Weights.** Both frameworks reduce the policy loss, entropy, KL and every metric of a microbatch
alike, on each context-parallel rank, and multiply by what Megatron's average loss scaling divides
by::

    (sum_s sum_t m_t x_t / max(d_s, 1)) * M * DP CP / G

G is the step's number of rollouts. d_s (``rollout_mask_sums``) is a field of the data that
travels with its sequence, by default n_b, the active tokens of the sequence's rollout. So ::

    d_s = 1 / (w_s G)

trains sum_s w_s sum_t m_t x_t, whatever the mode, the layout and the microbatches. In the per-token
loss scaling the framework ignores d_s: refused.

**Denominators below 1.** Both divide by ``torch.clamp_min(d_s, 1)``, for rollouts without an active
token. d_s is below 1 if a sequence weighs more than 1/G, such as the one token of a short response.
:class:`Denominators` are raised to 1 only if they are 0. A subclass, because both clamp inside of a
closure, between a sum and its division, where no option and no function of theirs can be replaced.

**The policy loss alone**, divided by a constant: the function at
``--custom-pg-loss-reducer-function-path`` is called once per microbatch, and what it returns once
with this context-parallel rank's policy losses of the response tokens. Afterwards the framework
multiplies by M and DP CP and divides by G::

    partial loss = (sum over this rank's tokens t of m_t x_t) / L

Sources: slime 624b824a and miles 31f1ca96 ``loss_function``, ``get_sum_of_sample_mean``,
``policy_loss_function``. Shape suffix: S = sequences of the framework's lists.
"""

from __future__ import annotations

import argparse
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import count
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import AggregationError, ContractError, LayoutError, PlanError
from megatron_lossagg.loop.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.loop.step import say_counted
from megatron_lossagg.reduction.aggregation import (
    Aggregation,
    EmptyStep,
    Options,
    require_mask_count,
)
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.step_state import StepState
from megatron_lossagg.reduction.table import StepTotals
from megatron_lossagg.reduction.weighted import warn_of_divisor

_WITHOUT_EFFECT = (
    "loss_aggregation_record",
    "loss_aggregation_shadow",
    "loss_aggregation_probe",
    "loss_aggregation_side_losses",
    "loss_aggregation_guards",
)
"""Options of a step of this package, which these frameworks do not have."""
_LIKE_OURS = ("loss_ag", "lossag")
"""How what may be meant for us begins."""


def _check_names(args: Any) -> None:
    """Refuse an option that nothing reads: the file of --custom-config-path takes any name."""
    flags = vars(add_loss_aggregation_args(argparse.ArgumentParser()).parse_args([]))
    read = [flag for flag in flags if flag not in _WITHOUT_EFFECT]
    for name, value in vars(args).items():
        is_like_ours = name.replace("-", "_").lower().startswith(_LIKE_OURS)
        is_unset = name in _WITHOUT_EFFECT and value is None
        if is_like_ours and name not in read and not is_unset:
            raise AggregationError(
                f"got {name}: {value!r}, which nothing reads, expected one of {', '.join(read)}: "
                "correct the name, or drop it"
            )


_CLAMPS = [
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("clamp_min", "clamp", "clip", "maximum")
]
_SUMS = "get_sum_of_sample_mean"
_made: set[Callable[..., Any]] = set()
"""What replaced it, here."""


class Denominators(Tensor):
    """d_s: of these, ``clamp_min(d_s, 1)`` and the like change only what is not above 0."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; a clamp returns a plain tensor. No host sync."""
        kwargs = kwargs or {}
        if func not in _CLAMPS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        given = next(one for one in args if isinstance(one, cls)).as_subclass(Tensor)
        plain = [one.as_subclass(Tensor) if isinstance(one, cls) else one for one in args]
        return torch.where(given > 0, given, func(*plain, **kwargs))


def keep_below_one(modules: Sequence[str]) -> None:
    """Have modules of a framework read their ``denominators`` as :class:`Denominators`.

    Raises :class:`ContractError` if a module has no such function. Once per process.
    """
    for name in modules:
        module = import_module(name)
        stock = getattr(module, _SUMS, None)
        if stock is None:
            raise ContractError(
                f"got {name} without {_SUMS}, expected the function that divides by "
                "rollout_mask_sums: use a release that the integration was written for"
            )
        if stock not in _made:
            kept = _kept(stock)
            _made.add(kept)
            setattr(module, _SUMS, kept)


def _kept(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_sum_of_sample_mean(
        *args: Any, denominators: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> Any:
        if denominators is not None:
            denominators = [one.as_subclass(Denominators) for one in denominators]
        return stock(*args, denominators=denominators, **kwargs)

    return get_sum_of_sample_mean


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
    not_covered: tuple[tuple[str, str], ...]
    """Its arguments whose loss keeps its own scale, each with that loss."""

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
    _check_names(args)
    Options.from_args(args)  # an invalid value fails here, at startup
    aggregation = aggregation_from_args(args)
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
            f"set loss_aggregation in the file of --custom-config-path; {hooks.name} reads no flag "
            "of ours on its command line"
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
    batch: Sequences,
    *,
    dropped: Sequence[int] = (),
    group: ProcessGroup | None = None,
    empty_step: EmptyStep = "zero",
    remedy: str | None = None,
    fault: str = "",
) -> _Floats:
    """Compute d_s of each sequence of a rollout batch, float64 ``[S]``; NaN outside of all steps.

    ``batch``: its lists; ``samples_per_prompt`` holds in each step. ``dropped``: sequences that the
    framework leaves out. Every rank of ``group`` calls, with the same number of steps, and
    all of them or none with ``dropped``: per step the collectives of :func:`plan_step`, once more
    if prompts are given with several steps or with ``dropped``. ``remedy``: how the framework is
    told not to raise a d_s below 1, if it does; None if it does not. ``fault``: why this rank has
    no counts. Raises :class:`PlanError`, on all ranks; for a d_s below 1 on this one, so that only
    a process without a group passes a ``remedy``.
    """
    columns: dict[str, Any] = batch.entries()
    d_S, prompt = np.full(len(columns["active_tokens"]), np.nan), columns.get("prompt")

    def plan_of(step: FrameworkStep, samples_per_prompt: int | None) -> StepPlan:
        of_step = batch.with_entries(
            {name: [values[s] for s in step.sequences] for name, values in columns.items()},
            microbatch=step.microbatch,
            num_microbatches=step.num_microbatches,
            samples_per_prompt=samples_per_prompt,
        )
        options = Options(empty_step=empty_step)
        return plan_step(aggregation, of_step, group=group, options=options, fault=fault)

    num_prompts = 0
    for step in steps:
        plan = say_counted(plan_of(step, batch.samples_per_prompt), leave_out=_LEAVE_OUT)
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


def log_set_up(args: Any, hooks: Hooks, aggregation: Aggregation | None) -> None:
    """Log on rank 0 what the arguments ask for, and warn of what is not covered."""
    reducer = getattr(args, REDUCER, None)
    if not is_ours(reducer) and aggregation is None:
        return
    for name, loss in hooks.not_covered:
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


MakeReducer = Callable[
    [Sequence[int], Sequence[int], Sequence[Tensor], bool], Callable[[Tensor], Tensor]
]

_NAME = re.compile(r"constant_([0-9]+(?:p[0-9]+)?(?:e[+-]?[0-9]+)?)")
_CALLS_BETWEEN_CHECKS = 64


def constant_reducer(name: str, module: str) -> MakeReducer:
    """Return the function that a framework knows as ``<module>.constant_<L>``.

    The same L gives the same function. Raises :class:`AttributeError` for any other name, as the
    ``__getattr__`` of a module must.
    """
    match = _NAME.fullmatch(name)
    if match:
        with suppress(AggregationError):  # 0, or too large for a float
            return _reducer_of(float(match[1].replace("p", ".")))
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}, expected carry_weights, check or "
        "constant_<L> with a finite divisor L above 0: write constant_40960 or constant_0p5"
    )


@cache
def _reducer_of(divisor: float) -> MakeReducer:
    aggregation = Aggregation("token_sum", divisor=divisor)
    # The framework does not say when a step ends, so one state takes all that devices find.
    state = StepState(rejects_tokens=True)  # counts here are lengths, of which masks select some
    calls = count(1)

    def get_pg_loss_reducer(
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor],
        calculate_per_token_loss: bool = False,
    ) -> Callable[[Tensor], Tensor]:
        """Slice the whole response masks for this rank; returns masked sum / L.

        ``loss_masks``: one 0/1 mask ``[response]`` per sequence, not sliced. No collective. At call
        2 and every 64 calls after it one host sync, to raise what a device has found.
        """
        if calculate_per_token_loss:
            raise ContractError(
                "got --calculate-per-token-loss with a constant divisor, expected the average loss "
                "scaling: the framework would divide by all tokens. Drop that flag"
            )
        cp_size, cp_rank = _context_parallel()
        if cp_size > 1:
            refuse_bshd(_megatron_args())
        lengths = [int(length) for length in response_lengths]
        layout = Layout.response_zigzag(
            total_lengths, response_lengths, cp_size=cp_size, cp_rank=cp_rank
        )
        mask = torch.cat(list(loss_masks)) if loss_masks else torch.zeros(0, dtype=torch.bool)
        warn_of_divisor(divisor, lengths)
        plan = plan_step(aggregation, Sequences(active_tokens=lengths), totals=StepTotals())
        plan = replace(plan, state=state)
        if next(calls) % _CALLS_BETWEEN_CHECKS == 2:
            plan.check()
        return plan.reducer(range(len(lengths)), mask, layout)

    return get_pg_loss_reducer


def _context_parallel() -> tuple[int, int]:
    """Return size and rank: miles' if miles runs (also without Megatron), else Megatron's."""
    miles = sys.modules.get("miles.backends.training_utils.parallel")
    if miles is not None:
        cp = miles.get_parallel_state().cp
        return int(cp.size), int(cp.rank)
    from megatron.core import mpu

    return mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()


def _megatron_args() -> Any:
    """Return Megatron-LM's arguments; None on miles' FSDP, which may import it but sets none."""
    module = sys.modules.get("megatron.training.global_vars")
    with suppress(AssertionError):  # Megatron-LM's, of what is not set
        return module and module.get_args()
    return None


def refuse_bshd(args: Any) -> None:
    """Raise :class:`LayoutError` if CP splits by a length that no reducer is given."""
    if getattr(args, "qkv_format", "thd") != "thd":
        raise LayoutError(
            "got --qkv-format bshd with context parallelism, which splits by max_seq_len, expected "
            "thd: the reducer is not given that length. Use --qkv-format thd, or carry the weights"
        )
