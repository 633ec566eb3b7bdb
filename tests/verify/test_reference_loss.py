"""The reference against numbers worked out by hand, so that it is not checked against itself."""

import numpy as np
import pytest
import torch

from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import mean_of_prompts

# x, counted, trained, sample, prompt, microbatch. Sample 0 is split into two sequences, and is
# group 1; the others are group 2.
TABLE = [
    ([1.0, 2.0, 4.0], [1, 0, 1], [1, 0, 1], 0, 0, (0, 0)),  # sum 5, n 2
    ([3.0], [1], [1], 0, 0, (0, 1)),  # sum 3, n 1
    ([8.0, 6.0], [1, 1], [1, 0], 1, 0, (1, 0)),  # sum 8, n 2: a token is rejected
    ([9.0], [0], [0], 2, 1, (1, 0)),  # masked
    ([2.0, 2.0, 2.0, 4.0], [1, 1, 1, 1], [1, 1, 1, 1], 3, 2, (1, 1)),  # sum 10, n 4
]
# N 9; samples: (8, 3), (8, 2), (0, 0), (10, 4); prompts: (16, 5), (0, 0), (10, 4).
BY_HAND = {
    ("token_mean", True): 26 / 9,
    ("sample_mean", True): (8 / 3 + 8 / 2 + 0 + 10 / 4) / 4,
    ("sample_mean", False): (8 / 3 + 8 / 2 + 10 / 4) / 3,
    ("prompt_mean", True): (16 / 5 + 0 + 10 / 4) / 3,
    ("prompt_mean", False): (16 / 5 + 10 / 4) / 2,
    ("constant", True): 26 / 7 / 4,
    ("constant", False): 26 / 7 / 3,
    ("sample_sum", True): 26 / 4,
    # 3^-2 8 + 2^-2 8 + 4^-2 10, over 3^-1 + 2^-1 + 4^-1
    ("length_power", True): (8 / 9 + 8 / 4 + 10 / 16) / (1 / 3 + 1 / 2 + 1 / 4),
    ("token_sum", True): 26 / 7,
    # groups: sum 8 of 3 tokens, sum 18 of 6; 1 and 3 samples, of which 2 are active
    ("balanced", True): (8 / 3 + 3 * 18 / 6) / 4,
    ("balanced", False): (8 / 3 + 2 * 18 / 6) / 3,
    ("row_mean", True): ((5 / 2 + 3) / 2 + 8 / 2 + 0 + 10 / 4) / 4,
    ("row_mean", False): ((5 / 2 + 3) / 2 + 8 / 2 + 10 / 4) / 3,
    # prompts: (means of samples 0 and 1) / 2, masked, 10 / 4
    ("own_weights", True): (((5 / 2 + 3) / 2 + 8 / 2) / 2 + 0 + 10 / 4) / 3,
    ("own_weights", False): (((5 / 2 + 3) / 2 + 8 / 2) / 2 + 10 / 4) / 2,
    # rank 0: 5/2, 3/1 over M 3; rank 1: 8/2, 10/4 over M 2
    ("microbatch_token_mean", True): ((5 / 2 + 3) / 3 + (4 + 10 / 4) / 2) / 2,
}
EXPECTED_SUMS = {  # the same with every x = 1 and the loss mask
    "token_mean": 1,
    "sample_mean": 3 / 4,
    "prompt_mean": 2 / 3,
    "constant": 9 / 7 / 4,
    "sample_sum": 9 / 4,
    "token_sum": 9 / 7,
    "balanced": 1,
    "row_mean": 3 / 4,
    "own_weights": 2 / 3,
    "length_power": 1,
    "microbatch_token_mean": (2 / 3 + 2 / 2) / 2,
}


def sequences(*, trained=True):
    return [
        {
            "x": [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in x],
            "counted": counted,
            "trained": kept if trained else counted,
            "sample": sample,
            "prompt": prompt,
            "group": 1 if sample == 0 else 2,
            "microbatch": microbatch,
        }
        for x, counted, kept, sample, prompt, microbatch in TABLE
    ]


def options(mode):
    return {
        "divisor": 7 if mode in ("constant", "token_sum") else None,
        "exponent": 2 if mode == "length_power" else None,
        "microbatches": [3, 2],
        "weights": mean_of_prompts,
    }


@pytest.mark.parametrize(("mode", "count_empty"), BY_HAND)
def test_the_loss_is_the_one_computed_by_hand(mode, count_empty):
    loss = reference_loss.step_loss(mode, sequences(), count_empty=count_empty, **options(mode))
    assert loss.item() == pytest.approx(BY_HAND[mode, count_empty], rel=1e-15)


def test_a_sequences_weight_multiplies_its_losses_and_no_count():
    pairs = zip(sequences(), [2, 0, 1, 5, 3], strict=True)
    weighted = [{**one, "sequence_weight": w} for one, w in pairs]
    loss = reference_loss.step_loss("sample_mean", weighted, **options("sample_mean"))
    assert loss.item() == pytest.approx((2 * 5 / 3 + 8 / 2 + 3 * 10 / 4) / 4, rel=1e-15)


def test_a_tokens_weight_multiplies_its_loss_and_its_count():
    weights = [[2, 9, 0.5], [3], [1, 4], [9], [0, 1, 1, 1]]
    weighted = [{**one, "weight": v} for one, v in zip(sequences(), weights, strict=True)]
    loss = reference_loss.step_loss("token_mean", weighted, **options("token_mean"))
    assert loss.item() == pytest.approx((4 + 9 + 8 + 8) / (2.5 + 3 + 5 + 3), rel=1e-15)
    loss = reference_loss.step_loss("sample_mean", weighted, **options("sample_mean"))
    assert loss.item() == pytest.approx(((4 + 9) / 5.5 + 8 / 5 + 8 / 3) / 4, rel=1e-15)


@pytest.mark.parametrize(
    ("count_left_out", "wanted"),
    [(False, (5 / 2 + 8 / 2 + 10 / 4) / 3), (True, (8 / 3 + 8 / 2 + 0 + 10 / 4) / 4)],
)
def test_a_sequence_that_is_left_out_leaves_every_count_and_the_loss(count_left_out, wanted):
    step = sequences()
    for index in (1, 3):  # a row of a sample, and an empty sample
        step[index]["left_out"] = True
    loss = reference_loss.step_loss("sample_mean", step, count_left_out=count_left_out)
    assert loss.item() == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize(
    ("count_empty", "by_hand"),
    [
        (True, {"R": 5, "B": 4, "P": 3, "R_b": [2, 2, 1, 1, 1], "k_p": [2, 2, 2, 1, 1],
                "k_c": [1, 1, 3, 3, 3]}),
        (False, {"R": 4, "B": 3, "P": 2, "R_b": [2, 2, 1, 0, 1], "k_p": [2, 2, 2, 0, 1],
                 "k_c": [1, 1, 2, 2, 2]}),
    ],
)  # fmt: skip
def test_a_weights_function_gets_the_counts_computed_by_hand(count_empty, by_hand):
    tokens = {"N": 9, "n_s": [2, 1, 2, 0, 4], "n_b": [3, 3, 2, 0, 4], "n_p": [5, 5, 5, 0, 4]}
    given = []
    found = reference_loss.step_loss(
        "own_weights",
        sequences(),
        count_empty=count_empty,
        weights=lambda counts: given.append(counts) or float("inf") ** (counts.n_s == 0),
    )
    assert found.item() == 5 + 3 + 8 + 10  # the weight of an empty sequence is not looked at
    for name, wanted in {**tokens, "n_c": [3, 3, 6, 6, 6], **by_hand}.items():
        assert np.array_equal(getattr(given[0], name), wanted), name


@pytest.mark.parametrize("mode", EXPECTED_SUMS)
def test_the_weight_sum_is_the_loss_of_ones(mode):
    found = reference_loss.weight_sum(mode, sequences(trained=False), **options(mode))
    assert found == pytest.approx(EXPECTED_SUMS[mode], rel=1e-15)


@pytest.mark.parametrize(
    ("mode", "weight"),
    [("token_mean", 1 / 9), ("sample_mean", 1 / 4 / 2), ("prompt_mean", 1 / 3 / 5)],
)
def test_a_tokens_gradient_is_its_weight_and_0_where_it_is_not_trained(mode, weight):
    step = sequences()
    reference_loss.step_loss(mode, step, **options(mode)).backward()
    kept, rejected = step[2]["x"]
    assert kept.grad.item() == pytest.approx(weight, rel=1e-15)
    assert rejected.grad is None
    assert step[3]["x"][0].grad is None
