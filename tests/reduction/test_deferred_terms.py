"""Two modes in one deferred step: right for every pair with one total, and no other pair is."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.before import check_total
from megatron_lossagg.verify.reference_loss import step_loss

AGGREGATIONS = [
    Aggregation(mode, **numbers, count=count, count_empty=count_empty, count_left_out=left_out)
    for mode, numbers in (
        ("token_mean", {}),
        ("sample_mean", {}),
        ("prompt_mean", {}),
        ("constant", {"divisor": 3.5}),
        ("constant", {"divisor": 20.5}),
        ("sample_sum", {}),
        ("token_sum", {}),
        ("token_sum", {"divisor": 3.5}),
        ("token_sum", {"divisor": 20.5}),
        ("length_power", {"exponent": 0.5}),
        ("length_power", {"exponent": 1.25}),
        ("balanced", {}),
        ("row_mean", {}),
    )
    for count, count_empty, left_out in (
        ("mask", True, False),
        ("mask", False, False),
        ("mask", True, True),
        ("weights", True, False),
        ("weights", False, True),
    )
]
# Of each call its sequences: sample, prompt, group, tokens' weights (None: masked), left out. No
# two totals are equal.
CALLS = [
    [
        (0, 0, 0, [0.5, 1.0, 2.0, None], 0),
        (0, 0, 0, [1.0, 0.25], 0),
        (1, 0, 1, [0.0, 0.0, 0.0], 0),  # active, and its weights are 0
        (2, 1, 1, [None, None], 0),
        (3, 1, 2, [1.5, 0.5, 1.0, 1.0, 3.0], 1),
        (8, 6, 6, [0.25, 0.5, 2.0], 1),
        (9, 0, 1, [None], 0),
    ],
    [
        (4, 2, 3, [2.0, 0.5], 0),
        (5, 5, 4, [None], 0),
        (6, 3, 4, [1.0] * 7, 0),
        (6, 3, 4, [0.125, None, 4.0], 0),
        (7, 4, 5, [0.75, 1.0], 1),
        *((10 + n, 3, 7, [1.0 + n, 0.375], 0) for n in range(5)),
    ],
]
LOSSES = [[torch.randn(len(one[3]), dtype=torch.float64) for one in call] for call in CALLS]


def leaves():
    return [[x.clone().requires_grad_() for x in call] for call in LOSSES]


def by_hand(aggregation, losses):
    """Return the loss of one step over the sequences of both calls, by loops."""
    rows = []
    for call, of_call in zip(CALLS, losses, strict=True):
        for (sample, prompt, group, weights, left_out), x in zip(call, of_call, strict=True):
            mask = [v is not None for v in weights]
            ids = {"sample": sample, "prompt": prompt, "group": group}
            row = {"x": list(x), "counted": mask, "trained": mask, "left_out": left_out, **ids}
            if aggregation.count == "weights":
                row["weight"] = [v or 0.0 for v in weights]
            rows.append(row)
    return step_loss(
        aggregation.mode,
        rows,
        divisor=aggregation.divisor,
        exponent=aggregation.exponent,
        count_empty=aggregation.count_empty,
        count_left_out=aggregation.count_left_out,
    )


def planned(aggregation, call):
    sample, prompt, group, weights, left_out = zip(*call, strict=True)
    sequences = Sequences(
        active_tokens=[sum(v is not None for v in one) for one in weights],
        token_weight_sums=[sum(v or 0.0 for v in one) for one in weights],
        sample=sample,
        prompt=prompt,
        group=group,
        left_out=left_out,
    )
    return plan_step(aggregation, sequences)


def deferred(own):
    """Make the reducers of a deferred step's calls, and what the step is divided by."""
    plans, reducers = [planned(own, call) for call in CALLS], []
    totals = [plan.counted_total for plan in plans]
    for plan, call in zip(plans, CALLS, strict=True):
        weights = [v for one in call for v in one[3]]
        layout = Layout.thd_zigzag(
            np.cumsum([0, *(len(one[3]) for one in call)]), cp_size=1, cp_rank=0
        )
        reducer = replace(plan, total=1.0).reducer(
            range(len(call)),
            torch.tensor([v is not None for v in weights]),
            layout,
            token_weights=torch.tensor([v or 0.0 for v in weights], dtype=torch.float64),
        )
        reducers.append(reducer)
    return reducers, totals[0] if own.mode == "token_sum" else sum(totals)


def with_gradient(loss, losses):
    """Return a loss and its gradient, in one vector."""
    given = [x for call in losses for x in call]
    found = torch.autograd.grad(loss, given, materialize_grads=True)
    return torch.cat([loss.detach()[None], *found])


@functools.cache
def expected_of(aggregation, power):
    """Compute by hand, of a power of the losses."""
    losses = leaves()
    powers = [[x**power for x in call] for call in losses]
    return with_gradient(by_hand(aggregation, powers), losses)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("own", AGGREGATIONS, ids=lambda one: f"{one}, empty {one.count_empty}")
def test_terms_are_right_if_they_have_the_total_of_the_step_and_refused_else(own):
    reducers, total = deferred(own)
    for other in AGGREGATIONS:
        losses = leaves()
        loss = 0.0
        for reducer, of_call in zip(reducers, losses, strict=True):
            x = torch.cat(of_call)
            loss = loss + reducer(x) + reducer.under(other)(x**2)
        expected = expected_of(own, 1) + expected_of(other, 2)
        error = (with_gradient(loss / total, losses) - expected).norm()
        if own.total == other.total:
            check_total(own, other, "term")
            assert error < 1e-12, other
        else:
            assert error > 1e-4, other  # so that nothing right is refused
            with pytest.raises(ContractError, match=r"got a term under .* in a deferred step"):
                check_total(own, other, "term")


def test_aggregations_with_two_totals_are_written_differently():
    for one, other in itertools.combinations(AGGREGATIONS, 2):
        assert one.total == other.total or str(one) != str(other)
