"""verl as released: its agg_loss, its policy losses through our registry, its Megatron engine."""

from pathlib import Path

import pytest
import torch
import verl
from ragged import LENGTHS, MASKED, STEPS, Step, assert_same, launched
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import PolicyLossConfig

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations.verl import LossMode
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.frameworks import verl as verl_checks
from megatron_lossagg.verify.frameworks.outcome import PASS, outcome_of
from megatron_lossagg.verify.frameworks.step import ppo_losses
from megatron_lossagg.verify.frameworks.verl import DIVISOR, actor_config, alias

CHECKS = verl_checks.checks()
MODES = verl_checks.modes()


def counts(step):
    return actor_config(step).global_batch_info


def theirs(step, mode, **arguments):
    """Sum over the step as the Megatron engine does: * M, / M, mean over ranks."""
    losses = [
        core_algos.agg_loss(mb.log_probs, mb.mask, mode, **arguments) for mb in step.microbatches
    ]
    return torch.stack(losses).sum() / arguments.get("dp_size", 1)


def test_every_mode_of_verl_has_an_alias():
    text = Path(core_algos.__file__).with_name("core_algos.py").read_text()
    body = text[text.index("def agg_loss") : text.index("Invalid loss_agg_mode")]
    assert all(f'"{mode}"' in body for mode in MODES)
    assert len(MODES) == 5
    assert verl.__version__ == "0.9.1"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_what_lossagg_verify_runs_of_verl_is_the_oracles(check):
    outcome = outcome_of(check, framework="verl")
    assert outcome.state == PASS, outcome.explanation


@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("mode", MODES)
def test_an_alias_is_the_frameworks_own_aggregation(mode, lengths):
    step = Step(STEPS[lengths])
    assert_same(step.loss(alias(mode)), theirs(step, mode, **counts(step)), step.leaves)


def test_every_mode_and_policy_loss_of_verl_is_checked():
    losses = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("lossagg_")}
    ours = {check.name.partition("+")[2] or "vanilla" for check in CHECKS[len(MODES) :]}
    assert ours == losses - {"geo_mean"}
    assert len(CHECKS) == 5 + 5 * len(ours)


def test_what_is_wanted_of_a_loss_that_fixes_its_mode_is_the_mode_that_was_asked_for():
    step = Step(MASKED)
    fixes = {}
    for loss in sorted({check.name.partition("+")[2] or "vanilla" for check in CHECKS[5:]}):
        with verl_checks.in_mode("token-mean") as asked:
            verl_checks.run_loss(step, loss, actor_config(step), "token-sum")
        assert len(asked) == len(step.microbatches)
        fixes[loss] = set(asked) - {"token-sum"}
    fixed = {loss: modes for loss, modes in fixes.items() if modes}
    assert fixed == {"sapo": {"seq-mean-token-mean"}}  # as docs/integrations/verl.md says


KEPT = 0.02
"""Threshold of verl's k2: half the square of the log ratio."""


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_bypass_mode_rejects_are_counted_and_not_trained(mode):
    """As everywhere in this package: weights are those before the rejection."""
    step = Step(MASKED)
    correction = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs="token_k2", rollout_rs_threshold=KEPT, bypass_mode=True
    )
    made = actor_config(
        step,
        divisor=DIVISOR if mode.endswith("norm") else None,
        clip_ratio=0.2,
        policy_loss=PolicyLossConfig(rollout_correction=correction),
    )
    got = verl_checks.run_loss(
        step, LossMode(alias(mode).mode, True, "bypass_mode").name, made, "token-mean"
    )
    sequences, num_rejected = [], 0
    for mb in step.microbatches:
        losses = ppo_losses(mb, clip=0.2, dual_clip=3.0)
        is_kept = mb.mask & ((mb.log_probs - mb.old_log_probs).square() / 2 <= KEPT)
        num_rejected += int((mb.mask & ~is_kept).sum())
        for x, counted, trained in zip(losses, mb.mask.int(), is_kept.int(), strict=True):
            masks = {"counted": counted.tolist(), "trained": trained.tolist()}
            sequences.append({"x": list(x.unbind()), **masks, "sample": len(sequences)})
    assert 0 < num_rejected < sum(step.lengths)
    wanted = reference_loss.step_loss(alias(mode).mode, sequences, divisor=alias(mode).divisor)
    assert_same(got, wanted, step.leaves)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("seq-mean")])
def test_without_global_batch_size_verl_leaves_masked_sequences_out_of_each_microbatch(mode):
    # As called for the logged entropy; its Megatron and FSDP engines pass global_batch_size.
    step = Step([[MASKED[0][0]]])  # three sequences, one of them fully masked
    divisor = {"loss_scale_factor": DIVISOR}
    without_empty = Aggregation(alias(mode).mode, divisor=alias(mode).divisor, count_empty=False)
    got = theirs(step, mode, **divisor)
    assert_same(got, step.loss(without_empty), step.leaves)
    counted = theirs(step, mode, **divisor, global_batch_size=3)
    assert (got / counted).item() == pytest.approx(3 / 2)


def test_without_loss_scale_factor_verl_divides_by_the_padded_width():
    step = Step(LENGTHS)
    given = {**counts(step), "loss_scale_factor": None}
    widths = [mb.mask.shape[1] for mb in step.microbatches]
    assert widths == [6, 9, 9, 9]  # the same sequence weighs more in the narrower microbatch
    shares = [
        core_algos.agg_loss(
            torch.ones_like(mb.log_probs), mb.mask, "seq-mean-token-sum-norm", **given
        )
        for mb in step.microbatches
    ]
    per_token = [share / mb.mask.sum() for share, mb in zip(shares, step.microbatches, strict=True)]
    assert (per_token[0] / per_token[1]).item() == pytest.approx(9 / 6)


@pytest.mark.parametrize(
    "loss", sorted({check.name.partition("+")[2] or "vanilla" for check in CHECKS[len(MODES) :]})
)
@pytest.mark.parametrize("mode", MODES)
def test_a_registered_loss_has_verls_own_metrics(mode, loss):
    step = Step(MASKED)
    divisor = DIVISOR if mode.endswith("norm") else None  # token_sum takes one, verl's does not
    made = actor_config(step, divisor=divisor)
    metrics = []
    for name, given in ((loss, mode), (LossMode(alias(mode).mode, True, loss).name, "token-mean")):
        torch.manual_seed(3)  # clip_cov and kl_cov draw tokens
        metrics.append([run_one(step, name, made, number, given)[1] for number in range(4)])
    assert metrics[0] == metrics[1]


def run_one(step, name, made, number=0, mode="token-mean"):
    mb = step.microbatches[number]
    return core_algos.get_policy_loss_fn(name)(
        loss_agg_mode=mode,
        old_log_prob=mb.old_log_probs,
        log_prob=mb.log_probs,
        advantages=mb.advantages,
        response_mask=mb.mask,
        config=made,
    )


def test_a_loss_that_averages_by_itself_is_not_registered():
    # verl's geo_mean is a mean over each microbatch: it depends on how the step is split.
    with pytest.raises(ValueError, match="Unsupported loss mode: lossagg_token_mean\\+geo_mean"):
        core_algos.get_policy_loss_fn("lossagg_token_mean+geo_mean")


@pytest.mark.parametrize("name", ["lossagg_prompt_mean", "lossagg_sample_mean_no_count_empty"])
def test_what_verl_does_not_count_needs_the_engine(name):
    step = Step(LENGTHS)
    with pytest.raises(AggregationError, match="set VERL_ENGINE_VENDOR=lossagg in the env"):
        run_one(step, name, actor_config(step))


def test_constant_without_a_divisor_is_refused():
    step = Step(LENGTHS)
    made = actor_config(step)
    made.global_batch_info["loss_scale_factor"] = None
    with pytest.raises(AggregationError, match=r"set actor_rollout_ref\.actor\.loss_scale_factor"):
        run_one(step, "lossagg_constant", made)


def test_an_engine_that_counts_nothing_is_refused():
    step = Step(LENGTHS)
    made = actor_config(step)
    made.global_batch_info["batch_num_tokens"] = None
    with pytest.raises(PlanError, match="lacks batch_num_tokens"):
        run_one(step, "lossagg_token_mean", made)


def test_a_selected_engine_that_does_not_run_is_an_error(monkeypatch):
    step = Step(LENGTHS)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "lossagg")
    with pytest.raises(ContractError, match="verl runs another engine"):
        run_one(step, "lossagg_token_mean", actor_config(step))


def test_kl_and_entropy_beside_the_policy_loss_are_warned_of():
    step = Step(LENGTHS)
    made = actor_config(step, use_kl_loss=True)
    with pytest.warns(RuntimeWarning, match="KL and entropy keep loss_agg_mode=token-mean"):
        run_one(step, "lossagg_sample_mean", made)


def test_agg_loss_is_verls_own_again_afterwards():
    own = core_algos.agg_loss
    step = Step(LENGTHS)
    run_one(step, "lossagg_sample_mean", actor_config(step))
    assert core_algos.agg_loss is own
    with pytest.raises(AttributeError):
        run_one(step, "lossagg_sample_mean", None)
    assert core_algos.agg_loss is own


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    file = tmp_path_factory.mktemp("reference") / "reference.pt"
    launched("verl_engine_worker.py", "reference", file, 0, processes=1)
    return file


@pytest.mark.parametrize("per_token", [0, 1])
def test_on_verls_own_engine_policy_kl_and_entropy_have_our_weights(reference, per_token):
    out = launched("verl_engine_worker.py", "compare", reference, per_token, processes=4)
    print(out)
    assert out.count(": the oracle") == 13
    # Of an odd number of tokens verl counts one less per microbatch, at CP 2: too large a loss.
    assert out.count(" times the oracle") == 2 * per_token
