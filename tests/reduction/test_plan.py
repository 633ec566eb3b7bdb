"""From counts to weights, calculated by hand on small numbers."""

import copy
import gc
import pickle
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from steps import weights_of

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.aggregation import Options

LARGEST = [2**52, 2**52 - 4096] + [1] * 4096  # B n_b is above 2^63
SPLIT = {"active_tokens": [4, 2, 3], "sample": [5, 5, 9], "prompt": [0, 0, 0]}
ONE_EMPTY = {"active_tokens": [1, 0, 3], "sample": [5, 6, 7], "prompt": [0, 1, 2]}
NAMES = {"active_tokens": [1, 2, 4], "sample": [-2, 2**40, 0], "prompt": [-2, -2, 2**62]}
BY_HAND = {
    "every token alike": ("token_mean", {"active_tokens": [1, 9]}, [1 / 10] * 2),
    "every sample alike": ("sample_mean", {"active_tokens": [1, 9]}, [1 / 2, 1 / 18]),
    "a prompt is sum over sum, not a mean of means": (
        "prompt_mean", {"active_tokens": [1, 9], "prompt": [0, 0]}, [1 / 10] * 2,
    ),
    "two prompts": (
        "prompt_mean",
        {"active_tokens": [1, 9, 5], "prompt": [7, 7, -3]},
        [1 / 20, 1 / 20, 1 / 10],
    ),
    "a constant and the number of samples": (
        "constant 8", {"active_tokens": [1, 9]}, [1 / 16] * 2,
    ),
    "a constant and more samples": ("constant 8", {"active_tokens": [1, 9, 3, 3]}, [1 / 32] * 4),
    "no constant": ("token_sum", {"active_tokens": [1, 9]}, [1, 1]),
    "only a constant": ("token_sum 8", {"active_tokens": [1, 9, 4]}, [1 / 8] * 3),
    "the number of samples": ("sample_sum", {"active_tokens": [1, 9, 4]}, [1 / 3] * 3),
    "empty microbatches count in M": (
        "microbatch_token_mean",
        {"active_tokens": [1, 9, 5], "microbatch": [0, 0, 2], "num_microbatches": 4},
        [1 / 40, 1 / 40, 1 / 20],
    ),
    "M is the largest microbatch plus one": (
        "microbatch_token_mean",
        {"active_tokens": [1, 9, 5], "microbatch": [0, 0, 2]},
        [1 / 30, 1 / 30, 1 / 15],
    ),
    "microbatch indices have gaps": (
        "microbatch_token_mean",
        {"active_tokens": [1, 3], "microbatch": [0, 2**50], "num_microbatches": 2**51},
        [1 / 2**51, 1 / (3 * 2**51)],
    ),
    "a masked sample counts": ("sample_mean", {"active_tokens": [2, 0, 2]}, [1 / 6, 0, 1 / 6]),
    "a masked sample counts in V": (
        "sample_mean, V", {"active_tokens": [2, 0, 2]}, [1 / 4, 0, 1 / 4],
    ),
    "a masked sample counts in a sum": (
        "sample_sum", {"active_tokens": [2, 0, 2]}, [1 / 3, 0, 1 / 3],
    ),
    "a masked sample counts in a sum over V": (
        "sample_sum, V", {"active_tokens": [2, 0, 2]}, [1 / 2, 0, 1 / 2],
    ),
    "a masked sample counts beside a constant": (
        "constant 4", {"active_tokens": [2, 0, 2]}, [1 / 12, 0, 1 / 12],
    ),
    "a masked sample counts beside a constant in V": (
        "constant 4, V", {"active_tokens": [2, 0, 2]}, [1 / 8, 0, 1 / 8],
    ),
    "a masked prompt counts": (
        "prompt_mean", {"active_tokens": [2, 0], "prompt": [0, 1]}, [1 / 4, 0],
    ),
    "a masked prompt counts in Q": (
        "prompt_mean, V", {"active_tokens": [2, 0], "prompt": [0, 1]}, [1 / 2, 0],
    ),
    "one active token keeps a sample": ("sample_sum, V", ONE_EMPTY, [1 / 2, 0, 1 / 2]),
    "one active token keeps a prompt": ("prompt_mean, V", ONE_EMPTY, [1 / 2, 0, 1 / 6]),
    "a split sample is one sample": ("sample_mean", SPLIT, [1 / 12, 1 / 12, 1 / 6]),
    "a split sample in a sum": ("sample_sum", SPLIT, [1 / 2] * 3),
    "the prompt of a split sample": ("prompt_mean", SPLIT, [1 / 9] * 3),
    "an empty first sequence": ("sample_mean", {"active_tokens": [0, 2]}, [0, 1 / 4]),
    "an empty last sequence": ("sample_mean", {"active_tokens": [2, 0]}, [1 / 4, 0]),
    "an empty first sequence of a prompt": (
        "prompt_mean", {"active_tokens": [0, 2], "prompt": [0, 0]}, [0, 1 / 2],
    ),
    "an empty first microbatch": (
        "microbatch_token_mean", {"active_tokens": [0, 2], "microbatch": [0, 1]}, [0, 1 / 4],
    ),
    "an id is only a name": ("sample_mean", NAMES, [1 / 3, 1 / 6, 1 / 12]),
    "a prompt id is only a name": ("prompt_mean", NAMES, [1 / 6, 1 / 6, 1 / 8]),
    "the largest counts do not wrap": (
        "sample_mean", {"active_tokens": LARGEST}, [1 / (4098 * 2**52)],
    ),
    "the largest counts of prompts do not wrap": (
        "prompt_mean",
        {"active_tokens": LARGEST, "prompt": range(4098)},
        [1 / (4098 * 2**52)],
    ),
}  # fmt: skip
"""Mode, with divisor and V where empty ones do not count; sequences; the first weights."""


@pytest.mark.parametrize("what", BY_HAND)
def test_the_weights_are_those_calculated_by_hand(what):
    label, sequences, expected = BY_HAND[what]
    assert weights_of(label, **sequences)[: len(expected)] == expected


def test_microbatch_token_mean_alone_depends_on_the_microbatches():
    whole = {"active_tokens": [1, 9], "microbatch": [0, 0]}
    split = {"active_tokens": [1, 9], "microbatch": [0, 1]}
    assert weights_of("microbatch_token_mean", **whole) == [1 / 10, 1 / 10]
    assert weights_of("microbatch_token_mean", **split) == [1 / 2, 1 / 18]
    for mode in ("token_mean", "sample_mean", "sample_sum", "token_sum"):
        assert weights_of(mode, **whole) == weights_of(mode, **split)


def test_masked_sequences_add_no_phantom_token():
    assert weights_of("token_mean", active_tokens=[4, 0, 0, 4]) == [1 / 8, 0, 0, 1 / 8]


def test_counts_are_exact_beyond_2_24_and_2_31():
    assert weights_of("token_mean", active_tokens=[2**24, 1])[0] == 1 / (2**24 + 1)
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[2**31, 2**33, 1]))
    assert plan.totals.active_tokens == 2**31 + 2**33 + 1


def test_weights_are_float64_on_the_cpu():
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=torch.tensor([1, 2])))
    assert plan.weights.dtype == torch.float64
    assert plan.weights.device.type == "cpu"


def test_under_is_the_same_step_under_another_aggregation():
    plan = plan_step(
        Aggregation("constant", divisor=8), Sequences(active_tokens=[1, 9], prompt=[0, 1])
    )
    assert plan.under("token_mean").weights.tolist() == [1 / 10, 1 / 10]
    assert plan.under("trl:grpo").weights.tolist() == [1 / 2, 1 / 18]
    assert plan.under(Aggregation("prompt_mean")).weights.tolist() == [1 / 2, 1 / 18]
    assert plan.weights.tolist() == [1 / 16, 1 / 16]


def test_a_step_with_no_active_tokens_has_weight_0_and_warns_once():
    for mode in ("token_mean", "sample_mean", "sample_sum", "token_sum"):
        with pytest.warns(RuntimeWarning, match="no active tokens") as caught:
            assert weights_of(mode, active_tokens=[0, 0]) == [0, 0]
        assert len(caught) == 1
    with pytest.raises(PlanError, match="--loss-aggregation-empty-step"):
        plan_step(
            Aggregation("token_mean"),
            Sequences(active_tokens=[0]),
            options=Options(empty_step="error"),
        )


def test_the_warning_of_an_empty_step_points_at_its_caller():
    with pytest.warns(RuntimeWarning, match="no active tokens") as caught:
        plan_step(Aggregation("token_mean"), Sequences(active_tokens=[0]))
    assert caught[0].filename == __file__


def test_a_custom_reducers_plan_has_totals_and_no_weights():
    custom = Aggregation("custom", reducer_path="math:fsum")
    plan = plan_step(custom, Sequences(active_tokens=[2, 3]))
    assert plan.totals.active_tokens == 5
    assert plan.expected_weight is None
    with pytest.raises(PlanError, match=r"plan\.under\(mode\)\.weights"):
        plan.weights  # noqa: B018
    assert plan.under("token_mean").weights.tolist() == [1 / 5, 1 / 5]


def test_a_plan_keeps_the_microbatch_of_each_sequence():
    sequences = Sequences(active_tokens=[1, 9], microbatch=[1, 0])
    plan = plan_step(Aggregation("token_mean"), sequences)
    assert plan.under("sample_mean").sequences.microbatch.tolist() == [1, 0]


def test_num_microbatches_without_microbatch_is_only_stored():
    sequences = Sequences(active_tokens=[1, 9], num_microbatches=3)
    plan = plan_step(Aggregation("token_mean"), sequences)
    assert plan.sequences.num_microbatches == 3
    assert plan.totals.microbatch_means is None
    assert plan.weights.tolist() == [1 / 10, 1 / 10]


def test_a_mode_by_its_name_counts_what_the_plan_counts():
    aggregation = Aggregation("sample_sum", count_empty=False)
    plan = plan_step(aggregation, Sequences(active_tokens=[3, 0]))
    assert plan.under("sample_sum").weights.tolist() == plan.weights.tolist() == [1, 0]
    assert plan.under("sample_mean").weights.tolist() == [1 / 3, 0]
    assert plan.under(Aggregation("sample_mean")).weights.tolist() == [1 / 6, 0]
    assert plan.under("trl:luspo").weights.tolist() == [1 / 2, 0]  # it says so
    with pytest.raises(PlanError, match="got 5, expected an Aggregation or the name of a mode"):
        plan.under(5)


def test_a_divisor_below_the_longest_sample_warns_once(monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    weights_of("constant 6", active_tokens=[6, 2])
    weights_of("token_sum 2", active_tokens=[6, 2])
    with pytest.warns(RuntimeWarning, match="divides by 5, and a sample has 6 tokens"):
        weights_of("constant 5", active_tokens=[6, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights_of("constant 4", active_tokens=[6, 2])
    monkeypatch.setattr(faults, "_warned", set())
    with pytest.warns(RuntimeWarning, match="a sample has 8 tokens"):
        weights_of("constant 7", active_tokens=[6, 2], sample=[0, 0])


def test_a_divisor_below_the_longest_sample_warns_under_too(monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[300]))
    with pytest.warns(RuntimeWarning, match="divides by 10, and a sample has 300 tokens"):
        plan.under(Aggregation("constant", divisor=10))


@pytest.mark.parametrize("divisor", [1e308, 1e40, 1e-40])
def test_a_weight_that_float32_does_not_hold_is_refused(divisor):
    message = r"got the weight .* of a sequence, beyond what float32 holds, from constant: w_s"
    with pytest.raises(PlanError, match=message):
        weights_of(f"constant {divisor}", active_tokens=[0, 3])


def test_a_reducer_path_that_leads_nowhere_is_refused_when_the_step_is_planned():
    custom = Aggregation("custom", reducer_path="no.such:f")
    with pytest.raises(PlanError, match=r"'no\.such:f' raised ModuleNotFoundError"):
        plan_step(custom, Sequences(active_tokens=[3]))


WHOLE_NUMBERS = {
    "a float mask's sums": torch.tensor([3.0, 2.0]),
    "in bfloat16": torch.tensor([3.0, 2.0], dtype=torch.bfloat16),
    "with a gradient": torch.tensor([3.0, 2.0], requires_grad=True),
    "[n, 1]": torch.tensor([[3], [2]]),
    "an array of floats": np.array([3.0, 2.0], dtype=np.float16),
    "a generator": (n for n in (3, 2)),
}


@pytest.mark.parametrize("counts", WHOLE_NUMBERS.values(), ids=WHOLE_NUMBERS)
def test_counts_are_whole_numbers_of_any_type(counts):
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=counts))
    assert plan.active_tokens.tolist() == [3, 2]
    assert plan.weights.tolist() == [1 / 5, 1 / 5]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_plan_can_be_copied_and_pickled(copied):
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[3, 1]))
    assert plan.counts.B == 2
    again = copied(plan)
    assert again.weights.tolist() == plan.weights.tolist() == [1 / 6, 1 / 2]
    assert again.under("token_mean").weights.tolist() == [1 / 4, 1 / 4]


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "sample_sum"])
def test_the_calls_of_an_optimizer_step_share_its_weights(mode):
    plan = plan_step(Aggregation(mode), Sequences(active_tokens=[3, 1, 0, 4]))
    for one in (plan, plan.under("token_sum")):
        shared = replace(one, num_calls=2)
        assert shared.weights.tolist() == [w / 2 for w in one.weights.tolist()]
        assert shared.expected_weight == one.expected_weight / 2
        assert (
            shared.under("token_mean").expected_weight
            == one.under("token_mean").expected_weight / 2
        )


@pytest.mark.parametrize("left_out", [None, [False, True, False]])
@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "microbatch_token_mean"])
def test_nothing_of_a_plan_waits_for_the_garbage_collector(mode, left_out):
    """A training loop may have turned it off, as Megatron-LM's --manual-gc does."""
    given = {"prompt": [0, 0, 1], "microbatch": [0, 0, 1], "left_out": left_out}
    sequences = Sequences(active_tokens=[3, 1, 2], **given)
    gc.collect()
    gc.disable()
    try:
        plan = plan_step(Aggregation(mode), sequences)
        assert plan.weights.sum() > 0
        assert None not in (plan.expected_weight, plan.counted, plan.totals)
        layout = Layout.local([3, 1], cp_size=1, cp_rank=0)
        assert plan.reducer([0, 1], torch.ones(4), layout)(torch.ones(4)) > 0
        left = [weakref.ref(one) for one in (plan, plan.table, plan.counts, plan.sequences)]
        del plan
        assert [ref() for ref in left] == [None] * 4
    finally:
        gc.enable()
