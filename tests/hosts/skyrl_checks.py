"""SkyRL as released: its reduction of advantages, and its trainer through our subclass."""

import importlib.metadata
import typing
from types import SimpleNamespace

import pytest
import torch
import typing_extensions
from ragged import STEPS, Step, assert_same

typing.TypedDict = typing_extensions.TypedDict  # SkyRL's pydantic models, before Python 3.12

from skyrl.backends.skyrl_train.training_batch import (  # noqa: E402
    TrainingInputBatch,
    pad_training_input_batch,
)
from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.train.config import AlgorithmConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

from megatron_lossagg import Aggregation  # noqa: E402
from megatron_lossagg.aggregation import ALIASES  # noqa: E402
from megatron_lossagg.hosts.skyrl import _LINEAR, aggregated  # noqa: E402

L = 9
NAMES = [name.removeprefix("skyrl:") for name in ALIASES if name.startswith("skyrl:")]
PROMPTS = [(0, 3), (3, 4), (4, 9), (9, 12)]
IDS = [number for number, (a, b) in enumerate(PROMPTS) for _ in range(b - a)]


def named(reduction):
    divisor = L if reduction.endswith("norm") else None
    return Aggregation.named(f"skyrl:{reduction}", divisor=divisor)


def whole(step, field):
    """Stack a field of all microbatches to the mini-batch that the trainer has."""
    width = max(mb["mask"].shape[1] for mb in step.microbatches)
    pad = lambda t: torch.nn.functional.pad(t, (0, width - t.shape[1]))  # noqa: E731
    return torch.cat([pad(mb[field]) for mb in step.microbatches])


def data_of(step):
    made = TrainingInputBatch(
        {
            "sequences": torch.zeros(12, 20, dtype=torch.long),
            "advantages": whole(step, "advantages"),
            "loss_mask": whole(step, "mask").double(),
            "response_mask": whole(step, "mask").double(),
        }
    )
    made.metadata = {"uids": [f"p{number}" for number in IDS]}
    return pad_training_input_batch(made, 4)


def trainer_of(cls, reduction, *, normalize=False):
    algorithm = SimpleNamespace(
        advantage_batch_normalize=normalize,
        loss_reduction=reduction,
        max_seq_len=L,
        policy_loss_type="regular",
    )
    made = object.__new__(cls)
    made.cfg = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=3)
    )
    return made


def test_every_reduction_of_skyrl_has_an_alias():
    assert importlib.metadata.version("skyrl") == "0.3.0"
    assert len(NAMES) == 5
    for name in NAMES:
        assert Aggregation.named(f"skyrl:{name}", divisor=L if name.endswith("norm") else None)


@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("reduction", NAMES)
def test_an_alias_is_the_hosts_own_reduction(reduction, lengths):
    step = Step(STEPS[lengths])
    scale = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        advantages=torch.ones(12, 9, dtype=torch.float64),
        loss_mask=whole(step, "mask").double(),
        loss_reduction=reduction,
        micro_batch_size=3,
        max_seq_len=L,
        prompt_boundaries=PROMPTS,
    )
    theirs = ppo_utils.reduce_loss(whole(step, "x") * scale, whole(step, "mask"))
    step.prompts = IDS
    assert_same(step.loss(named(reduction)), theirs, step.leaves)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reduction", [n for n in NAMES if n != "token_mean_legacy"])
def test_our_trainer_scales_advantages_as_skyrls_own(reduction, normalize):
    boundaries = [(0, 4), (4, 12)]
    outs = []
    for cls in (RayPPOTrainer, aggregated(RayPPOTrainer, named(reduction))):
        trainer = trainer_of(cls, reduction, normalize=normalize)
        out = trainer._normalize_advantages(data_of(Step(STEPS["all active"])), boundaries, PROMPTS)
        outs.append(out["advantages"])
    assert torch.allclose(*outs, rtol=1e-6, atol=0)
    assert (outs[1][12:] == 0).all()  # padding


def test_a_prompt_with_no_active_tokens_can_be_left_out():
    lengths = [[[5, 1, 3], [0, 7, 4]], [[6, 6, 2], [1, 3, 5]]]  # row 3 is prompt 1
    scaled = {}
    for count_empty in (True, False):
        aggregation = Aggregation("prompt_mean", count_empty=count_empty)
        trainer = trainer_of(aggregated(RayPPOTrainer, aggregation), "token_mean")
        data = trainer._normalize_advantages(data_of(Step(lengths)), [(0, 12)], PROMPTS)
        scaled[count_empty] = data["advantages"]
    active = whole(Step(lengths), "mask")
    ratio = scaled[False][:12][active] / scaled[True][:12][active]
    assert torch.allclose(ratio, torch.full_like(ratio, 4 / 3))


@pytest.mark.parametrize("name", _LINEAR)
def test_skyrls_policy_losses_are_proportional_to_advantages(name):
    step = Step(STEPS["all active"])
    loss = ppo_utils.PolicyLossRegistry.get(name)
    config = AlgorithmConfig(policy_loss_type=name)
    scale = torch.tensor([0.5, 0.01, 2.0], dtype=torch.float64)[:, None]
    mb = step.microbatches[0]
    old = (mb["x"] + 0.3 * mb["other"]).detach()

    def run(advantages, mask):
        value, _ = loss(mb["x"], old, advantages, config, loss_mask=mask, rollout_logprobs=old)
        return value

    by_row = [run(mb["advantages"], mb["mask"] * (torch.arange(3) == n)[:, None]) for n in range(3)]
    want = (torch.stack(by_row) * scale[:, 0]).sum()
    assert_same(run(mb["advantages"] * scale, mb["mask"].double()), want, [mb["x"]])
