"""Which context-parallel rank trained which tokens, and whether all trained one step.

With the layout ``local`` each rank brings the mask of its own slice, so no rank sees a whole
sequence. With gathered losses, and with whole masks that each rank slices, each weighs its own part
by a mask that should be the others'. Once per step the ranks of the context-parallel group gather
how many tokens each has trained of each sequence, and how many it counted; likewise the sums of
token weights. Together they must train what was counted of each sequence: more is an error, less is
one unless tokens are rejected on purpose. They must also have given each sequence the same weight.

Ranks may disagree on everything, the numbers of sequences and of plans included. So what is
gathered has one size: sequence s is added to slot s modulo ``_SLOTS``, and further plans are
gathered only where all ranks have as many.

Shape suffixes: S = sequences of this data-parallel rank in the step; F = slots; W = ranks of the
context-parallel group; P = further plans of the step; N = the numbers that a rank gathers of a
plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.devices import from_numpy, moved
from megatron_lossagg.errors import PlanError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.integers import Ints
from megatron_lossagg.plan import StepPlan
from megatron_lossagg.sequences import Floats, hashed

__all__ = ["check_ownership"]

_SLOTS = 1024
_ROUNDING = 1e-6
"""How far a sum of weights may be from the counted one, of its own size."""


def check_ownership(exchange: Exchange, plans: Sequence[StepPlan], *, has_failed: bool) -> None:
    """Leave in each plan's faults what the ranks trained other than was counted.

    Of the step's own plan tokens are compared if a rank noted some, of a further plan always.

    ``exchange``: over the context-parallel group, every rank of which calls. ``plans``: of the
    step. ``has_failed``: whether this rank ends the step with an error anyway, which the others
    then raise too. One all-gather, no host sync; with several plans one more of each.
    """
    own = [_numbers(plan, len(plans), has_failed) for plan in plans]
    gathered_WN = exchange.tensors(own[0])
    _compare(plans[0], gathered_WN, exchange.rank)
    if len(plans) > 1 and bool((gathered_WN[:, _NUM_PLANS] == len(plans)).all()):
        gathered_WPN = exchange.tensors(torch.cat(own[1:])).view(exchange.size, len(own) - 1, -1)
        for plan, gathered_WN in zip(plans[1:], gathered_WPN.unbind(1), strict=True):
            _compare(plan, gathered_WN, exchange.rank)


_NUM_PLANS, _HEAD = 3, 6
"""Where a rank's number of plans stands in what it gathers, and where its slots begin."""


def _numbers(plan: StepPlan, num_plans: int, has_failed: bool) -> Tensor:
    """Return what this rank has trained and counted under a plan: int64 ``[N]``."""
    trained_S = plan.state.trained.of_sequences()
    device = torch.device("cpu") if trained_S is None else trained_S.device
    weighed_S = plan.state.trained_weights.of_sequences()
    settings = f"{plan.aggregation!r} {plan.state.rejects_tokens}"
    counted_F = _folded(plan.active_tokens).astype(np.int64)
    slot_S = _slots(len(plan.active_tokens))
    trained_F = torch.zeros(_SLOTS, dtype=torch.int64, device=device)
    if trained_S is not None:
        trained_F.index_add_(0, from_numpy(slot_S, device), moved(trained_S, device))
    weighed_F = torch.zeros(_SLOTS, dtype=torch.float64, device=device)
    if weighed_S is not None:
        weighed_F.index_add_(0, from_numpy(slot_S, device), moved(weighed_S, device))
    is_compared = trained_S is not None or plan.state.is_further
    settings_and_weights = [hashed(settings), num_plans, len(slot_S), hashed(_weights(plan))]
    head = np.array([is_compared, has_failed, *settings_and_weights])
    bits_F = weighed_F.view(torch.int64)
    return torch.cat([from_numpy(head, device), from_numpy(counted_F, device), trained_F, bits_F])


def _weights(plan: StepPlan) -> str:
    """Return every w_s exactly; empty if only a custom reducer or a total not passed knows them."""
    try:
        return plan.weight_S.tobytes().hex()
    except PlanError:
        return ""


def _compare(plan: StepPlan, gathered_WN: Tensor, own_rank: int) -> None:
    counted_S = plan.active_tokens
    sums_S = plan.sequences.token_weight_sums
    counted_weight_F = np.zeros(_SLOTS) if sums_S is None else _folded(sums_S)
    size, own = len(gathered_WN), gathered_WN[own_rank]
    is_compared, failed_W = gathered_WN[:, 0].max(), gathered_WN[:, 1]
    differs_W1 = (gathered_WN[:, 2:5] != own[2:5]).any(dim=1)
    weighs_W = gathered_WN[:, 5] != own[5]
    counted_WF, trained_WF, bits_WF = gathered_WN[:, _HEAD:].reshape(size, 3, _SLOTS).unbind(1)
    miscounts_F = (counted_WF != counted_WF[own_rank]).any(dim=0)
    missing_F = (counted_WF[own_rank] - trained_WF.sum(dim=0)) * is_compared
    weight_F = from_numpy(counted_weight_F, gathered_WN.device) * is_compared
    missing_weight_F = weight_F - bits_WF.contiguous().view(torch.float64).sum(dim=0)
    slack_F = _ROUNDING * weight_F
    plan.state.faults.record(
        [
            *failed_W.max(dim=0),
            *differs_W1.int().max(dim=0),
            *miscounts_F.int().max(dim=0),
            *weighs_W.int().max(dim=0),
            *missing_F.min(dim=0),
            *missing_F.max(dim=0),
            *(missing_weight_F + slack_F).min(dim=0),
            *(missing_weight_F - slack_F).max(dim=0),
        ],
        partial(_describe, own_rank, counted_S, plan.state.rejects_tokens),
    )


def _slots(num_sequences: int) -> Ints:
    return np.arange(num_sequences) % _SLOTS


def _folded(value_S: Ints | Floats) -> Floats:
    return np.bincount(_slots(len(value_S)), value_S, minlength=_SLOTS).astype(np.float64)


def _describe(own_rank: int, counted_S: Ints, rejects_tokens: bool, values: list[float]) -> str:
    failed, failed_rank, differs, other, miscounts, slot, weighs, third, *tokens = map(
        int, values[:12]
    )
    least, over, most, under = tokens
    least_weight, heavier, most_weight, lighter = values[12:]
    if failed and failed_rank != own_rank:
        return f"context-parallel rank {failed_rank} ended the step with an error"
    if differs:
        return (
            f"context-parallel ranks {own_rank} and {other} planned different steps (mode, "
            "options, number of sequences or of plans): start all ranks with the same flags and "
            "plan the same sequences on every rank of a context-parallel group"
        )
    if miscounts:
        return (
            f"the context-parallel ranks counted different tokens of {_sequence(slot, counted_S)}, "
            f"this one {_counted(slot, counted_S)}: count the whole sequences, before they are "
            "sliced"
        )
    if weighs:
        return (
            f"context-parallel ranks {own_rank} and {third} give the same sequences different "
            "weights: pass the same sample and prompt ids on every rank of a context-parallel group"
        )
    if least < 0:
        also = f", and {most} fewer of {_sequence(under, counted_S)}" if most > 0 else ""
        return (
            f"the context-parallel ranks train {-least} tokens more of "
            f"{_sequence(over, counted_S)} than the {_counted(over, counted_S)} that were "
            f"counted{also}: each token belongs to "
            "one rank; pass the lengths of the slices that this rank holds to Layout.local, or "
            "give every rank the same whole mask"
        )
    if most > 0 and not rejects_tokens:
        return (
            f"the context-parallel ranks train {most} tokens fewer of "
            f"{_sequence(under, counted_S)} than the {_counted(under, counted_S)} that were "
            "counted: check mask, sequences and "
            "slices; if tokens are rejected on purpose, declare it with "
            "--loss-aggregation-rejects-tokens (Options(rejects_tokens=True))"
        )
    is_more = not least_weight >= 0  # NaN too
    if is_more or (not most_weight <= 0 and not rejects_tokens):
        return (
            f"the token weights that the context-parallel ranks train of "
            f"{_sequence(int(heavier if is_more else lighter), counted_S)} sum to "
            f"{'more' if is_more else 'less'} than was counted: check token_weights and "
            "Sequences.token_weight_sums, which are sums in float64 of whole sequences"
        )
    return ""


def _sequence(slot: int, counted_S: Ints) -> str:
    sequences = range(slot, len(counted_S), _SLOTS)
    return (
        f"sequence {slot}"
        if len(sequences) == 1
        else f"one of the sequences {', '.join(map(str, sequences))}"
    )


def _counted(slot: int, counted_S: Ints) -> int:
    return int(counted_S[slot::_SLOTS].sum())
