"""Checks of sample, prompt and group ids over the sequences of all ranks.

Shape suffixes: A = sequences of all ranks; W = ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.id_groups import IdGroups
from megatron_lossagg.reduction.integers import Ints, first_few
from megatron_lossagg.reduction.sequences import Kind


def check_ids(
    table: Mapping[str, Ints],
    groups: Mapping[Kind, IdGroups],
    sequences_W: Ints,
    samples_per_prompt: int | None,
) -> None:
    """Refuse ids that contradict one another; warn of those that look as if they were not global.

    ``table``: ids of all ranks' sequences by kind, ``[A]`` each. ``sequences_W``: how many
    sequences each rank has. Alike on all ranks: no rank waits for another.
    """
    for kind in ("prompt", "group"):
        if kind in groups and "sample" in groups:
            _check_one(kind, table, groups["sample"])
    if samples_per_prompt is not None:
        _check_samples_per_prompt(table, groups.get("sample"), samples_per_prompt)
        return
    for what, doubt in _doubts(table, groups, sequences_W):
        warn_once(what, doubt)


def _doubts(
    table: Mapping[str, Ints], groups: Mapping[Kind, IdGroups], sequences_W: Ints
) -> Iterator[tuple[str, str]]:
    """Describe ids that look like placeholders, or like numbers that start anew on every rank."""
    for kind, ids in groups.items():
        ids_A = table[kind]
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


def _check_one(kind: str, table: Mapping[str, Ints], samples: IdGroups) -> None:
    sample_A, kind_A = table["sample"], table[kind]
    wrong = np.flatnonzero(kind_A != samples.one_of(kind_A)[samples.index_A])
    if len(wrong):
        sample = sample_A[wrong].min()
        found = np.unique(kind_A[sample_A == sample])
        raise PlanError(
            f"sample {sample} has sequences under {len(found)} {kind}s ({first_few(found, 4)}): a "
            f"sample belongs to one {kind}; ids are global over the data-parallel group"
        )


def _check_samples_per_prompt(
    table: Mapping[str, Ints], samples: IdGroups | None, number: int
) -> None:
    prompt_of_sample = table["prompt"]
    if samples is not None:
        prompt_of_sample = samples.one_of(prompt_of_sample)[samples.num_sequences_I > 0]
    prompts = IdGroups.of(prompt_of_sample)
    wrong = np.flatnonzero((prompts.num_sequences_I != number) & (prompts.num_sequences_I > 0))
    if len(wrong):
        prompt = prompts.one_of(prompt_of_sample)[wrong[0]]
        raise PlanError(
            f"prompt {prompt} has {prompts.num_sequences_I[wrong[0]]} samples over the step, "
            f"samples_per_prompt is {number}: ids are global over the data-parallel group, and "
            "numbers that start at 0 on every rank merge prompts; add rank * prompts per rank"
        )
