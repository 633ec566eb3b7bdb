"""``constant_<L>``, the reducer of slime's and miles' policy loss, without either.

On live Megatron-Core, at CP 2, and in the frameworks' own steps: ``test_slime.py``.
"""

import sys
import types

import pytest
import torch
from device_double import DeviceDouble

from megatron_lossagg import Layout
from megatron_lossagg.errors import ContractError, LayoutError, ReducerError
from megatron_lossagg.integrations import miles, slime
from megatron_lossagg.reduction import faults


@pytest.fixture
def miles_cp(monkeypatch):
    """Replace miles' parallel state, which needs no Megatron."""

    def at(size, rank):
        cp = types.SimpleNamespace(size=size, rank=rank)
        module = types.ModuleType("miles.backends.training_utils.parallel")
        module.get_parallel_state = lambda: types.SimpleNamespace(cp=cp)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    at(1, 0)
    return at


@pytest.fixture
def framework_args(monkeypatch):
    """Replace the place where Megatron-LM keeps the framework's arguments."""

    def these(**arguments):
        module = types.ModuleType("megatron.training.global_vars")
        module.get_args = lambda: types.SimpleNamespace(**arguments)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return these


MASKS = [torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)]


@pytest.mark.parametrize(
    ("name", "divisor"), [("constant_40960", 40960), ("constant_5e-1", 0.5), ("constant_0p5", 0.5)]
)
def test_the_divisor_is_encoded_in_the_name(miles_cp, name, divisor):
    reducer = getattr(slime, name)([5, 4], [3, 2], MASKS, False)
    x = torch.tensor([1.0, torch.nan, 2.0, 4.0, 8.0])
    assert reducer(x).item() == 15.0 / divisor


@pytest.mark.parametrize(
    "name",
    [
        *("constant_0", "constant_-3", "constant_nan", "constant_many", "constant_1_000"),
        *("constant_40p", "constant_p5", "constant_ 4", "constant_1e999", "constant_4\u0660"),
        "token_mean",
    ],
)
def test_a_name_without_a_valid_divisor_is_an_attribute_error_that_shows_a_valid_one(name):
    with pytest.raises(AttributeError, match=r"constant_<L>.*write constant_40960"):
        getattr(slime, name)


def test_per_token_is_refused_because_the_framework_would_divide_by_tokens(miles_cp):
    with pytest.raises(ContractError, match="Drop that flag"):
        slime.constant_10([5, 4], [3, 2], MASKS, True)


def test_bshd_with_context_parallelism_is_refused(miles_cp, framework_args):
    miles_cp(2, 0)
    framework_args(qkv_format="bshd")
    with pytest.raises(LayoutError, match=r"max_seq_len.*--qkv-format thd"):
        slime.constant_10([5, 4], [3, 2], MASKS, False)


def test_arguments_of_megatron_that_are_imported_and_not_set_refuse_nothing(miles_cp, monkeypatch):
    """On Megatron-LM's own module: ``Miles.wiring`` in ``slime_miles_functions.py``."""

    def get_args():
        raise AssertionError("args is not initialized.")

    module = types.ModuleType("megatron.training.global_vars")
    module.get_args = get_args
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x = torch.arange(1.0, 10)
    total = 0.0
    for rank in range(2):
        miles_cp(2, rank)
        held = Layout.response_zigzag([5, 4], [3, 2], cp_size=2, cp_rank=rank).positions
        total += slime.constant_10([5, 4], [3, 2], MASKS, False)(x[held]).item()
    assert total == pytest.approx((1 + 3 + 4 + 5) / 10)


def test_masks_sliced_beforehand_are_refused(miles_cp):
    with pytest.raises(ReducerError, match=r"got a mask of 3 tokens.*pass the whole mask"):
        slime.constant_10([5, 4], [3, 2], [MASKS[0][:1], MASKS[1]], False)


def test_losses_that_were_gathered_over_cp_are_refused(miles_cp):
    miles_cp(2, 0)
    reducer = slime.constant_10([5, 4], [3, 2], MASKS, False)
    with pytest.raises(ReducerError, match="pass the losses of this rank's slice"):
        reducer(torch.ones(5))


def test_a_divisor_below_a_response_warns_once(miles_cp, monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    slime.constant_3([5, 4], [3, 2], MASKS, False)
    with pytest.warns(RuntimeWarning, match="divides by 2, and a sample has 3 tokens"):
        slime.constant_2([5, 4], [3, 2], MASKS, False)
    slime.constant_2([5, 4], [3, 2], MASKS, False)


def test_a_nan_on_a_device_is_raised_with_its_sequences_by_a_later_call(miles_cp):
    with DeviceDouble() as double:
        masks = [mask.to(double.device) for mask in MASKS]

        def reduce(values):
            return slime.constant_12345([5, 4], [3, 2], masks, False)(values.to(double.device))

        reduce(torch.tensor([1, 1, 1, torch.nan, 1]))
        with pytest.raises(ReducerError, match=r"with sequences 0, 1\) is nan at its token"):
            reduce(torch.ones(5))
        for _ in range(70):  # raised once
            reduce(torch.ones(5))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_reducer_takes_masks_and_losses_on_a_device(miles_cp, cp_size):
    miles_cp(cp_size, cp_size - 1)
    held = 5 if cp_size == 1 else 4
    x = torch.arange(1.0, 1 + held)
    on_cpu = slime.constant_77([5, 4], [3, 2], MASKS, False)(x).item()
    with DeviceDouble() as double:
        masks = [mask.to(double.device) for mask in MASKS]
        x = x.to(double.device).requires_grad_()
        partial_losses = []
        for _ in range(4):  # calls 2 to 4 read what the earlier ones left on the device
            loss = slime.constant_77([5, 4], [3, 2], masks, False)(x)
            assert loss.device == double.device
            loss.backward()
            partial_losses.append(loss.item())
        gradient = x.grad.tolist()
    assert partial_losses == pytest.approx([on_cpu] * 4)
    assert gradient.count(0) == 1  # of the masked token


def test_a_microbatch_with_no_samples_gives_a_partial_loss_of_zero(miles_cp):
    x = torch.zeros(0, requires_grad=True)
    loss = slime.constant_10([], [], [], False)(x)
    assert loss.item() == 0
    assert loss.requires_grad


def test_both_frameworks_have_one_reducer():
    assert miles.constant_40 is slime.constant_40 is slime.constant_4e1
