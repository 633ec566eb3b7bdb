"""TRL as released: the real ``GRPOTrainer._compute_loss``, per microbatch and process."""

import ast
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import trl
from drawn_step import Step
from shared import assert_same, tree_of
from trl.trainer.grpo_trainer import GRPOTrainer

from megatron_lossagg import Aggregation
from megatron_lossagg.reduction.modes import ALIASES

L = 11
NAMES = [name.removeprefix("trl:") for name in ALIASES if name.startswith("trl:")]
POLICY = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def named(loss_type):
    return Aggregation(f"trl:{loss_type}", divisor=L if loss_type == "dr_grpo" else None)


def theirs(step, loss_type, *, generated=None, steps=1, beta=0.0):
    """Mean over processes of the sums over microbatches, as accelerate's DDP averages gradients.

    The ratio is x against old log-probabilities of 0, unclipped; A is -1: the loss is x. With
    ``beta``, the log-probabilities of the reference model are 0 as well. ``generated``: active
    tokens of the generation batch, which has the sequences of that many ``steps``.
    """
    generated = sum(step.lengths) if generated is None else generated
    total = 0
    for mb in step.microbatches:
        log_p = mb.log_probs.exp().log()
        sequences, width = mb.mask.shape
        inputs = {
            "prompt_ids": torch.zeros(sequences, 1, dtype=torch.long),
            "prompt_mask": torch.ones(sequences, 1, dtype=torch.long),
            "completion_ids": torch.zeros(sequences, width, dtype=torch.long),
            "completion_mask": mb.mask.long(),
            "advantages": -torch.ones(sequences, dtype=torch.float64),
            "old_per_token_logps": torch.zeros_like(log_p),
            "ref_per_token_logps": torch.zeros_like(log_p),
            "num_items_in_batch": torch.tensor(float(generated)),
        }
        trainer = trainer_of(step, log_p, loss_type, steps, beta)
        total = total + GRPOTrainer._compute_loss(trainer, None, inputs)
    return total / step.dp_size


def trainer_of(step, log_p, loss_type, steps, beta):
    """Return what ``_compute_loss`` reads of its trainer, with these log-probabilities."""
    accelerator = SimpleNamespace(
        num_processes=step.dp_size,
        gather=lambda t: t,
        reduce=lambda t, reduction=None: t,
        gather_for_metrics=lambda t: t,
        sync_gradients=True,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            log_p,
            torch.zeros_like(log_p),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        loss_type=loss_type,
        epsilon_low=1e9,
        epsilon_high=1e9,
        max_completion_length=L,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=step.num_microbatches,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        tools=None,
        _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=step.num_microbatches * steps,
            sapo_temperature_neg=1.05,
            sapo_temperature_pos=1.0,
            **dict.fromkeys(
                ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), 1.0
            ),
        ),
        router_aux_loss_coef=0,
        get_gamma_weights=lambda advantages, **_: torch.ones_like(advantages),
    )


def per_token(step, loss_type):
    """Return TRL's loss per token for these inputs."""
    if loss_type in ("cispo", "vespo"):
        weight = (lambda x: x.exp().detach()) if loss_type == "cispo" else torch.ones_like
        return [weight(mb.log_probs) * mb.log_probs for mb in step.microbatches]
    if loss_type == "sapo":
        t = 1.05
        return [torch.sigmoid(t * (mb.log_probs.exp() - 1)) * 4 / t for mb in step.microbatches]
    return [mb.log_probs.exp() for mb in step.microbatches]


def test_every_loss_type_of_trl_has_an_alias():
    assert trl.__version__ == "1.16.0"
    assert {*NAMES} == {*POLICY, "sapo", "cispo", "vespo"}


@pytest.mark.parametrize("loss_type", NAMES)
def test_an_alias_is_the_frameworks_own_aggregation(loss_type):
    step = Step()
    ours = step.wanted(named(loss_type), per_token(step, loss_type))
    assert_same(ours, theirs(step, loss_type), step.leaves)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_a_generation_batch_of_several_steps_gives_trl_the_divisor_of_their_mean(loss_type):
    step, others = Step(), 97
    framework = theirs(step, loss_type, generated=sum(step.lengths) + others, steps=2)
    ours = step.wanted(named(loss_type), per_token(step, loss_type))
    mean = (sum(step.lengths) + others) / 2
    assert abs(sum(step.lengths) / mean - 1) > 0.1
    assert_same(ours * sum(step.lengths) / mean, framework, step.leaves)


def test_the_kl_of_luspo_is_summed_over_the_tokens_of_the_mask():
    """Before 1.10.0 it was a mean over the padded width."""
    step, beta = Step(), 0.3
    losses = [x + beta * (torch.exp(-x.log()) + x.log() - 1) for x in per_token(step, "luspo")]
    assert_same(step.wanted(named("luspo"), losses), theirs(step, "luspo", beta=beta), step.leaves)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo"])
def test_trl_averages_microbatches_which_differs_where_they_have_unequally_many_sequences(
    loss_type,
):
    # As at the end of an epoch: a sequence of the smaller microbatch weighs more.
    step = Step([[(4, 5, 7), (8,)]])
    framework = theirs(step, loss_type)
    ours = step.wanted(named(loss_type), per_token(step, loss_type))
    grads = [
        torch.autograd.grad(loss, step.leaves, retain_graph=True) for loss in (framework, ours)
    ]
    ratio = [(a.norm() / b.norm()).item() for a, b in zip(*grads, strict=True)]
    assert ratio == pytest.approx([4 / 6, 4 / 2])


def test_what_trl_dumps_has_the_names_that_are_read_and_no_length():
    """Its table is Parquet, which tests/cli/test_rollouts.py reads where pyarrow is installed."""
    (table,) = [
        node.value
        for node in ast.walk(tree_of("trl", "trainer", "grpo_trainer.py"))
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "table"
        and isinstance(node.value, ast.Dict)
    ]
    names = [key.value for key in table.keys if key is not None]
    assert names == ["step", "prompt", "completion", "advantage"]
