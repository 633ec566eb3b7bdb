"""verl's integration without verl.

``make test-frameworks`` runs verl's own code.
"""

import sys
import types
from functools import partial

import pytest
import torch
from device_double import DeviceDouble
from live import assert_live
from verl_batches import MASK, planned

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.integrations import verl


@pytest.mark.launches
def test_on_live_megatron_verls_own_scaling_makes_it_the_configured_loss():
    assert_live("verl", cases=3, refused=2)


@pytest.mark.parametrize(
    ("name", "mode", "count_empty", "loss"),
    [
        ("lossagg_constant", "constant", True, "vanilla"),
        ("lossagg_prompt_mean_no_count_empty", "prompt_mean", False, "vanilla"),
        ("lossagg_sample_mean_no_count_empty+gspo", "sample_mean", False, "gspo"),
        ("lossagg_token_mean+dppo_tv", "token_mean", True, "dppo_tv"),
        ("lossagg_token_mean_no_count_zero", "token_mean", True, "vanilla"),
        ("lossagg_row_mean_no_count_empty_no_count_zero+gspo", "row_mean", False, "gspo"),
    ],
)
def test_a_loss_mode_names_mode_empty_samples_and_verls_own_loss(name, mode, count_empty, loss):
    read = verl.LossMode.named(name)
    assert (read.mode, read.count_empty, read.loss) == (mode, count_empty, loss)
    assert read.name == name


def test_a_loss_mode_of_verls_own_is_left_alone():
    assert verl.LossMode.named("vanilla") is None


def test_the_divisor_is_verls_loss_scale_factor():
    constant = verl.LossMode.named("lossagg_constant")
    assert constant.aggregation(8) == Aggregation("constant", divisor=8)
    with pytest.raises(AggregationError, match=r"set actor_rollout_ref\.actor\.loss_scale_factor"):
        constant.aggregation(None)
    assert verl.LossMode.named("lossagg_token_sum").aggregation(None).divisor is None
    assert verl.LossMode.named("lossagg_sample_mean").aggregation(8).divisor is None


@pytest.mark.parametrize(
    "mode", ["length_power", "microbatch_token_mean", "own_weights", "custom", "tokenmean"]
)
def test_a_mode_that_is_not_registered_is_refused_by_its_name(mode):
    with pytest.raises(AggregationError, match=f"got loss_mode=lossagg_{mode}, expected lossagg_"):
        verl.LossMode.named(f"lossagg_{mode}").aggregation(8)


def test_a_registration_that_fails_is_not_silent(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    verl._register.cache_clear()
    with (
        pytest.warns(UserWarning, match="not registered with verl: ModuleNotFoundError"),
        pytest.raises(ModuleNotFoundError),
    ):
        verl.plugin  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'plugins'"):
        verl.plugins  # noqa: B018


def test_verls_own_loss_does_not_see_a_loss_weight_that_the_plan_has():
    class Data(dict):
        def exclude(self, name):
            return Data({key: value for key, value in self.items() if key != name})

    plan, sequences = planned("lossagg_token_mean", loss_weight=[0.5, 3.0, 2.0, 7.0])
    data = Data({verl.SEQUENCE: sequences, "loss_weight": torch.ones(4), "advantages": 1})
    seen = verl.with_plan(lambda data: [*data], plan, 1, data=data)
    assert seen == [verl.SEQUENCE, "advantages"]
    assert "loss_weight" in data


def test_an_argument_of_agg_loss_that_would_be_dropped_is_refused():
    plan, sequences = planned("lossagg_token_mean")
    microbatch = verl._Microbatch(plan, sequences.numpy(), 1)
    with pytest.raises(ContractError, match="verl passes loss_weight to agg_loss"):
        microbatch.agg_loss(MASK.double(), MASK, loss_agg_mode="token-mean", loss_weight=1)


# What verl's engines do first: they move a batch to the device.

ADVANTAGES = torch.tensor([[0.5, -1.0, torch.nan], [torch.inf] * 3, [2.0, torch.nan, 1.0], [3] * 3])


def squared(log_prob, advantages, response_mask, loss_agg_mode, **_):
    """A policy loss of verl's form; its modules have one aggregation function."""
    core = sys.modules["verl.trainer.ppo.core_algos"]
    return core.agg_loss(log_prob**2 + advantages, response_mask, loss_agg_mode), {}


@pytest.fixture
def core(monkeypatch):
    """Put a module where verl has its aggregation function."""
    module = types.ModuleType("verl.trainer.ppo.core_algos")
    module.agg_loss = None
    monkeypatch.setitem(sys.modules, module.__name__, module)


def called(name, *, is_on_device):
    """Return a planned microbatch's policy loss, its gradient, and its host syncs."""
    leaf = torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()
    plan, sequences = planned(name)
    with DeviceDouble() as double:
        place = double.device if is_on_device else torch.device("cpu")
        tensors = {
            "log_prob": leaf.to(place),
            "advantages": ADVANTAGES.double().to(place),
            "response_mask": MASK.bool().to(place),
            "loss_agg_mode": "token-mean",
        }
        double.syncs.clear()
        call = partial(verl._policy_loss, verl.LossMode.named(name), squared)
        data = {verl.SEQUENCE: sequences.to(place, non_blocking=True)}
        loss, _ = verl.with_plan(lambda data: call(**tensors), plan, 2, data=data)
        plan.check()
        num_syncs = sum(double.syncs.values())
        loss.backward()
        assert loss.device == place
        return loss.item(), leaf.grad, num_syncs


MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "token_sum")


def test_a_registered_loss_on_another_engine_is_refused(core):
    name = verl.LossMode.named("lossagg_token_mean")
    with pytest.raises(ContractError, match="set VERL_ENGINE_VENDOR=lossagg in the environment"):
        verl._policy_loss(name, squared, log_prob=None)


@pytest.mark.parametrize("mode", [*MODES, "prompt_mean", "prompt_mean_no_count_empty"])
def test_a_planned_microbatch_on_a_device_is_that_of_the_cpu(core, mode):
    name = f"lossagg_{mode}"
    on_cpu, wanted, _ = called(name, is_on_device=False)
    on_device, got, syncs = called(name, is_on_device=True)
    assert on_device == pytest.approx(on_cpu, rel=1e-12)
    assert torch.allclose(got, wanted, rtol=1e-12, atol=0)
    assert got.abs().max() > 0 == got[MASK == 0].abs().max()
    assert syncs <= 2
