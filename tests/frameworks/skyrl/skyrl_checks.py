"""SkyRL as released: its reduction of advantages, and its trainer through our subclass."""

import asyncio
import importlib.metadata
from pathlib import Path

import pytest
import skyrl_page
import torch
from drawn_step import Step
from shared import assert_same
from skyrl_functions import ALIASES, batch, checks, prompt_boundaries, trainer
from verified import assert_release_trains_every_mode, assert_runs_its_own_step

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations.skyrl import _LINEAR, aggregated

CHECKS = checks()  # makes SkyRL's models import on a Python before 3.12

from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

NAMES = list(ALIASES)


def test_every_reduction_of_skyrl_has_an_alias():
    assert importlib.metadata.version("skyrl") in ("0.3.0", "0.4.0")
    assert len(NAMES) == 5


TURNS = [2, 1, 1, 3]
"""Of each trajectory, two trajectories a prompt."""


class Generated:
    """A generator of step-wise trajectories, as SkyRL's own returns them."""

    async def generate(self, given):
        sequences = []
        for number, turns in enumerate(TURNS):
            for turn in range(turns):
                reward = float(number % 2)
                sequences.append(
                    {
                        "prompt_token_ids": [1] * (2 + turn),
                        "response_ids": [2] * (3 + number),
                        "rewards": [0.0] * (2 + number) + [reward],
                        "loss_masks": [1] * (2 + number) + [0],
                        "stop_reasons": "stop",
                        "trajectory_ids": given["trajectory_ids"][number],
                        "is_last_step": turn == turns - 1,
                    }
                )
        output = {name: [sequence[name] for sequence in sequences] for name in sequences[0]}
        return {**output, "rollout_metrics": {}, "rollout_logprobs": None}


class StagedError(Exception):
    """The trainer's loop has come to the workers, with this batch."""


class Dispatch:
    """In place of the workers."""

    async def save_weights_for_sampler(self):
        pass

    def get_lcm_dp_size(self):
        return 2

    def stage_data(self, model, data, boundaries):
        raise StagedError(data)


class Tokenizer:
    pad_token_id = 0

    def decode(self, ids):
        return ""


def staged(cls, *, step_wise=True):
    """Return the batch that a trainer's own ``train`` hands to its workers."""
    cfg = SkyRLTrainConfig()
    cfg.generator.step_wise_trajectories = step_wise
    cfg.generator.n_samples_per_prompt = 2
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.trainer.enable_ray_gpu_monitor = False
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = 2
    cfg.trainer.eval_interval, cfg.trainer.resume_mode = -1, "none"
    cfg.trainer.placement.colocate_all = False
    cfg.trainer.algorithm.use_kl_loss = False
    cfg.trainer.algorithm.loss_reduction = "sequence_mean"

    class WithoutModels(cls):
        def init_weight_sync_state(self):
            pass

        def fwd_logprobs_values_reward(self, batch):
            batch["values"] = None
            return batch

    made = WithoutModels(
        cfg,
        tracker=None,
        tokenizer=Tokenizer(),
        train_dataset=None,
        inference_engine_client=None,
        generator=Generated(),
    )
    made.dispatch, made.total_training_steps = Dispatch(), 1
    prompt = {"prompt": "a", "env_class": None, "env_extras": {}}
    made.train_dataloader = [[{**prompt, "uid": "a"}, {**prompt, "uid": "b"}]]
    with pytest.raises(StagedError) as stopped:
        asyncio.run(made.train())
    (batch,) = stopped.value.args
    return batch


@pytest.mark.parametrize("mode", ["sample_mean", "constant", "balanced"])
def test_in_skyrls_own_loop_the_turns_of_a_trajectory_are_one_sample(mode):
    divisor = 40.0 if mode == "constant" else None
    batch = staged(aggregated(RayPPOTrainer, Aggregation(mode, divisor=divisor)))
    stock = staged(RayPPOTrainer)
    number = [n for n, turns in enumerate(TURNS) for _ in range(turns)]
    num_turns = len(number)
    for sequence, sample in enumerate(number):
        tokens = 2 + sample
        weight = 1 / (len(TURNS) * (divisor or TURNS[sample] * tokens))
        of_skyrl = 1 / (num_turns * tokens)  # its sequence_mean counts turns
        ours, theirs = (one["advantages"][sequence].double() for one in (batch, stock))
        assert torch.allclose(ours, theirs * weight / of_skyrl, rtol=1e-5, atol=0)
        assert theirs.abs().sum() > 0
    assert (batch["advantages"][num_turns:] == 0).all()  # padding


def test_step_wise_sequences_whose_trajectories_are_lost_are_refused(monkeypatch):
    made = aggregated(RayPPOTrainer, Aggregation("sample_mean"))
    monkeypatch.delattr(made, "compute_advantages_and_returns")  # SkyRL's own drops them
    with pytest.raises(
        ContractError, match=r"got none of metadata\['is_last_step'\] for 8 sequences"
    ):
        staged(made)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_function_of_skyrl_is_the_references(check):
    check.passes()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reduction", [n for n in NAMES if n != "token_mean_legacy"])
def test_our_trainer_scales_advantages_as_skyrls_own(reduction, normalize):
    step, boundaries, outs = Step(), [(0, 4), (4, 12)], []
    prompts = prompt_boundaries(step.prompts)
    for cls in (RayPPOTrainer, aggregated(RayPPOTrainer, ALIASES[reduction])):
        made = trainer(cls, reduction, normalize=normalize)
        out = made._normalize_advantages(batch(step), boundaries, prompts)
        outs.append(out["advantages"] * out["loss_mask"])  # no loss sees the others
    assert torch.allclose(*outs, rtol=1e-6, atol=0)
    assert (outs[1][12:] == 0).all()  # padding


@pytest.mark.parametrize("name", _LINEAR)
def test_skyrls_policy_losses_are_proportional_to_advantages(name):
    step = Step([[(8, 5, 9)]])
    loss = ppo_utils.PolicyLossRegistry.get(name)
    config = AlgorithmConfig(policy_loss_type=name)
    scale = torch.tensor([0.5, 0.01, 2.0], dtype=torch.float64)[:, None]
    mb = step.microbatches[0]
    old = mb.old_log_probs

    def run(advantages, mask):
        value, _ = loss(mb.log_probs, old, advantages, config, loss_mask=mask, rollout_logprobs=old)
        return value

    by_sequence = [run(mb.advantages, mb.mask * (torch.arange(3) == n)[:, None]) for n in range(3)]
    want = (torch.stack(by_sequence) * scale[:, 0]).sum()
    assert_same(run(mb.advantages * scale, mb.mask.double()), want, [mb.log_probs])


def test_skyrl_starts_by_the_pages_line_and_its_trainer_in_ray_trains_the_mode(tmp_path):
    """On the release of this process: ``run.py`` runs both."""
    skyrl_page.check(tmp_path, Path(ppo_utils.__file__).parents[4])


def test_the_command_runs_a_frameworks_own_step(tmp_path):
    assert_runs_its_own_step(tmp_path, "skyrl")


def test_the_step_of_a_release_trains_every_mode(tmp_path, monkeypatch):
    assert_release_trains_every_mode(tmp_path, monkeypatch, "skyrl")
