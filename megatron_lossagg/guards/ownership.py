"""Which context-parallel rank trained which tokens, and whether all trained one step.

With the layout ``local`` each rank brings the mask of its own slice, so no rank sees a whole
sequence. With gathered losses, and with whole masks that each rank slices, each weighs its own part
by a mask that should be the others'. Once per step the ranks of the context-parallel group gather
how many tokens each has trained of each sequence, and how many it counted; likewise the sums of
token weights. Together they must train what was counted of each sequence: more is an error, less is
one unless tokens are rejected on purpose. They must also have given each sequence the same weight,
under each aggregation that several of them use: only one may hold the tokens of a term.

Ranks may disagree on everything, the number of sequences included. So what is gathered has one
size: sequence s is added to slot s modulo ``_SLOTS``.

Shape suffixes: S = sequences of this data-parallel rank in the step; F = slots; T =
slots of aggregations; W = ranks of the context-parallel group; N = the numbers that a rank gathers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.checks import weight_slack
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.layout import PADDING, SegmentSums, held_sums
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.sequences import Floats, hashed
from megatron_lossagg.reduction.step_state import Line
from megatron_lossagg.reduction.weighted import SAME_SUMS, sums_of


class _Tally:
    """A number of each sequence on this rank; summed when it is asked for.

    If several masks over one sequence are noted, the one that trains most counts, so running a
    microbatch again changes nothing.
    """

    def __init__(self, num_sequences: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._noted: dict[torch.device, list[tuple[SegmentSums, Ints]]] = {}
        self._is_noted_S = np.zeros(num_sequences, dtype=bool)

    def add(self, sums: SegmentSums, sequences_G: Ints, *, only_new: bool) -> None:
        """Note a microbatch; ``only_new``: nothing of a sequence that was noted. No operation."""
        is_sequence_G = sequences_G != PADDING
        if only_new:
            is_sequence_G[is_sequence_G] = ~self._is_noted_S[sequences_G[is_sequence_G]]
        if is_sequence_G.any():
            sequences_G = np.where(is_sequence_G, sequences_G, PADDING)
            self._noted.setdefault(sums.at_N.device, []).append((sums, sequences_G))
            self._is_noted_S[sequences_G[is_sequence_G]] = True

    def of_sequences(self) -> Tensor | None:
        """Return ``[S]``; None if nothing was noted. No host sync."""
        found = [self._on(device) for device in self._noted]
        if not found:
            return None
        return torch.stack([moved(value_S, found[0].device) for value_S in found]).amax(dim=0)

    def _on(self, device: torch.device) -> Tensor:
        noted = self._noted[device]
        sequences = np.concatenate([sequences_G for _, sequences_G in noted])
        rows = from_numpy(np.flatnonzero(sequences != PADDING), device)
        index = from_numpy(sequences[sequences != PADDING], device)
        sums = held_sums([sums for sums, _ in noted]).to(self.dtype)[rows]
        value_S = torch.zeros(len(self._is_noted_S), dtype=self.dtype, device=device)
        return value_S.scatter_reduce_(0, index, sums, "amax")


class TrainedTokens:
    """Trained tokens of each sequence, and the sums of their weights, by two kinds of masks."""

    def __init__(self, num_sequences: int) -> None:
        self.own = _Tally(num_sequences, torch.int64)
        """By masks of each rank's own: sliced by the framework, or of gathered losses."""
        self.whole = _Tally(num_sequences, torch.int64)
        """By whole masks: what this rank holds of the first mask of each sequence."""
        self.own_weights = _Tally(num_sequences, torch.float64)
        """The sums of the token weights that ``own`` trains, if the plan has any."""
        self.whole_weights = _Tally(num_sequences, torch.float64)
        """Those of ``whole``."""

    @property
    def tallies(self) -> tuple[_Tally, ...]:
        """All four."""
        return self.own, self.whole, self.own_weights, self.whole_weights

    def add(self, line: Line) -> None:
        """Note what this rank trains of each sequence of a microbatch; no operation.

        Where the framework slices the mask, and of gathered losses, each rank weighs its part by a
        mask of its own: every microbatch that was reduced is noted. A whole mask should be the
        other ranks' too; of several over one sequence the first is noted.
        """
        is_own = line.layout.is_local or line.layout.is_gathered
        tally = self.own if is_own else self.whole
        tally.add(line.trained, line.known.sequences, only_new=not is_own)
        if line.trained_weights is not None:
            tally = self.own_weights if is_own else self.whole_weights
            tally.add(line.trained_weights, line.known.sequences, only_new=not is_own)


_SLOTS = 1024
_TERMS = 64
"""Slots of aggregations: one is in that of its hash modulo this."""


class Ownership(Guard):
    """Compare what context-parallel ranks trained with what was counted; in evaluations too."""

    catches = (
        "at CP > 1: a token that two ranks train or none, ranks in different steps, a sequence "
        "with different weights under the mode, a term or a shadow, a rank that failed by itself"
    )
    costs = (
        "operations over the sequences of a step at its end; one all-gather of 42 KiB a step over "
        "the context-parallel group"
    )

    @classmethod
    def of(cls, step: StepFacts) -> Ownership | None:
        """Make it at CP > 1."""
        return cls() if step.groups.cp_size > 1 else None

    def together(self, step: StepFacts, *, has_failed: bool) -> None:
        """Leave in the plan's faults what the ranks trained other than was counted.

        ``has_failed``: whether this rank ends the step with an error anyway, which the others then
        raise too. Tokens are compared if a rank noted some. One all-gather over the
        context-parallel group, every rank of which calls; no host sync.
        """
        trained = TrainedTokens(len(step.plan.active_tokens))
        for line in step.log.lines:
            trained.add(line)
        exchange = Exchange(step.groups.cp_group)
        gathered_WN = exchange.tensors(_numbers(step.plan, trained, has_failed))
        _compare(step.plan, gathered_WN, exchange.rank)


_SAME, _HEAD = 3, 5
"""Indices into a rank's numbers: from which on to ``_HEAD`` all ranks must have the same; slots."""
_BLOCKS = _HEAD + 3 * _TERMS
"""From which on its sequences' slots are; before them its aggregations'."""


def _numbers(plan: StepPlan, trained: TrainedTokens, has_failed: bool) -> Tensor:
    """Return what this rank has trained and counted: int64 ``[N]``.

    ``has_failed``: whether the step has, here.
    """
    noted = [tally.of_sequences() for tally in trained.tallies]
    device = next((one.device for one in noted if one is not None), torch.device("cpu"))
    counted_F = _folded(plan.active_tokens).astype(np.int64)
    slot_S = from_numpy(_slots(len(plan.active_tokens)), device)
    blocks = []
    for tally, trained_S in zip(trained.tallies, noted, strict=True):
        trained_F = torch.zeros(_SLOTS, dtype=tally.dtype, device=device)
        if trained_S is not None:
            trained_F.index_add_(0, slot_S, moved(trained_S, device))
        blocks.append(trained_F.view(torch.int64))
    settings = hashed(f"{plan.aggregation!r} {plan.state.rejects_tokens}")
    is_noted = [trained_S is not None for trained_S in noted[:2]]
    head = np.array([has_failed, *is_noted, len(slot_S), settings], dtype=np.int64)
    numbers = np.concatenate([head, _weights(plan).ravel(), counted_F])
    return torch.cat([from_numpy(numbers, device), *blocks])


def _weights(plan: StepPlan) -> Ints:
    """Return a hash of the aggregations in each slot, and two sums of their weights, ``[3, T]``.

    The sums are float64 in the bits of integers.
    """
    names_T, sums_2T = np.zeros(_TERMS, dtype=np.int64), np.zeros((2, _TERMS))
    for aggregation, under in {one.aggregation: one for one in plan.planned}.items():
        with suppress(LossAggregationError):  # what it needs was not passed: it weighs nothing
            sums = sums_of(_compared(under))
            slot = hashed(repr(aggregation)) % _TERMS
            names_T[slot] ^= hashed(repr(aggregation))
            sums_2T[:, slot] += sums
    return np.stack([names_T, *sums_2T.view(np.int64)])


def _compared(plan: StepPlan) -> Floats:
    """Return w_s: of the mask's counts, for sums of token weights may differ by rounding.

    What only a custom reducer knows is left out.
    """
    aggregation, omega_S = plan.aggregation, plan.sequences.sequence_weight
    if aggregation.mode == CUSTOM:
        return np.zeros(0) if omega_S is None else omega_S
    if aggregation.count == "weights":
        plan = replace(plan, aggregation=replace(aggregation, count="mask"))
    return plan.weight_S


def _weighed_otherwise(gathered_WN: Tensor) -> list[Tensor]:
    """Return whether weights differ under an aggregation, its slot, and two ranks that differ."""
    names_WT, *sums = gathered_WN[:, _HEAD:_BLOCKS].reshape(-1, 3, _TERMS).unbind(1)
    is_noted_WT = names_WT != 0
    differs_T = torch.zeros(_TERMS, dtype=torch.bool, device=names_WT.device)
    for sum_WT in sums:
        value_WT = sum_WT.contiguous().view(torch.float64)
        lowest = torch.where(is_noted_WT, value_WT, torch.inf).min(dim=0)
        highest = torch.where(is_noted_WT, value_WT, -torch.inf).max(dim=0)
        differs_T |= highest.values - lowest.values > SAME_SUMS * highest.values
    # Ranks whose slot has other aggregations have nothing to compare.
    largest_T = names_WT.max(dim=0).values
    differs_T &= ((names_WT == largest_T) | ~is_noted_WT).all(dim=0)
    differs, slot = differs_T.int().max(dim=0)
    return [differs, slot, lowest.indices.take(slot), highest.indices.take(slot)]


def _compare(plan: StepPlan, gathered_WN: Tensor, own_rank: int) -> None:
    counted_S = plan.active_tokens
    sums_S = plan.sequences.token_weight_sums
    counted_weight_F = np.zeros(_SLOTS) if sums_S is None else _folded(sums_S)
    size, here = len(gathered_WN), gathered_WN[own_rank]
    failed_W, *noted = gathered_WN[:, :_SAME].unbind(1)
    is_compared = torch.stack(noted).max()
    differs_W = (gathered_WN[:, _SAME:_HEAD] != here[_SAME:_HEAD]).any(dim=1)
    blocks_WF = gathered_WN[:, _BLOCKS:].reshape(size, 5, _SLOTS)
    counted_WF, own_WF, whole_WF = blocks_WF[:, :3].unbind(1)
    miscounts_F = (counted_WF != counted_WF[own_rank]).any(dim=0)
    counted_F = counted_WF[own_rank] * is_compared
    own_F, whole_F = own_WF.sum(dim=0), whole_WF.sum(dim=0)
    fewer_F = counted_F - _complete(own_F, whole_F, counted_F)
    weight_F = from_numpy(counted_weight_F, gathered_WN.device) * is_compared
    slack_F = weight_slack(weight_F, weight_F.sum())
    weights_WF = blocks_WF[:, 3:].contiguous().view(torch.float64)
    own_weight_F, whole_weight_F = weights_WF.sum(dim=0)
    lighter_F = weight_F - _complete(own_weight_F, whole_weight_F, weight_F + slack_F)
    plan.state.faults.record(
        [
            *failed_W.max(dim=0),
            *differs_W.int().max(dim=0),
            *miscounts_F.int().max(dim=0),
            *_weighed_otherwise(gathered_WN),
            *(counted_F - torch.maximum(own_F, whole_F)).min(dim=0),
            *fewer_F.max(dim=0),
            *(weight_F + slack_F - torch.maximum(own_weight_F, whole_weight_F)).min(dim=0),
            *(lighter_F - slack_F).max(dim=0),
        ],
        partial(_describe, own_rank, counted_S, plan.state.rejects_tokens, _named(plan)),
        guard="Ownership",
    )


def _complete(own_F: Tensor, whole_F: Tensor, counted_F: Tensor) -> Tensor:
    """Return what is trained of each slot: by ranks' own masks, by whole ones, or by both.

    A sequence has masks of one kind, whose sums add up over a slot; or terms of both kinds, of
    which its ranks' own must be complete.
    """
    both_F = own_F + whole_F
    return torch.where(both_F <= counted_F, both_F, torch.where(own_F > 0, own_F, whole_F))


def _slots(num_sequences: int) -> Ints:
    return np.arange(num_sequences) % _SLOTS


def _folded(value_S: Ints | Floats) -> Floats:
    return np.bincount(_slots(len(value_S)), value_S, minlength=_SLOTS).astype(np.float64)


def _named(plan: StepPlan) -> dict[int, str]:
    """Return the mode in each slot of aggregations, as far as this rank uses it."""
    return {hashed(repr(one.aggregation)) % _TERMS: one.aggregation.mode for one in plan.planned}


def _describe(
    own_rank: int,
    counted_S: Ints,
    rejects_tokens: bool,
    modes: dict[int, str],
    values: list[float],
) -> str:
    failed, failed_rank, differs, other, miscounts, slot, *weighs, least, over, most, under = map(
        int, values[:14]
    )
    least_weight, heavier, most_weight, lighter = values[14:]
    if failed and failed_rank != own_rank:
        return f"context-parallel rank {failed_rank} ended the step with an error"
    if differs:
        return (
            f"context-parallel ranks {own_rank} and {other} planned different steps (mode, "
            "options, number of sequences): start all ranks with the same flags and "
            "plan the same sequences on every rank of a context-parallel group"
        )
    if miscounts:
        return (
            f"the context-parallel ranks counted different tokens of {_sequence(slot, counted_S)}, "
            f"this one {_counted(slot, counted_S)}: count the whole sequences, before they are "
            "sliced"
        )
    is_weighed_otherwise, term, *two_ranks = weighs
    if is_weighed_otherwise:
        first, second = sorted(two_ranks)
        return (
            f"context-parallel ranks {first} and {second} give the same sequences different "
            "weights: pass the same ids, totals and sequence weights on every rank of a "
            f"context-parallel group; they differ under {modes.get(term, 'the mode of a term')}"
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
