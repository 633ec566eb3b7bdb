"""The scale functions that a step puts into a config, and those that it leaves there."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lossagg.contract.side_losses import SideLossScale, check_follow
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.aggregation import Aggregation


def config(**given):
    names = ("moe_grad_scale_func", "mtp_grad_scale_func", "grad_scale_func")
    return SimpleNamespace(**{name: given.get(name) for name in names})


def chunk(own):
    model = torch.nn.Linear(1, 1)
    model.config = own
    return model


def scales(own):
    return [float(own.moe_grad_scale_func()), float(own.mtp_grad_scale_func())]


def test_the_scale_is_the_weight_sum_times_the_loss_scale():
    own = config(grad_scale_func=lambda loss: 8 * loss)
    scale = SideLossScale(chunk(own), 0.25)
    assert scales(own) == [2.0, 2.0]
    scale.end()
    assert own.moe_grad_scale_func is own.mtp_grad_scale_func is None


def test_the_scale_is_on_the_device_of_the_model():
    model = chunk(config()).to("meta")
    SideLossScale(model, 0.25)
    assert model.config.moe_grad_scale_func().device.type == "meta"


def test_a_function_of_the_users_own_is_multiplied_and_put_back():
    own = config(moe_grad_scale_func=lambda: 3.0, grad_scale_func=lambda loss: 8 * loss)
    users = own.moe_grad_scale_func
    scale = SideLossScale(chunk(own), 0.5)
    assert scales(own) == [1.5, 4.0]
    scale.end()
    assert own.moe_grad_scale_func is users


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_steps_of_one_model_scale_by_their_own_weights_and_leave_nothing(first_ends_first):
    own = config()
    first = SideLossScale(chunk(own), 2.0)
    second = SideLossScale(chunk(own), 5.0)
    assert scales(own) == [5.0, 5.0]
    if first_ends_first:
        first.end()
        assert scales(own) == [5.0, 5.0]
        second.end()
    else:
        second.end()
        assert scales(own) == [2.0, 2.0]
        first.end()
    assert own.moe_grad_scale_func is own.mtp_grad_scale_func is None


def test_a_stage_that_was_not_told_the_weights_raises_if_it_has_side_losses():
    own = config()
    scale = SideLossScale(chunk(own), None)
    with pytest.raises(ContractError, match=r"begin the step with aggregator\.step"):
        own.moe_grad_scale_func()
    scale.weight_sum = 0.0  # told, of a step without active tokens
    assert scales(own) == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_megatron_core_that_does_not_ask_is_refused_by_name():
    older = SimpleNamespace(grad_scale_func=None)
    with pytest.raises(ContractError, match=r"install megatron-core>=0\.19"):
        check_follow(older, Aggregation("token_mean"))
    check_follow(config(), Aggregation("token_mean"))


def test_a_custom_reducer_is_refused_because_its_weights_are_not_known():
    custom = Aggregation("custom", reducer_path="math:fsum")
    with pytest.raises(ContractError, match="sum of weights is not known"):
        check_follow(config(), custom)
