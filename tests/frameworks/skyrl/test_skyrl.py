"""SkyRL's integration without SkyRL, and with its own worker where there is a checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import left_out
import pytest
import skyrl_page
import skyrl_written
import torch
from conftest import TESTS, launched
from device_double import DeviceDouble
from framework_folders import PATH
from frameworks import (
    INSTALLED,
    LAYOUTS,
    assert_live,
    checkout_of,
    copy_of,
    in_float64,
    needs,
    reference,
)
from skyrl_written import RayPPOTrainer, SFTTrainer, SkyRLBatch, sft_collator, skyrl_config

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations import skyrl
from megatron_lossagg.integrations._shared import WEIGH
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options

MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
REDUCTION = "apply_loss_reduction_to_advantages_minibatch"
TURNS = [False, True, True, True]
"""``is_last_step`` of three trajectories."""


def made(mode="sample_mean", *, count_empty=True, config=None, **more):
    aggregation = Aggregation(mode, count_empty=count_empty)
    return skyrl.aggregated(RayPPOTrainer, aggregation, **more)(config or skyrl_config())


def data(mask=MASK, **metadata):
    tensors = {"advantages": torch.ones(len(mask), len(mask[0])), "loss_mask": torch.tensor(mask)}
    return SkyRLBatch(tensors, **metadata)


@pytest.mark.parametrize(
    ("trainer", "metadata", "boundaries", "weights"),
    [
        ({}, {}, [(0, 2), (2, 4)], [1 / 4, 1 / 2, 0, 1 / 6]),
        ({}, {"is_last_step": TURNS}, [(0, 4)], [1 / 9, 1 / 9, 0, 1 / 9]),
        ({"mode": "prompt_mean"}, {}, [(0, 4)], [1 / 9, 1 / 9, 0, 1 / 9]),
        (
            {"mode": "prompt_mean", "count_empty": False},
            {},
            [(0, 4)],
            [1 / 6, 1 / 6, 0, 1 / 6],
        ),
    ],
    ids=[
        "a mini-batch is one step",
        "turns of a trajectory are one sample",
        "an empty prompt counts",
        "an empty prompt does not count",
    ],
)
def test_advantages_leave_with_the_weights_of_their_mini_batch(
    trainer, metadata, boundaries, weights
):
    prompts = [(0, 2), (2, 3), (3, 4)]
    out = made(**trainer)._normalize_advantages(data(**metadata), boundaries, prompts)
    assert out["advantages"][:, 0].tolist() == pytest.approx(weights)


def test_turns_are_one_sample_where_the_loop_drops_what_says_so_before_it_trains():
    trainer = made(config=skyrl_config(step_wise=True))
    steps = trainer.compute_advantages_and_returns(data(is_last_step=TURNS, uids=[]))
    del steps.metadata["is_last_step"]  # as SkyRL's synchronous train does
    out = trainer._normalize_advantages(steps, [(0, 4)])["advantages"]
    assert out[:, 0].tolist() == pytest.approx([1 / 9, 1 / 9, 0, 1 / 9])
    with pytest.raises(ContractError, match=r"got none of metadata.*for 4 sequences of step-wise"):
        trainer._normalize_advantages(data(), [(0, 4)])
    with pytest.raises(ContractError, match=r"got 3 of them of metadata.*every turn would count"):
        trainer._normalize_advantages(data(is_last_step=[True] * 3), [(0, 4)])


MINUS = torch.tensor([[1.0], [1.0], [1.0], [-1.0], [-2.0], [0.0]])


@pytest.mark.parametrize(
    ("turns", "weights"),
    [
        # One prompt: samples of 2 and 1 tokens and a masked one; of 3 and 1; one of 1 that is 0.
        (None, [2 / 3, 2 / 3, 0, 2 / 4, 2 / 4, 2 / 1]),
        # The masked one is a turn of the second sample; so are the two negative ones of a third.
        ([True, False, True, False, True, True], [2 / 3, 2 / 3, 0, 1 / 4, 1 / 4, 1 / 1]),
    ],
    ids=["sequences", "turns"],
)
def test_a_group_is_a_prompts_samples_with_one_sign_of_the_advantage(turns, weights):
    mask = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 1]]
    given = data(mask) if turns is None else data(mask, is_last_step=turns)
    given["advantages"] = given["advantages"] * MINUS
    out = made("balanced")._normalize_advantages(given, [(0, 6)], [(0, 6)])["advantages"]
    num_samples = 6 if turns is None else 4
    wanted = torch.tensor(weights)[:, None] / num_samples * MINUS
    assert torch.allclose(out, wanted.expand_as(out))


def test_a_prompt_has_groups_of_its_own():
    out = made("balanced")._normalize_advantages(data(), [(0, 4)], [(0, 2), (2, 3), (3, 4)])
    assert out["advantages"][:, 0].tolist() == pytest.approx([2 / 12, 2 / 12, 0, 1 / 12])


def test_groups_that_are_not_known_are_refused():
    with pytest.raises(PlanError, match="needs Sequences"):
        made("balanced")._normalize_advantages(data(), [(0, 4)])
    given = data()
    given["advantages"] = torch.tensor([[1.0, -1.0, 1.0]] * 4)
    with pytest.raises(PlanError, match="expected one sign for all of a sequence's active tokens"):
        made("balanced")._normalize_advantages(given, [(0, 4)], [(0, 4)])


def test_advantages_are_scaled_where_the_trainer_has_its_batch_on_a_device():
    trainer = made(carry_weights=True)
    want = trainer._normalize_advantages(data(), [(0, 2), (2, 4)])
    with DeviceDouble() as double:
        batch = data()
        for name in batch:
            batch[name] = batch[name].to(double.device)
        got = trainer._normalize_advantages(batch, [(0, 2), (2, 4)])
        assert {one.device for one in got.values()} == {double.device}
        got = {name: one.cpu() for name, one in got.items()}
    for name in ("advantages", "loss_weights"):
        assert torch.equal(got[name], want[name])


def test_prompt_mean_without_prompts_is_refused():
    with pytest.raises(PlanError, match="needs Sequences"):
        made("prompt_mean")._normalize_advantages(data(), [(0, 4)])


@pytest.mark.parametrize("asked", ["", "1"])
def test_a_batch_has_the_weights_for_weighing_where_it_is_asked_for(asked, monkeypatch):
    monkeypatch.setenv(WEIGH, asked)
    out = made()._normalize_advantages(data(), [(0, 2), (2, 4)])
    assert (skyrl.SCALE in out) == bool(asked)
    if asked:
        assert out[skyrl.SCALE][:, 0].tolist() == pytest.approx([1 / 4, 1 / 2, 0, 1 / 6])


def test_what_cannot_be_weighed_is_refused_as_the_trainer_starts(monkeypatch):
    own = skyrl.aggregated(RayPPOTrainer, None)
    for config in (skyrl_config(policy_loss_type="clip_cov"), skyrl_config(strategy="fsdp")):
        own(config)  # which SkyRL trains
    monkeypatch.setenv(WEIGH, "1")
    with pytest.raises(AggregationError, match="policy_loss_type=clip_cov is not proportional"):
        own(skyrl_config(policy_loss_type="clip_cov"))
    with pytest.raises(ContractError, match=r"strategy=fsdp, expected megatron"):
        own(skyrl_config(strategy="fsdp"))


def test_skyrls_own_reduction_is_back_afterwards():
    own = getattr(skyrl_written, REDUCTION)
    made()._normalize_advantages(data(), [(0, 4)])
    with pytest.raises(PlanError, match="other than 0 and 1"):
        made()._normalize_advantages(data([[2, 1, 0]]), [(0, 1)])
    assert getattr(skyrl_written, REDUCTION) is own


def test_a_trainer_that_does_not_reduce_is_an_error(monkeypatch):
    trainer = made()
    trainer.num_calls_left = 1
    with pytest.raises(ContractError, match="SkyRL reduced 1 of 2 mini-batches"):
        trainer._normalize_advantages(data(), [(0, 2), (2, 4)])
    monkeypatch.delattr(skyrl_written, REDUCTION)
    with pytest.raises(ContractError, match="has no apply_loss_reduction"):
        trainer._normalize_advantages(data(), [(0, 4)])


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "cross_entropy"])
def test_a_loss_that_is_not_proportional_to_advantages_is_refused_at_startup(loss):
    with pytest.raises(AggregationError, match=f"policy_loss_type={loss} is not proportional"):
        made(config=skyrl_config(policy_loss_type=loss))


@pytest.mark.parametrize(
    ("changes", "carries", "warned"),
    [
        ({"use_kl_loss": True, "use_entropy_loss": True}, False, "KL and entropy stay SkyRL's"),
        ({"use_kl_loss": True}, True, None),
        ({"mtp": True}, False, "the loss of the MTP heads stays SkyRL's mean"),
        ({"mtp": True}, True, "the loss of the MTP heads stays SkyRL's mean"),
        ({"critic": "a/model"}, True, "the critic's value loss stays SkyRL's mean"),
        ({"policy_loss_type": "mine"}, False, "policy_loss_type=mine is not one of SkyRL's own"),
        ({}, False, None),
    ],
)
def test_a_term_that_stays_skyrls_and_an_unknown_loss_are_warned_of(
    changes, carries, warned, recwarn
):
    made(config=skyrl_config(**changes), carry_weights=carries)
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == (warned is not None)
    assert all(warned in message for message in messages)


def test_a_mode_of_microbatches_is_refused():
    with pytest.raises(AggregationError, match="SkyRL's trainer knows no microbatches"):
        made("microbatch_token_mean")


def test_the_entry_point_reads_its_own_arguments():
    own = "trainer.override_entrypoint=megatron_lossagg.integrations.skyrl"
    aggregation, rest = skyrl._split(
        ["a=1", "loss_aggregation=constant", "loss_aggregation_divisor=4e3", own, "trainer.b=2"]
    )
    assert aggregation == Aggregation("constant", divisor=4000)
    assert rest == ["a=1", "trainer.b=2"]
    aggregation, _ = skyrl._split(
        ["loss_aggregation=prompt_mean", "loss_aggregation_count_empty=False"]
    )
    assert aggregation == Aggregation("prompt_mean", count_empty=False)
    aggregation, rest = skyrl._split(
        ["loss_aggregation=length_power", "loss_aggregation_exponent=0.5", "a=1"]
    )
    assert aggregation == Aggregation("length_power", exponent=0.5)
    assert rest == ["a=1"]


def test_the_entry_point_weighs_skyrls_own_reduction(monkeypatch):
    monkeypatch.setenv(WEIGH, "1")
    assert skyrl._split(["a=1"]) == (None, ["a=1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=1"], "got no loss_aggregation: add loss_aggregation=prompt_mean"),
        (["loss_aggregation_mode=constant"], "expected one of loss_aggregation, "),
        (["loss_aggregation=sample_mean", "loss_aggregation_count_empty=1"], "true or false"),
        (["loss_aggregation_divisor=3"], "without --loss-aggregation"),
        (["loss_aggregation=length_power"], "needs an exponent and got none"),
        (["loss_aggregation=length_power", "loss_aggregation_exponent=x"], "expected a number"),
    ],
)
def test_wrong_arguments_of_the_entry_point_are_refused(arguments, message):
    with pytest.raises(AggregationError, match=message):
        skyrl._split(arguments)


PATCH = "skyrl-kl-entropy.patch"
PATCH_0_4_0, SKYRL_0_4_0 = "skyrl-0.4.0-kl-entropy.patch", INSTALLED / "skyrl-0.4.0"
needs_0_4_0 = pytest.mark.skipif(
    not SKYRL_0_4_0.is_dir(), reason="skyrl 0.4.0 is not installed: run make test-frameworks"
)
EVERYTHING = "pg kl entropy"
IN_FLOAT32 = (
    "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py",
    "skyrl/backends/skyrl_train/utils/torch_utils.py",
    "skyrl/train/dataset/collators.py",
)
"""Where SkyRL computes log-probabilities, ratios and SFT's loss masks in float32."""
MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "prompt_mean", "length_power")
MODES_WITHOUT_EMPTY = ("prompt_mean without empty", "sample_mean without empty")


@pytest.fixture
def errors_of(launches, tmp_path):
    """Return a function that trains cases on SkyRL's worker, computing in float64 unless told."""

    def run(
        source, cases, *, patch=PATCH, cp=1, tp=1, pp=1, processes=4, bound=1e-12, is_exact=True
    ):
        checkout = copy_of(source, "skyrl", tmp_path, patch=patch)
        if is_exact:
            in_float64(checkout / file for file in IN_FLOAT32)
        arguments = (reference("float64", pp), checkout, cp, tp, pp, bound, *cases)
        out = launched("frameworks/skyrl/skyrl_worker.py", *arguments, processes=processes)
        print(out)
        lines = re.findall(r"^(.*): (\S+), (\S+) padding microbatches per rank$", out, re.M)
        assert [case for case, _, _ in lines] == cases
        return {case: (float(error), float(padding)) for case, error, padding in lines}

    return run


@pytest.mark.launches
@needs("SkyRL", installed=True)
def test_the_checkouts_own_loop_keeps_the_turns_of_a_trajectory_together():
    """As ``make test-frameworks`` asserts it of released SkyRL."""
    paths = [*PATH, checkout_of("SkyRL"), INSTALLED]
    options = [
        *("-q", "-p", "stand_ins_first", "-p", "no:cacheprovider", "-p", "no:hydra_pytest"),
        *("-k", "own_loop or lost"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "frameworks/skyrl/skyrl_checks.py"],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


@needs("SkyRL", installed=True)
def test_with_the_patch_policy_kl_and_entropy_have_our_weights(errors_of):
    every = [f"{mode}/{EVERYTHING}/packed/3" for mode in MODES + MODES_WITHOUT_EMPTY]
    one = [f"{mode}/{EVERYTHING}/packed/1" for mode in MODES]
    by_tokens = [f"{mode}/{EVERYTHING}/tokens/0" for mode in MODES]
    errors = errors_of("SkyRL", [*every, *one, *by_tokens], cp=2)
    assert all(error < 1e-12 for error, _ in errors.values())
    # One rank of two has one microbatch more, so that the other one trains on one of padding.
    assert {errors[case][1] for case in by_tokens} == {0.5}


@needs_0_4_0
def test_with_its_patch_skyrl_0_4_0_trains_policy_kl_and_entropy_with_our_weights(errors_of):
    modes = ("prompt_mean", "sample_mean without empty", "constant")
    cases = [f"{mode}/{EVERYTHING}/{how}" for mode in modes for how in ("packed/3", "tokens/0")]
    errors = errors_of(SKYRL_0_4_0, cases, patch=PATCH_0_4_0, cp=2)
    assert all(error < 1e-12 for error, _ in errors.values())


@pytest.mark.launches
@needs_0_4_0
def test_the_patches_are_of_their_releases(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        copy_of(SKYRL_0_4_0, "skyrl", tmp_path, patch=PATCH)


@needs("SkyRL", installed=True)
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"tp": 2}], ids=str)
def test_skyrls_sft_trainer_trains_by_the_mode(errors_of, sizes):
    modes = [mode for mode in (*MODES, *MODES_WITHOUT_EMPTY) if "prompt" not in mode]
    ways = ("packed/1", "packed/3", "bins/0")
    cases = [f"{mode}/nll/{how}" for mode in modes for how in ways]
    errors = errors_of("SkyRL", cases, patch=None, **sizes)
    assert all(error < 1e-12 for error, _ in errors.values())


@needs("SkyRL", installed=True)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_with_the_patch_the_weights_are_ours_on_split_models_and_padded_sequences(errors_of, sizes):
    cases = [f"prompt_mean/{EVERYTHING}/{how}/{m}" for how in ("packed", "padded") for m in (1, 3)]
    assert all(error < 1e-12 for error, _ in errors_of("SkyRL", cases, **sizes).values())


REDUCTIONS = (
    *("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm"),
    "prompt_mean",
)


@needs("SkyRL", installed=True)
@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_each_token_of_skyrls_policy_loss_weighs_what_its_trainer_says_by_loops_over_sequences(
    errors_of, dp, cp
):
    ways = ("packed", "padded") if cp == 1 else ("packed",)  # all that SkyRL has
    cases = [f"stock {name}/pg/{how}/3" for name in REDUCTIONS for how in ways]
    cases += [f"{mode}/pg/packed/3" for mode in (*MODES, *MODES_WITHOUT_EMPTY)]
    cases += [f"{mode}/pg/tokens/0" for mode in ("stock sequence_mean", "prompt_mean")]
    errors = errors_of("SkyRL", cases, patch=None, cp=cp, processes=dp * cp)
    assert all(error < 1e-12 for error, _ in errors.values())


@pytest.mark.launches
@needs("SkyRL", "ray", installed=True)
def test_a_driver_that_is_asked_to_weigh_lets_rays_actor_of_the_policy_listen():
    paths = [*PATH, checkout_of("SkyRL")]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("skyrl_ray.py"), checkout_of("SkyRL")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = "FOUND (True, [('a/model', True), ('a/model', False)])"
    assert found in done.stdout, done.stdout + done.stderr


@needs("SkyRL", installed=True)
def test_without_the_patch_weigh_shows_which_means_kl_and_entropy_are(errors_of):
    errors_of("SkyRL", [f"prompt_mean/{EVERYTHING}/padded/{m}" for m in (1, 3)], patch=None)


@needs("SkyRL", installed=True)
def test_the_patch_keeps_the_weights_in_skyrls_own_precision(errors_of):
    cases = [f"{mode}/{EVERYTHING}/packed/3" for mode in MODES]
    errors = errors_of("SkyRL", cases, processes=2, bound=1e-5, is_exact=False)
    assert all(error < 1e-5 for error, _ in errors.values())


@needs("SkyRL", installed=True)
def test_without_the_patch_only_the_policy_loss_has_our_weights(errors_of):
    cases = [f"prompt_mean/{terms}/packed/3" for terms in ("pg", "pg kl", EVERYTHING)]
    errors = [error for error, _ in errors_of("SkyRL", cases, patch=None, cp=2).values()]
    assert errors[0] < 1e-12
    assert min(errors[1:]) > 0.02


@pytest.mark.launches
@needs("SkyRL", installed=True)
def test_skyrl_starts_by_the_pages_line_and_its_trainer_in_ray_trains_the_mode(tmp_path):
    skyrl_page.check(tmp_path, checkout_of("SkyRL"))


@pytest.mark.launches
@needs("SkyRL", installed=True)
def test_skyrl_weighs_its_own_token_mean_by_the_page_of_weighing(tmp_path):
    found, done = skyrl_page.start(tmp_path, checkout_of("SkyRL"), weighed=True)
    assert found is not None, done.stderr[-4000:]
    assert found["policy"] == "WeighedPolicyWorker"
    (weight,) = set(found["weights"])
    assert weight == pytest.approx(1 / sum(n for _, n in found["sequences"]))


@pytest.mark.launches
def test_on_live_megatron_skyrls_own_scaling_makes_it_the_configured_loss():
    assert_live("skyrl", cases=8)


PROMPTS = [(0, 2), (2, 3), (3, 4)]
"""SkyRL's zero-variance filter has masked the second."""


def advantages_of_skyrl(mode, **more):
    trainer = skyrl.aggregated(RayPPOTrainer, left_out.of_mode(mode, **more))(skyrl_config())
    batch = SkyRLBatch({"advantages": torch.ones(4, 3), "loss_mask": torch.tensor(MASK)})
    return trainer._normalize_advantages(batch, [(0, 4)], PROMPTS)["advantages"]


@pytest.mark.parametrize("mode", ["token_mean", *left_out.COUNTS_EMPTY])
def test_a_group_that_skyrls_filter_masks_is_left_out_if_empty_samples_do_not_count(mode):
    sequences = [
        {
            "x": list(torch.arange(3.0) + number),
            "counted": [1, 1, 1] if number == 2 else mask,  # masked afterwards
            "trained": [1, 1, 1] if number == 2 else mask,
            "sample": number,
            "prompt": [0, 0, 1, 2][number],
            "left_out": number == 2,
        }
        for number, mask in enumerate(MASK)
    ]
    want = reference_loss.step_loss(
        mode, sequences, **reference_options(left_out.of_mode(mode), [])
    )
    losses = torch.stack([torch.stack(one["x"]) for one in sequences])
    got = (advantages_of_skyrl(mode, count_empty=False) * losses * torch.tensor(MASK)).sum()
    assert got.item() == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("mode", ["token_mean", *left_out.NAMED])
def test_skyrl_names_the_setting_once(mode, capsys, monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    for _ in range(2):
        advantages_of_skyrl(mode)
    leave_out = "loss_aggregation_count_empty=false (count_empty=False)"
    left_out.assert_said(capsys.readouterr().err, mode, leave_out)
    advantages_of_skyrl(mode, count_empty=False)
    assert "without an active token" not in capsys.readouterr().err


SFT_CONFIG = SimpleNamespace(strategy="fsdp")
EXAMPLES = [{"loss_mask": mask} for mask in ([1, 1, 0], [1], [0, 0], [1, 1, 1])]


def made_sft(mode="sample_mean", cfg=SFT_CONFIG, **options):
    return skyrl.aggregated_sft(SFTTrainer, Aggregation(mode, **options))(cfg)


@pytest.mark.parametrize(
    ("mode", "options", "weights"),
    [
        ("token_mean", {}, [1 / 6, 1 / 6, 0, 1 / 6]),
        ("sample_mean", {}, [1 / 8, 1 / 4, 0, 1 / 12]),
        ("sample_mean", {"count_empty": False}, [1 / 6, 1 / 3, 0, 1 / 9]),
        ("constant", {"divisor": 5}, [1 / 20, 1 / 20, 0, 1 / 20]),
    ],
)
def test_a_training_batch_of_sft_has_the_weights_and_an_evaluations_has_not(mode, options, weights):
    trainer = made_sft(mode, **options)
    (batch,) = trainer.build_train_dataloader(EXAMPLES)
    got = trainer.train_step(batch, 0)["loss_mask"]
    mask = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]])
    assert torch.allclose(got, mask * torch.tensor(weights, dtype=got.dtype)[:, None], rtol=1e-12)
    assert trainer.collator is sft_collator


def test_a_training_batch_of_sft_without_the_weights_is_an_error():
    trainer = made_sft()
    with pytest.raises(ContractError, match="got a training batch without the weights"):
        trainer.train_step(sft_collator(EXAMPLES, 4), 0)
    with pytest.raises(PlanError, match=r"values other than 0 and 1.*SkyRL passes no token"):
        trainer.build_train_dataloader([{"loss_mask": [1, 0.5]}])
    assert trainer.collator is sft_collator


@pytest.mark.parametrize("mode", ["prompt_mean", "balanced", "microbatch_token_mean"])
def test_a_mode_that_sft_has_no_counts_for_is_refused(mode):
    with pytest.raises(AggregationError, match="knows neither prompts nor microbatches"):
        made_sft(mode)


@pytest.mark.parametrize(("layers", "is_warned"), [(None, True), (1, True), (0, False)])
def test_mtp_heads_that_stay_skyrls_in_sft_are_warned_of(layers, is_warned, recwarn):
    megatron = SimpleNamespace(mtp_num_layers=layers)
    made_sft(cfg=SimpleNamespace(strategy="megatron", megatron_config=megatron))
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == is_warned
    assert all("the loss of MTP heads, if the model has any, stays" in one for one in messages)
