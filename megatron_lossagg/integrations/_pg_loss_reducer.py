"""``custom_pg_loss_reducer`` of slime and miles: the policy loss divided by a constant.

Both frameworks call the function at ``--custom-pg-loss-reducer-function-path`` once per microbatch,
and what it returns once with this context-parallel rank's policy losses of the response tokens.
Afterwards the framework multiplies by M and DP CP and divides by G, its count of rollouts::

    partial loss = (sum over this rank's tokens t of m_t x_t) / L

Sources: slime 624b824a and miles 31f1ca96 ``policy_loss_function``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import AggregationError, ContractError, LayoutError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.step_state import StepState
from megatron_lossagg.reduction.table import StepTotals
from megatron_lossagg.reduction.weighted import warn_of_divisor

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
        lengths = [mask.numel() for mask in loss_masks]
        if lengths != [int(n) for n in response_lengths]:
            raise LayoutError(
                f"got loss masks of {lengths[:6]} tokens for responses of "
                f"{list(response_lengths)[:6]}, expected one whole mask per sample: pass masks "
                "before slicing for context parallelism"
            )
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
