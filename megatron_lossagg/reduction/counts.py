"""One optimizer step, counted over the data-parallel group.

Counting makes one all-gather of a few integers per rank. A second one of a few numbers per
sequence follows if ids or weights are passed or a mode needs every sequence; a third one only
brings an error's message to every rank.

Shape suffixes: S = sequences of this data-parallel rank in the step; W = ranks of the group;
A = sequences of all ranks; I = distinct ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.checks.ids import check_ids
from megatron_lossagg.reduction.counted import Counted, check_sample_count
from megatron_lossagg.reduction.id_groups import IdGroups
from megatron_lossagg.reduction.integers import Ints, is_integer
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.sequences import (
    GATHERED_FLOATS,
    ID_KINDS,
    CheckedSequences,
    Floats,
    Kind,
    check_sum,
    hashed,
)
from megatron_lossagg.reduction.step_table import StepTable
from megatron_lossagg.reduction.totals import StepTotals, WhichStep

if TYPE_CHECKING:
    from megatron_lossagg.reduction.exchange import Exchange
    from megatron_lossagg.reduction.one_process import OneProcess

_Numbers = TypeVar("_Numbers", Ints, Floats)


def known_step(
    sequences: CheckedSequences, totals: StepTotals, data_parallel_size: int | None
) -> StepTotals:
    """Complete totals that the caller knows, without a collective; raises :class:`PlanError`."""
    n_S = sequences.active_tokens
    if sequences.token_weight_sums is not None:
        raise PlanError(
            "got totals= and token_weight_sums=, but only counting sums the weights of other "
            "ranks: drop one of them"
        )
    if sequences.left_out is not None:
        raise PlanError(
            "got totals= and left_out=, but only counting finds what other ranks leave out: drop "
            "totals="
        )
    for kind in ID_KINDS:
        if getattr(sequences, kind) is not None:
            raise PlanError(
                f"got totals= and {kind}=, but only counting finds a {kind}'s sequences on other "
                f"ranks: drop totals= or {kind}="
            )
    least = {
        "active_tokens": int(n_S.sum()),
        "samples": len(n_S),
        "prompts": 0,
        "active_samples": int(np.count_nonzero(n_S)),
        "active_prompts": 0,
    }
    for name, lowest in least.items():
        value = getattr(totals, name)
        if value is not None and not is_integer(value, lowest=lowest):
            raise PlanError(
                f"got StepTotals({name}={value!r}), expected an integer from {lowest}, "
                "which this rank's sequences have: pass the count of the whole step"
            )
    check_sample_count(sequences.sample_count, totals.samples, has_ids=True)
    return replace(
        totals,
        data_parallel_size=data_parallel_size,
        longest_sample=int(n_S.max(initial=0)),
        sample_lengths=None,
        sample_tokens=n_S,
        prompt_tokens=None,
        microbatch_tokens=_count_microbatches(sequences, n_S)[0],
        weighted=None,
        table=None,
        counted=None,
    )


def _count_microbatches(
    sequences: CheckedSequences, tokens_S: _Numbers | None
) -> tuple[_Numbers | None, int]:
    """Count n_mb of each sequence's microbatch, ``[S]``, and microbatches with a token.

    None and 0 if ``Sequences.microbatch`` or ``tokens_S`` is not passed.
    """
    if sequences.microbatch is None or tokens_S is None:
        return None, 0
    microbatches = IdGroups.of(sequences.microbatch)
    tokens_I = microbatches.sums(tokens_S)
    return tokens_I[microbatches.index_A], int(np.count_nonzero(tokens_I))


def count_step(
    aggregation: Aggregation,
    sequences: CheckedSequences,
    fault: str,
    exchange: Exchange | OneProcess,
    settings: Iterable[str] = (),
    which: WhichStep = WhichStep(0, 0),  # noqa: B008  a constant
    *,
    shadows: Iterable[Aggregation] = (),
) -> StepTotals:
    """Count over the group; every rank raises the same :class:`PlanError` or none does.

    ``settings``: what else must be the same on every rank, in words. ``which``: the step, by its
    kind and number. ``shadows``: aggregations for which is counted too.
    """
    settings = [f"{aggregation} ({aggregation!r})", *settings]
    n_S = sequences.active_tokens
    numbers = {name: getattr(sequences, name) for name in (*ID_KINDS, *GATHERED_FLOATS)}
    # All columns travel as integers.
    given_S = {name: one.view(np.int64) for name, one in numbers.items() if one is not None}
    given_S |= {_OWN + name: one.view(np.int64) for name, one in sequences.columns.items()}
    if sequences.left_out is not None:
        given_S[_LEFT_OUT] = sequences.left_out.astype(np.int64)
    columns = {"tokens": n_S} | given_S
    given = [*columns, *["microbatch"] * (sequences.microbatch is not None)]
    of_ranks = _gathered_numbers(sequences, settings, given, which, fault, exchange)
    counted = StepTotals(
        active_tokens=int(of_ranks["tokens"].sum()),
        samples=int(of_ranks["sequences"].sum()),
        active_samples=int(of_ranks["active_sequences"].sum()),
        microbatch_means=_microbatch_means(of_ranks, "active_microbatches"),
        data_parallel_size=exchange.size,
        longest_sample=int(of_ranks["longest"].max()),
        sample_tokens=n_S,
        microbatch_tokens=_count_microbatches(sequences, n_S)[0],
    )
    needs_all = any(MODES[one.mode].needs_all for one in (aggregation, *shadows))
    if len(columns) > 1 or needs_all or exchange.size == 1:
        counted = _count_columns(columns, sequences, of_ranks, exchange)
    has_ids = sequences.sample is not None
    check_sample_count(sequences.sample_count, counted.samples, has_ids=has_ids)
    return replace(counted, counted=_in_numbers(counted, of_ranks))


def _in_numbers(totals: StepTotals, of_ranks: Mapping[str, Ints], left_out: int = 0) -> Counted:
    """Write what was counted as numbers over all ranks; ``left_out``: sequences that were not."""
    sequences, active = (int(of_ranks[n].sum()) for n in ("sequences", "active_sequences"))
    if totals.table is not None:
        tokens_A: Any = totals.table.counted_A
        sequences, active = len(tokens_A), int(np.count_nonzero(tokens_A))
    numbers = {"sequences": sequences, "empty_sequences": sequences - active}
    for kind in ("samples", "prompts"):
        found, active = getattr(totals, kind), getattr(totals, f"active_{kind}")
        if found is not None:
            numbers |= {kind: found, f"empty_{kind}": found - active}
    groups = None if totals.table is None else totals.table.groups.get("group")
    if groups is not None:
        active = int(np.count_nonzero(groups.sums(tokens_A)))
        numbers |= {"groups": groups.num, "empty_groups": groups.num - active}
    padding_W = of_ranks["padding"]
    padding = int(padding_W.sum()) if (padding_W >= 0).all() else None
    known = {"active_tokens": totals.active_tokens, "left_out": left_out or None}
    return Counted(**known, padding=padding, **numbers)


def _gathered_numbers(
    sequences: CheckedSequences,
    settings: list[str],
    given: list[str],
    which: WhichStep,
    fault: str,
    exchange: Exchange | OneProcess,
) -> dict[str, Ints]:
    """Gather 17 integers of every rank, int64 ``[W]`` each; refuse what must be the same."""
    n_S, v_S = sequences.active_tokens, sequences.token_weight_sums
    kept, has_microbatches = sequences.kept, sequences.microbatch is not None
    own = {
        "has_fault": bool(fault),
        # The same on every rank: the aggregation, the options and which ids are passed.
        "fingerprint": hashed(_BETWEEN.join([*settings, *given])),
        "samples_per_prompt": sequences.samples_per_prompt or 0,
        "sample_count": -1 if sequences.sample_count is None else sequences.sample_count,
        # A bit per kind of id that is passed as strings; -1 if there are no sequences.
        "string_ids": sum(1 << ID_KINDS.index(k) for k in sequences.string_ids) if len(n_S) else -1,
        "sequences": len(n_S),
        "tokens": int(n_S.sum()),
        "active_sequences": int(np.count_nonzero(n_S)),
        "active_microbatches": _count_microbatches(sequences, n_S)[1],
        "weighted_microbatches": _count_microbatches(sequences, v_S)[1],
        "kept_active_microbatches": _count_microbatches(kept, kept.active_tokens)[1],
        "kept_weighted_microbatches": _count_microbatches(kept, kept.token_weight_sums)[1],
        "num_microbatches": (sequences.num_microbatches or 0) if has_microbatches else 0,
        "longest": int(n_S.max(initial=0)),
        "padding": -1 if sequences.num_padding is None else sequences.num_padding,
        **which._asdict(),
    }
    gathered = exchange.integers(np.array([*own.values()], dtype=np.int64)).T
    of_ranks = dict(zip(own, gathered, strict=True))
    strings, *known = (of_ranks[name] for name in ("string_ids", "kind", "number"))
    same = [of_ranks[name] for name in ("fingerprint", *_SAME_NUMBERS)]
    same.append(strings[strings >= 0])
    same += [values[values > 0] for values in known]
    if of_ranks["has_fault"].any() or any((values != values[:1]).any() for values in same):
        _raise_together(settings, sequences, given, which, fault, exchange)
    check_sum(f"Sequences.active_tokens of all {exchange.size} ranks", of_ranks["tokens"])
    return of_ranks


def _count_columns(
    columns: Mapping[str, Ints],
    sequences: CheckedSequences,
    of_ranks: Mapping[str, Ints],
    exchange: Exchange | OneProcess,
) -> StepTotals:
    """Gather a few numbers of every sequence, and count samples, prompts and token weights.

    If sequences are left out, of all and of those that are kept.
    """
    sequences_W = of_ranks["sequences"]
    gathered_columns = exchange.ragged([*columns.values()], sequences_W)
    table = dict(zip(columns, gathered_columns, strict=True))
    first = int(sequences_W[: exchange.rank].sum())
    groups = {kind: IdGroups.of(table[kind]) for kind in ID_KINDS if kind in table}
    check_ids(table, groups, sequences_W, sequences.samples_per_prompt)
    totals = _of_table(table, groups, sequences, first, of_ranks)
    if _LEFT_OUT not in table:
        return totals
    is_kept_A = table[_LEFT_OUT] == 0
    table = {name: one_A[is_kept_A] for name, one_A in table.items()}
    groups = {kind: IdGroups.of(table[kind]) for kind in groups}
    first = int(np.count_nonzero(is_kept_A[:first]))
    kept = _of_table(table, groups, sequences.kept, first, of_ranks, "kept_")
    numbers = _in_numbers(kept, of_ranks, int(np.count_nonzero(~is_kept_A)))
    return replace(totals, kept=replace(kept, counted=numbers))


def _of_table(
    table: Mapping[str, Ints],
    groups: Mapping[Kind, IdGroups],
    sequences: CheckedSequences,
    first: int,
    of_ranks: Mapping[str, Ints],
    kept: str = "",
) -> StepTotals:
    """Count a table of all ranks' sequences, of which this rank's begin at ``first``."""
    step_table = StepTable(
        counted_A=table["tokens"],
        groups=groups,
        sequence_weight_A=table[_OMEGA].view(np.float64) if _OMEGA in table else None,
        columns={name: table[_OWN + name].view(np.float64) for name in sequences.columns},
        own=slice(first, first + len(sequences.active_tokens)),
    )

    def totals(total: Any, counted_S: _Numbers, counted_A: _Numbers, active: str) -> StepTotals:
        found = _count_ids(groups, counted_S, counted_A, step_table.own)
        found["microbatch_tokens"], _ = _count_microbatches(sequences, counted_S)
        return StepTotals(
            active_tokens=total,
            microbatch_means=_microbatch_means(of_ranks, f"{kept}{active}_microbatches"),
            data_parallel_size=len(of_ranks["sequences"]),
            table=replace(step_table, counted_A=counted_A),
            **found,
        )

    n_S, v_S, tokens_A = sequences.active_tokens, sequences.token_weight_sums, table["tokens"]
    of_tokens = totals(int(tokens_A.sum()), n_S, tokens_A, "active")
    weighted = None
    if v_S is not None:
        v_A = table[_WEIGHTS].view(np.float64)
        weighted = totals(math.fsum(v_A), v_S, v_A, "weighted")
    n_b: Any = of_tokens.sample_lengths
    return replace(of_tokens, longest_sample=int(n_b.max(initial=0)), weighted=weighted)


_WEIGHTS, _OMEGA = GATHERED_FLOATS


def _microbatch_means(of_ranks: Mapping[str, Ints], active: str) -> float | None:
    """Sum, over ranks, the fraction of microbatches that are active; None if M is not known."""
    m_W = of_ranks["num_microbatches"]
    return float((of_ranks[active] / m_W).sum()) if m_W.all() else None


def _count_ids(
    groups: Mapping[Kind, IdGroups], tokens_S: _Numbers, tokens_A: _Numbers, own_A: slice
) -> dict[str, Any]:
    """Count samples and prompts of all ranks' sequences, and the tokens of this rank's."""
    found: dict[str, Any] = {
        "samples": len(tokens_A),
        "active_samples": int(np.count_nonzero(tokens_A)),
        "sample_lengths": tokens_A,
        "sample_tokens": tokens_S,
    }
    for kind, ids in groups.items():
        if kind == "group":  # the table of all sequences counts it
            continue
        tokens_I = ids.sums(tokens_A)
        found[f"{kind}s"], found[f"active_{kind}s"] = ids.num, int(np.count_nonzero(tokens_I))
        found[f"{kind}_tokens"] = tokens_I[ids.index_A[own_A]]
        if kind == "sample":
            found["sample_lengths"] = tokens_I
    return found


def _raise_together(
    settings: list[str],
    sequences: CheckedSequences,
    given: list[str],
    which: WhichStep,
    fault: str,
    exchange: Exchange | OneProcess,
) -> NoReturn:
    """Bring the first faulty rank's message to all ranks and raise it on each."""
    others = ("tokens", _LEFT_OUT, *GATHERED_FLOATS)
    of_ids = [name for name in given if name not in others and not name.startswith(_OWN)]
    ids = [f"{name} (strings)" if name in sequences.string_ids else name for name in of_ids]
    parts = [str(which), *settings, f"{', '.join(ids) or 'no'} ids"]
    parts += [n if n in given else f"no {n}" for n in (*GATHERED_FLOATS, _LEFT_OUT)]
    parts.append(
        f"the columns {', '.join(sequences.columns)}" if sequences.columns else "no columns"
    )
    parts += [f"{name} {getattr(sequences, name)}" for name in _SAME_NUMBERS]
    texts = exchange.messages(f"!{fault}" if fault else _BETWEEN.join(parts))
    for rank, text in enumerate(texts):
        if text.startswith("!"):
            raise PlanError(f"{exchange.name(rank)}: {text[1:]}")
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
    pairs = zip(texts[0].split(_BETWEEN), texts[other].split(_BETWEEN), strict=False)
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    raise PlanError(
        f"ranks of the data-parallel group disagree: rank 0 has "
        f"{' and '.join(first for first, _ in differing)}, rank {other} has "
        f"{' and '.join(second for _, second in differing)}: start all ranks with the same flags, "
        "pass the same ids on all of them, and begin the same steps in the same order"
    )


_BETWEEN = "\n"
_LEFT_OUT, _OWN = "left_out", "column "
_SAME_NUMBERS = ("samples_per_prompt", "sample_count")
"""What is passed once for the whole step, and must be the same on every rank."""
