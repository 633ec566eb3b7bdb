"""SkyRL as released: its reduction of advantages, and its trainer through our subclass."""

import importlib.metadata

import pytest
import torch
from ragged import LENGTHS, STEPS, Step, assert_same

from megatron_lossagg.hosts.skyrl import _LINEAR, aggregated
from megatron_lossagg.verify.host_runs import skyrl
from megatron_lossagg.verify.host_runs.outcome import PASS, outcome_of
from megatron_lossagg.verify.host_runs.skyrl import alias, batch, reduced, trainer

CHECKS = skyrl.checks()  # makes SkyRL's models import on a Python before 3.12

from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.train.config import AlgorithmConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

NAMES = skyrl.reductions()
PROMPTS = [(0, 3), (3, 4), (4, 9), (9, 12)]


def test_every_reduction_of_skyrl_has_an_alias():
    assert importlib.metadata.version("skyrl") == "0.3.0"
    assert len(NAMES) == 5


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_what_lossagg_verify_runs_of_skyrl_is_the_oracles(check):
    outcome = outcome_of(check, host="skyrl")
    assert outcome.state == PASS, outcome.explanation


@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("reduction", NAMES)
def test_an_alias_is_the_hosts_own_reduction(reduction, lengths):
    step = Step(STEPS[lengths])
    assert_same(step.loss(alias(reduction)), reduced(step, ppo_utils, reduction), step.leaves)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reduction", [n for n in NAMES if n != "token_mean_legacy"])
def test_our_trainer_scales_advantages_as_skyrls_own(reduction, normalize):
    boundaries = [(0, 4), (4, 12)]
    outs = []
    for cls in (RayPPOTrainer, aggregated(RayPPOTrainer, alias(reduction))):
        made = trainer(cls, reduction, normalize=normalize)
        out = made._normalize_advantages(batch(Step(LENGTHS)), boundaries, PROMPTS)
        outs.append(out["advantages"])
    assert torch.allclose(*outs, rtol=1e-6, atol=0)
    assert (outs[1][12:] == 0).all()  # padding


@pytest.mark.parametrize("name", _LINEAR)
def test_skyrls_policy_losses_are_proportional_to_advantages(name):
    step = Step(LENGTHS)
    loss = ppo_utils.PolicyLossRegistry.get(name)
    config = AlgorithmConfig(policy_loss_type=name)
    scale = torch.tensor([0.5, 0.01, 2.0], dtype=torch.float64)[:, None]
    mb = step.microbatches[0]
    old = mb.old_log_probs

    def run(advantages, mask):
        value, _ = loss(mb.log_probs, old, advantages, config, loss_mask=mask, rollout_logprobs=old)
        return value

    by_row = [run(mb.advantages, mb.mask * (torch.arange(3) == n)[:, None]) for n in range(3)]
    want = (torch.stack(by_row) * scale[:, 0]).sum()
    assert_same(run(mb.advantages * scale, mb.mask.double()), want, [mb.log_probs])
