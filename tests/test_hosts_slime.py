"""The four-argument hub of slime and miles: masked sum / L and nothing else."""

import sys
import types

import pytest
import torch
from conftest import launched

from megatron_lossagg import microbatch, reducer
from megatron_lossagg import plan as plan_module
from megatron_lossagg.errors import (
    AggregationError,
    ContractError,
    LayoutError,
    ReducerError,
)
from megatron_lossagg.hosts import slime


@pytest.fixture
def miles_cp(monkeypatch):
    """Replace miles' parallel state, which needs no Megatron."""

    def at(size, rank):
        cp = types.SimpleNamespace(size=size, rank=rank)
        module = types.ModuleType("miles.backends.training_utils.parallel")
        module.get_parallel_state = lambda: types.SimpleNamespace(cp=cp)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    at(1, 0)
    return at


@pytest.fixture
def host_args(monkeypatch):
    """Replace the place where Megatron-LM keeps the host's arguments."""

    def these(**arguments):
        module = types.ModuleType("megatron.training.global_vars")
        module.get_args = lambda: types.SimpleNamespace(**arguments)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return these


MASKS = [torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)]


def test_on_live_megatron_the_hosts_own_scaling_makes_it_dr_grpo(tmp_path):
    file = tmp_path / "reference.pt"
    launched("hub_worker.py", "reference", file, processes=1)
    assert "HUB equals the oracle" in launched("hub_worker.py", "compare", file, processes=4)


@pytest.mark.parametrize(
    ("name", "divisor"), [("constant_40960", 40960), ("constant_5e-1", 0.5), ("constant_0p5", 0.5)]
)
def test_the_divisor_is_encoded_in_the_name(miles_cp, name, divisor):
    reducer = getattr(slime, name)([5, 4], [3, 2], MASKS, False)
    x = torch.tensor([1.0, torch.nan, 2.0, 4.0, 8.0])
    assert reducer(x).item() == 15.0 / divisor


@pytest.mark.parametrize("name", ["constant_0", "constant_-3", "constant_nan", "constant_many"])
def test_a_name_without_a_valid_divisor_is_refused(name):
    with pytest.raises(AggregationError, match="is not a valid divisor: write a finite number"):
        getattr(slime, name)


def test_another_name_is_an_attribute_error_that_lists_the_valid_names():
    with pytest.raises(AttributeError, match=r"constant_<L>, such as constant_40960"):
        slime.token_mean  # noqa: B018


def test_shares_of_the_context_parallel_ranks_add_up(miles_cp):
    # Row 0 of 5 tokens is split into chunks of 2, row 1 of 4 into chunks of 1; response token j
    # sits on logit prompt - 1 + j.
    x = {0: [1.0, 2.0, 4.0], 1: [8.0, 16.0]}
    logits = {0: [1, 2, 3], 1: [1, 2]}
    total = 0
    for rank in (0, 1):
        miles_cp(2, rank)
        held = []
        for row, chunk in ((0, 2), (1, 1)):
            for k in (rank, 3 - rank):
                held += [v for v, p in zip(x[row], logits[row], strict=True) if p // chunk == k]
        total += slime.constant_10([5, 4], [3, 2], MASKS, False)(torch.tensor(held)).item()
    assert total == pytest.approx((1 + 4 + 8 + 16) / 10)


def test_per_token_is_refused_because_the_host_would_divide_by_tokens(miles_cp):
    with pytest.raises(ContractError, match="drop that flag"):
        slime.constant_10([5, 4], [3, 2], MASKS, True)


def test_bshd_with_context_parallelism_is_refused(miles_cp, host_args):
    miles_cp(2, 0)
    host_args(qkv_format="bshd")
    with pytest.raises(LayoutError, match=r"max_seq_len.*--qkv-format thd"):
        slime.constant_10([5, 4], [3, 2], MASKS, False)


def test_masks_sliced_beforehand_are_refused(miles_cp):
    with pytest.raises(LayoutError, match="one whole mask per sample"):
        slime.constant_10([5, 4], [3, 2], [MASKS[0][:1], MASKS[1]], False)


def test_losses_that_were_gathered_over_cp_are_refused(miles_cp):
    miles_cp(2, 0)
    reducer = slime.constant_10([5, 4], [3, 2], MASKS, False)
    with pytest.raises(ReducerError, match="pass the losses of this rank's slice"):
        reducer(torch.ones(5))


def test_a_divisor_below_a_response_warns_once(miles_cp, monkeypatch):
    monkeypatch.setattr(plan_module, "_warned", set())
    slime.constant_3([5, 4], [3, 2], MASKS, False)
    with pytest.warns(RuntimeWarning, match="divides by 2, and a sample has 3 tokens"):
        slime.constant_2([5, 4], [3, 2], MASKS, False)
    slime.constant_2([5, 4], [3, 2], MASKS, False)


def test_a_nan_on_a_device_is_raised_with_its_rows_by_a_later_call(miles_cp, monkeypatch):
    for module in (microbatch, reducer):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    make = lambda: slime.constant_12345([5, 4], [3, 2], MASKS, False)  # noqa: E731
    make()(torch.tensor([1, 1, 1, torch.nan, 1]))
    with pytest.raises(ReducerError, match="the share of a microbatch with rows 0, 1 is nan"):
        make()
    for _ in range(70):  # raised once
        make()(torch.ones(5))


def test_a_microbatch_with_no_samples_gives_a_zero_share(miles_cp):
    x = torch.zeros(0, requires_grad=True)
    share = slime.constant_10([], [], [], False)(x)
    assert share.item() == 0
    assert share.requires_grad


def test_the_divisor_comes_from_the_hosts_arguments(miles_cp, host_args):
    host_args(
        loss_aggregation="constant", loss_aggregation_divisor="4e1"
    )  # YAML reads 4e1 as a string
    reducer = slime.constant_from_args([5, 4], [3, 2], MASKS, False)
    assert reducer(torch.ones(5)).item() == pytest.approx(4 / 40)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"loss_aggregation": "sample_mean"},
        {"loss_aggregation": "roll:seq-mean-token-sum"},
        {
            "loss_aggregation": "constant",
            "loss_aggregation_divisor": 40,
            "loss_aggregation_count_empty": False,
        },
    ],
)
def test_any_other_aggregation_in_the_hosts_arguments_is_refused(miles_cp, host_args, arguments):
    host_args(**arguments)
    with pytest.raises(AggregationError, match="can only do constant"):
        slime.constant_from_args([5, 4], [3, 2], MASKS, False)
