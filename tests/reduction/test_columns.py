"""A weights function reads the caller's own numbers of each sequence, against loops over tokens."""

import math
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from own_columns import mean_of_teachers, per_row, per_turn

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import PlanError

TURNS, TEACHER = [2, 1, 4, 1], [0, 0, 5, 3]
MASKS = [[1, 1, 0], [1], [1, 0, 1, 1, 1], [0, 0]]  # the teacher 3 has no active token
COLUMNS = {"turns": TURNS, "teacher": torch.tensor(TEACHER)}


def planned(function, columns=COLUMNS, **options):
    active = [sum(mask) for mask in MASKS]
    sequences = Sequences(active_tokens=active, columns=columns)
    return plan_step(Aggregation(weights=function, **options), sequences)


def turns_over_tokens(x):
    total = 0
    for losses, mask in zip(x, MASKS, strict=True):
        for loss, m in zip(losses, mask, strict=True):
            total += m * loss
    return total / sum(TURNS)


def teachers_over_tokens(x):
    means = []
    for teacher in (0, 5):
        total, tokens = 0, 0
        for losses, mask, whose in zip(x, MASKS, TEACHER, strict=True):
            for loss, m in zip(losses, mask, strict=True):
                total += m * loss * (whose == teacher)
                tokens += m * (whose == teacher)
        means.append(total / tokens)
    return sum(means) / len(means)


@pytest.mark.parametrize(
    ("function", "reference"),
    [(per_turn, turns_over_tokens), (mean_of_teachers, teachers_over_tokens)],
)
def test_loss_and_gradient_are_those_of_loops_over_tokens(function, reference):
    offsets = np.cumsum([0, *map(len, MASKS)]).tolist()
    x = torch.linspace(0.5, 2, offsets[-1], dtype=torch.float64, requires_grad=True)
    wanted = reference([x[a:b] for a, b in pairwise(offsets)])
    (slope,) = torch.autograd.grad(wanted, x)
    plan = planned(function)
    layout = Layout.thd_zigzag(offsets, cp_size=1, cp_rank=0)
    loss = plan.reducer([0, 1, 2, 3], torch.tensor([*chain(*MASKS)]), layout)(x)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-14)
    assert x.grad.tolist() == pytest.approx(slope.tolist(), rel=1e-14)
    masked = math.fsum(slope.tolist())
    assert plan.expected_weight == pytest.approx(masked, rel=1e-14)


@pytest.mark.parametrize(("count_empty", "rows"), [(True, 4), (False, 3)])
def test_it_reads_the_number_of_rows(count_empty, rows):
    weights = planned(per_row, count_empty=count_empty).weights
    assert weights.tolist() == [2 / rows, 1 / rows, 4 / rows, 0]


def test_it_cannot_change_what_a_shadow_reads():
    def function(counts):
        counts.columns["turns"][0] = 7
        return 1

    with pytest.raises(PlanError, match="read-only"):
        planned(function)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, r"reads the column 'turns', and the step has none: pass Sequences\(columns={'tu"),
        ({"turn": TURNS}, "the step has 'turn': pass"),
        ({"turns": TURNS[:3]}, r"columns\['turns'\]: got int64 of shape \(3,\), expected 4"),
        ({"turns": [*"abcd"]}, r"columns\['turns'\]: got <U1 .*, expected 4 numbers"),
        ({"turns": [1, math.nan, 1, 1]}, r"got nan at index 1, expected finite numbers"),
        ([TURNS], "expected numbers per sequence by name: pass a dict"),
        ({3: TURNS}, "expected numbers per sequence by name: pass a dict"),
    ],
)
def test_a_column_that_is_missing_or_is_none_is_refused(columns, message):
    with pytest.raises(PlanError, match=message):
        planned(per_turn, columns)


def test_a_microbatch_gives_columns_of_its_segments_without_padding():
    given = {"active_tokens": [3, 2, 0], "is_padding": [0, 0, 1]}
    microbatch = Sequences(**given, columns={"turns": [1, 4, 0]}).checked()
    assert microbatch.columns["turns"].tolist() == [1, 4]
    with pytest.raises(PlanError, match=r"columns turns: got 2 entries, expected 3"):
        Sequences(**given, columns={"turns": [1, 4]}).checked()
