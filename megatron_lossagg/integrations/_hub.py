"""The reducer hub of slime and miles: masked sum / L, and nothing else.

Both frameworks call ``--custom-pg-loss-reducer-function-path`` once per microbatch with four
positional arguments, and the result once with this context-parallel rank's policy losses
of the response tokens. Afterwards the framework itself multiplies by M and DP CP and divides
by G, its count of rollouts; so the reducer returns masked sum / L::

    share = (sum over this rank's tokens t of m_t x_t) / L

The frameworks resolve the path with ``getattr``; ``integrations/slime.py`` and
``integrations/miles.py``
answer any
``constant_<L>`` with :func:`factory_named`. Sources: slime 624b824a ``policy_loss_function``,
miles 31f1ca96 ``policy_loss_function``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.errors import AggregationError, ContractError, LayoutError
from megatron_lossagg.flags import aggregation_from_args
from megatron_lossagg.layout import Layout
from megatron_lossagg.plan import StepPlan, plan_step, warn_of_divisor
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.state import StepState

__all__ = [
    "HubFactory",
    "HubReducer",
    "ReducerNameError",
    "constant_from_args",
    "factory_named",
    "refuse_bshd",
]

HubReducer = Callable[[Tensor], Tensor]
HubFactory = Callable[[Sequence[int], Sequence[int], Sequence[Tensor], bool], HubReducer]

_NAME = re.compile(r"constant_(.+)")
_NUMBER = re.compile(r"[0-9]+(p[0-9]+)?(e[+-]?[0-9]+)?")
_FIRST_CHECKS = (2, 4, 8, 16, 32)
_CALLS_BETWEEN_CHECKS = 64


class ReducerNameError(AggregationError, AttributeError):
    """A ``constant_<L>`` whose L is not a valid divisor."""


def constant_from_args(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> HubReducer:
    """Make a microbatch's reducer with the divisor of the framework's own arguments.

    Reads ``loss_aggregation`` and ``loss_aggregation_divisor`` of Megatron's ``get_args()``.
    Raises :class:`AggregationError` for any other mode than ``constant``: the hub gives no
    other counts.
    """
    aggregation = aggregation_from_args(_framework_args())
    if aggregation is None or aggregation.mode != "constant" or not aggregation.count_empty:
        raise AggregationError(
            f"the framework's arguments ask for {aggregation}: this hub can only do constant, with "
            "empty samples counted; set loss_aggregation: constant and loss_aggregation_divisor, "
            "or carry the weights (carry_weights), which does every mode"
        )
    factory = _factory(float(aggregation.divisor or 0))
    return factory(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)


def factory_named(name: str, module: str) -> HubFactory:
    """Return the factory ``constant_<L>`` of a framework's module; the same name, the same factory.

    Raises :class:`AttributeError` for any other name, as a module's ``__getattr__`` must, and
    :class:`ReducerNameError` where L is not a valid divisor.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; it has carry_weights, check, "
            "constant_from_args and, for any divisor L, constant_<L>, such as constant_40960 or "
            "constant_0p5"
        )
    try:
        if not _NUMBER.fullmatch(match[1]):  # float() takes 1_000 and 40.
            raise ValueError(match[1])
        divisor = float(match[1].replace("p", "."))
        Aggregation("constant", divisor=divisor)
    except ValueError as error:
        raise ReducerNameError(
            f"{name!r}: {match[1]!r} is not a valid divisor: write a finite number above 0 such as "
            "constant_40960, with p for the decimal point"
        ) from error
    return _factory(divisor)


@cache
def _factory(divisor: float) -> HubFactory:
    masked_sum_over_constant = Aggregation("token_sum", divisor=divisor)
    # The framework owns the step and closes none, so what devices found is read every few
    # microbatches.
    state = StepState(rejects_tokens=True)  # counts here are lengths, of which masks select some
    calls = 0

    def get_pg_loss_reducer(
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor],
        calculate_per_token_loss: bool = False,
    ) -> HubReducer:
        """Slice the whole response masks for this rank; returns masked sum / L.

        ``loss_masks``: one 0/1 mask ``[response]`` per sample, not sliced. No collective; one
        host sync at calls 2, 4, 8, 16, 32 and every 64th, to raise what a device has found.
        """
        nonlocal calls
        if calculate_per_token_loss:
            raise ContractError(
                "with --calculate-per-token-loss the framework divides by all tokens, and "
                "the constant "
                "would be lost: drop that flag to train with a constant divisor"
            )
        cp_size, cp_rank = _context_parallel()
        _refuse_bshd(cp_size)
        lengths = [mask.numel() for mask in loss_masks]
        if lengths != [int(n) for n in response_lengths]:
            raise LayoutError(
                f"loss masks of {lengths[:6]} tokens for responses of "
                f"{list(response_lengths)[:6]}: "
                "one whole mask per sample, before slicing for context parallelism"
            )
        layout = Layout.response_zigzag(
            total_lengths, response_lengths, cp_size=cp_size, cp_rank=cp_rank
        )
        mask = torch.cat(list(loss_masks)) if loss_masks else torch.zeros(0, dtype=torch.bool)
        warn_of_divisor(divisor, lengths)
        plan = _plan_of(masked_sum_over_constant, lengths, state)
        calls += 1
        if calls in _FIRST_CHECKS or calls % _CALLS_BETWEEN_CHECKS == 0:
            plan.check()
        return plan.reducer(range(len(lengths)), mask, layout)

    return get_pg_loss_reducer


def _plan_of(aggregation: Aggregation, lengths: list[int], state: StepState) -> StepPlan:
    """Plan one microbatch; the framework counts the step itself, and token_sum needs no count of
    it.
    """
    plan = plan_step(
        aggregation,
        Sequences(active_tokens=lengths),
        totals=StepTotals(),
    )
    return replace(plan, state=state)


def _context_parallel() -> tuple[int, int]:
    """Return size and rank: miles' where miles runs (also without Megatron), else Megatron's."""
    miles = sys.modules.get("miles.backends.training_utils.parallel")
    if miles is not None:
        cp = miles.get_parallel_state().cp
        return int(cp.size), int(cp.rank)
    from megatron.core import mpu

    return mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()


def _framework_args() -> Any:
    try:
        from megatron.training.global_vars import get_args

        return get_args()
    except (ImportError, AssertionError) as error:  # miles' FSDP backend sets none
        raise ContractError(
            f"constant_from_args reads Megatron's get_args(), which raised {error!r}: name the "
            "divisor in the path instead, constant_<L>"
        ) from error


def _refuse_bshd(cp_size: int) -> None:
    if cp_size > 1 and "megatron.training.global_vars" in sys.modules:
        refuse_bshd(_framework_args(), cp_size)


def refuse_bshd(args: Any, cp_size: int) -> None:
    """Raise :class:`LayoutError` where the framework splits by a length that the hub is
    not given.
    """
    if cp_size > 1 and getattr(args, "qkv_format", "thd") != "thd":
        raise LayoutError(
            "bshd with context parallelism splits by max_seq_len, which this hub is not given: use "
            "--qkv-format thd, or context parallel size 1"
        )
