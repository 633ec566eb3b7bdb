"""Checks of sample, prompt and group ids over the sequences of all ranks.

Shape suffixes: A = sequences of all ranks; W = ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import Ints, first_few
from megatron_lossagg.reduction.sequences import ID_KINDS

if TYPE_CHECKING:
    from megatron_lossagg.reduction.table import Table


def check_ids(table: Table, samples_per_prompt: int | None) -> None:
    """Refuse ids that contradict one another; warn of those that look as if they were not global.

    Alike on all ranks: no rank waits for another.
    """
    for kind in ("prompt", "group"):
        if getattr(table.rows, kind) is not None and table.rows.sample is not None:
            _check_one(kind, table)
    if samples_per_prompt is not None:
        _check_samples_per_prompt(table, samples_per_prompt)
        return
    for what, doubt in _doubts(table):
        warn_once(what, doubt)


def _doubts(table: Table) -> Iterator[tuple[str, str]]:
    """Describe ids that look like placeholders, or like numbers that start anew on every rank."""
    sequences_W = np.bincount(table.rank_A, minlength=1)
    for kind in ID_KINDS:
        ids_A, ids = getattr(table.rows, kind), table.ids(kind)
        if ids_A is None or ids is None:
            continue
        if len(ids_A) > 1 and (ids_A == ids_A[0]).all():
            yield (
                f"one {kind} id",
                f"all {len(ids_A)} sequences of the step have one {kind} id, so one {kind} has all "
                f"tokens: if the id is a placeholder, leave {kind}= out",
            )
        elif _is_every_id_on_one_rank(ids_A, ids.num, sequences_W):
            yield (
                f"{kind} ids of every rank",
                f"the data-parallel ranks have the same {kind} ids, which merges {kind}s if "
                "numbers start at 0 on every rank: add an offset per rank, or pass "
                "samples_per_prompt= to have it checked",
            )


def _is_every_id_on_one_rank(ids_A: Ints, num_ids: int, sequences_W: Ints) -> bool:
    """Whether several ranks have sequences and one of them has every id of the step.

    Such a rank has the lowest and the highest id, so the ids of other ranks are not grouped.
    """
    ends = np.cumsum(sequences_W)[sequences_W > 0]
    starts = ends - sequences_W[sequences_W > 0]
    if len(starts) < 2:
        return False
    lowest, highest = np.minimum.reduceat(ids_A, starts), np.maximum.reduceat(ids_A, starts)
    has_both = (lowest == lowest.min()) & (highest == highest.max())
    return any(
        len(np.unique(ids_A[start:end])) == num_ids
        for start, end in zip(starts[has_both], ends[has_both], strict=True)
    )


def _check_one(kind: str, table: Table) -> None:
    sample_A, kind_A = table.rows.sample, getattr(table.rows, kind)
    samples: Any = table.ids("sample")
    wrong = np.flatnonzero(kind_A != samples.one_of(kind_A)[samples.index_A])
    if len(wrong):
        sample = sample_A[wrong].min()
        found = np.unique(kind_A[sample_A == sample])
        raise PlanError(
            f"sample {sample} has sequences under {len(found)} {kind}s ({first_few(found, 4)}): a "
            f"sample belongs to one {kind}; ids are global over the data-parallel group"
        )


def _check_samples_per_prompt(table: Table, number: int) -> None:
    samples: Any = table.ids("sample")
    prompt_of_sample = samples.one_of(table.rows.prompt)[samples.num_sequences_I > 0]
    prompts, num_samples = np.unique(prompt_of_sample, return_counts=True)
    wrong = np.flatnonzero(num_samples != number)
    if len(wrong):
        raise PlanError(
            f"prompt {prompts[wrong[0]]} has {num_samples[wrong[0]]} samples over the step, "
            f"samples_per_prompt is {number}: ids are global over the data-parallel group, and "
            "numbers that start at 0 on every rank merge prompts; add rank * prompts per rank"
        )


def check_sample_count(given: int | None, found: int | None, *, has_ids: bool) -> None:
    """Raise :class:`PlanError` if a step has another number of samples than the caller knows."""
    if given is None or found is None or given == found:
        return
    if not has_ids:
        change = "without sample= each sequence is one: pass the sample of each sequence"
    elif found < given:
        change = (
            "equal ids are one sample, so ids that restart in each prompt or on each rank merge "
            'several: pass ids of the whole step, such as f"{prompt}/{sample}"'
        )
    else:
        change = (
            "each id is a sample: give all sequences of a sample one id, the same on every rank, "
            "and leave padding sequences out"
        )
    raise PlanError(f"got sample_count {given}, the step's ids have {found} samples; {change}")
