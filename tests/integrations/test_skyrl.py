"""SkyRL's integration without SkyRL, and with its own worker where there is a checkout.

Live without SkyRL in ``test_verl.py``, released in ``make test-frameworks``.
"""

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TESTS, launched
from device_double import DeviceDouble
from frameworks import FRAMEWORKS_DIR, INSTALLED, copy_of, in_float64, needs_checkout

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations import skyrl


def config(**changes):
    algorithm = {
        "policy_loss_type": "regular",
        "use_kl_loss": False,
        "use_entropy_loss": False,
        **changes,
    }
    return SimpleNamespace(trainer=SimpleNamespace(algorithm=SimpleNamespace(**algorithm)))


@pytest.fixture
def trainer(monkeypatch):
    """Make a trainer in a module of its own, which reduces each mini-batch as SkyRL does."""
    module = types.ModuleType("a_skyrl_trainer")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.apply_loss_reduction_to_advantages_minibatch = lambda **_: None

    class Trainer:
        __module__ = module.__name__
        num_calls_left = 99

        def __init__(self, cfg):
            self.cfg = cfg

        def compute_advantages_and_returns(self, data):
            return data

        def _normalize_advantages(self, data, boundaries, prompts=None):
            for start, end in boundaries[: self.num_calls_left]:
                reduce = module.apply_loss_reduction_to_advantages_minibatch
                data["advantages"][start:end] = reduce(
                    advantages=data["advantages"][start:end],
                    loss_mask=data["loss_mask"][start:end],
                    loss_reduction="token_mean",
                    micro_batch_size=1,
                    max_seq_len=None,
                    prompt_boundaries=prompts and [(a - start, b - start) for a, b in prompts],
                )
            return data

    Trainer._normalize_advantages.__module__ = module.__name__
    return Trainer


class Data(dict):
    metadata = types.MappingProxyType({})


def data(mask, **metadata):
    made = Data(advantages=torch.ones(len(mask), len(mask[0])), loss_mask=torch.tensor(mask))
    made.metadata = metadata
    return made


MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]


def test_a_mini_batch_is_one_step(trainer):
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"))(config())
    out = made._normalize_advantages(data(MASK), [(0, 2), (2, 4)])["advantages"]
    assert out[:, 0].tolist() == pytest.approx([1 / 4, 1 / 2, 0, 1 / 6])


def test_turns_of_a_trajectory_are_one_sample(trainer):
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"))(config())
    steps = data(MASK, is_last_step=[False, True, True, True])
    out = made._normalize_advantages(steps, [(0, 4)])["advantages"]
    assert out[:, 0].tolist() == pytest.approx([1 / 9, 1 / 9, 0, 1 / 9])


def test_turns_are_one_sample_where_the_loop_drops_what_says_so_before_it_trains(trainer):
    cfg = config()
    cfg.generator = SimpleNamespace(step_wise_trajectories=True)
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"))(cfg)
    steps = made.compute_advantages_and_returns(
        data(MASK, is_last_step=[False, True, True, True], uids=[])
    )
    del steps.metadata["is_last_step"]  # as SkyRL's synchronous train does
    out = made._normalize_advantages(steps, [(0, 4)])["advantages"]
    assert out[:, 0].tolist() == pytest.approx([1 / 9, 1 / 9, 0, 1 / 9])
    with pytest.raises(ContractError, match=r"got none of metadata.*for 4 sequences of step-wise"):
        made._normalize_advantages(data(MASK), [(0, 4)])
    with pytest.raises(ContractError, match=r"got 3 of them of metadata.*every turn would count"):
        made._normalize_advantages(data(MASK, is_last_step=[True] * 3), [(0, 4)])


def test_advantages_are_scaled_where_the_trainer_has_its_batch_on_a_device(trainer):
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"), carry_weights=True)(config())
    want = made._normalize_advantages(data(MASK), [(0, 2), (2, 4)])
    with DeviceDouble() as double:
        batch = data(MASK)
        for name in batch:
            batch[name] = batch[name].to(double.device)
        got = made._normalize_advantages(batch, [(0, 2), (2, 4)])
        assert {one.device for one in got.values()} == {double.device}
        got = {name: one.cpu() for name, one in got.items()}
    for name in ("advantages", "loss_weights"):
        assert torch.equal(got[name], want[name])


@pytest.mark.parametrize(("count_empty", "prompts"), [(True, 3), (False, 2)])
def test_an_empty_prompt_counts_where_it_is_to_count(trainer, count_empty, prompts):
    aggregation = Aggregation("prompt_mean", count_empty=count_empty)
    made = skyrl.aggregated(trainer, aggregation)(config())
    out = made._normalize_advantages(data(MASK), [(0, 4)], [(0, 2), (2, 3), (3, 4)])["advantages"]
    each = [1 / 3, 1 / 3, 0, 1 / 3]
    assert out[:, 0].tolist() == pytest.approx([w / prompts for w in each])


def test_prompt_mean_without_prompts_is_refused(trainer):
    made = skyrl.aggregated(trainer, Aggregation("prompt_mean"))(config())
    with pytest.raises(PlanError, match="needs Sequences"):
        made._normalize_advantages(data(MASK), [(0, 4)])


def test_skyrls_own_reduction_is_back_afterwards(trainer):
    module = sys.modules["a_skyrl_trainer"]
    own = module.apply_loss_reduction_to_advantages_minibatch
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"))(config())
    made._normalize_advantages(data(MASK), [(0, 4)])
    with pytest.raises(PlanError, match="other than 0 and 1"):
        made._normalize_advantages(data([[2, 1, 0]]), [(0, 1)])
    assert module.apply_loss_reduction_to_advantages_minibatch is own


def test_a_trainer_that_does_not_reduce_is_an_error(trainer):
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"))(config())
    made.num_calls_left = 1
    with pytest.raises(ContractError, match="SkyRL reduced 1 of 2 mini-batches"):
        made._normalize_advantages(data(MASK), [(0, 2), (2, 4)])
    del sys.modules["a_skyrl_trainer"].apply_loss_reduction_to_advantages_minibatch
    with pytest.raises(ContractError, match="has no apply_loss_reduction"):
        made._normalize_advantages(data(MASK), [(0, 4)])


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "cross_entropy"])
def test_a_loss_that_is_not_proportional_to_advantages_is_refused_at_startup(trainer, loss):
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"))
    with pytest.raises(AggregationError, match=f"policy_loss_type={loss} is not proportional"):
        made(config(policy_loss_type=loss))


def test_kl_and_entropy_and_unknown_losses_are_warned_of(trainer):
    made = skyrl.aggregated(trainer, Aggregation("sample_mean"))
    with pytest.warns(RuntimeWarning, match="KL and entropy stay SkyRL's means"):
        made(config(use_kl_loss=True, use_entropy_loss=True))
    with_mtp = config()
    with_mtp.trainer.mtp = SimpleNamespace(enabled=True)
    for carry_weights in (False, True):
        with pytest.warns(RuntimeWarning, match="the loss of the MTP heads stays SkyRL's mean"):
            skyrl.check_config(with_mtp, carry_weights=carry_weights)
    with_mtp.trainer.mtp.enabled = False
    skyrl.check_config(with_mtp)
    with pytest.warns(RuntimeWarning, match="policy_loss_type=mine is not one of SkyRL's own"):
        made(config(policy_loss_type="mine"))


def test_a_mode_of_microbatches_is_refused(trainer):
    with pytest.raises(AggregationError, match="SkyRL's trainer knows no microbatches"):
        skyrl.aggregated(trainer, Aggregation("microbatch_token_mean"))


def test_the_entry_point_reads_its_own_arguments():
    aggregation, rest = skyrl._split(
        ["a=1", "loss_aggregation=constant", "loss_aggregation_divisor=4e3", "trainer.b=2"]
    )
    assert aggregation == Aggregation("constant", divisor=4000)
    assert rest == ["a=1", "trainer.b=2"]
    aggregation, _ = skyrl._split(
        ["loss_aggregation=prompt_mean", "loss_aggregation_count_empty=False"]
    )
    assert aggregation == Aggregation("prompt_mean", count_empty=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=1"], "got no loss_aggregation: add loss_aggregation=prompt_mean"),
        (["loss_aggregation_mode=constant"], "expected one of loss_aggregation, "),
        (["loss_aggregation=sample_mean", "loss_aggregation_count_empty=1"], "true or false"),
        (["loss_aggregation_divisor=3"], "without --loss-aggregation"),
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
)
"""Where SkyRL computes log-probabilities and ratios in float32."""
MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "prompt_mean")
MODES_WITHOUT_EMPTY = ("prompt_mean without empty", "sample_mean without empty")


@pytest.fixture(scope="module")
def reference(launches, tmp_path_factory):
    """Compute the reference's losses and gradients of the step, term by term."""
    file = tmp_path_factory.mktemp("reference") / "reference.pt"
    launched("integrations/framework_worker.py", "reference", file, processes=1)
    return file


def errors_of(reference, checkout, cases, *, cp=1, tp=1, pp=1, processes=4, bound=1e-12):
    """Train steps on SkyRL's worker; return each case's gradient error and padding microbatches."""
    arguments = (reference, checkout, cp, tp, pp, bound, *cases)
    out = launched("integrations/skyrl_worker.py", *arguments, processes=processes)
    print(out)
    lines = re.findall(r"^(.*): (\S+), (\S+) padding microbatches per rank$", out, re.MULTILINE)
    assert [case for case, _, _ in lines] == cases
    return {case: (float(error), float(padding)) for case, error, padding in lines}


@pytest.mark.launches
@needs_checkout("SkyRL")
def test_the_checkouts_own_loop_keeps_the_turns_of_a_trajectory_together():
    """As ``make test-frameworks`` asserts it of released SkyRL."""
    paths = [
        TESTS.parent,
        TESTS / "support",
        TESTS / "integrations",
        Path(FRAMEWORKS_DIR, "SkyRL"),
        INSTALLED,
    ]
    options = ["-q", "-p", "stand_ins_first", "-p", "no:cacheprovider", "-k", "own_loop or lost"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "integrations/skyrl_checks.py"],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@needs_checkout("SkyRL")
def test_with_the_patch_policy_kl_and_entropy_have_our_weights(reference, tmp_path):
    checkout = copy_of("SkyRL", "skyrl", tmp_path, patch=PATCH)
    in_float64(checkout / file for file in IN_FLOAT32)
    every = [f"{mode}/{EVERYTHING}/packed/3" for mode in MODES + MODES_WITHOUT_EMPTY]
    one = [f"{mode}/{EVERYTHING}/packed/1" for mode in MODES]
    by_tokens = [f"{mode}/{EVERYTHING}/tokens/0" for mode in MODES]
    errors = errors_of(reference, checkout, [*every, *one, *by_tokens], cp=2)
    assert all(error < 1e-12 for error, _ in errors.values())
    # One rank of two has one microbatch more, so that the other one trains on one of padding.
    assert {errors[case][1] for case in by_tokens} == {0.5}


@needs_0_4_0
def test_with_its_patch_skyrl_0_4_0_trains_policy_kl_and_entropy_with_our_weights(
    reference, tmp_path
):
    checkout = copy_of(SKYRL_0_4_0, "skyrl", tmp_path, patch=PATCH_0_4_0)
    in_float64(checkout / file for file in IN_FLOAT32)
    modes = ("prompt_mean", "sample_mean without empty", "constant")
    cases = [f"{mode}/{EVERYTHING}/{how}" for mode in modes for how in ("packed/3", "tokens/0")]
    errors = errors_of(reference, checkout, cases, cp=2)
    assert all(error < 1e-12 for error, _ in errors.values())


@pytest.mark.launches
@needs_0_4_0
def test_the_patches_are_of_their_releases(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        copy_of(SKYRL_0_4_0, "skyrl", tmp_path, patch=PATCH)


@needs_checkout("SkyRL")
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_with_the_patch_the_weights_are_ours_on_split_models_and_padded_sequences(
    reference, tmp_path, sizes
):
    checkout = copy_of("SkyRL", "skyrl", tmp_path, patch=PATCH)
    in_float64(checkout / file for file in IN_FLOAT32)
    cases = [f"prompt_mean/{EVERYTHING}/{how}/{m}" for how in ("packed", "padded") for m in (1, 3)]
    errors = errors_of(reference, checkout, cases, **sizes)
    assert all(error < 1e-12 for error, _ in errors.values())


@needs_checkout("SkyRL")
def test_the_patch_keeps_the_weights_in_skyrls_own_precision(reference, tmp_path):
    checkout = copy_of("SkyRL", "skyrl", tmp_path, patch=PATCH)
    cases = [f"{mode}/{EVERYTHING}/packed/3" for mode in MODES]
    errors = errors_of(reference, checkout, cases, processes=2, bound=1e-5)
    assert all(error < 1e-5 for error, _ in errors.values())


@needs_checkout("SkyRL")
def test_without_the_patch_only_the_policy_loss_has_our_weights(reference, tmp_path):
    checkout = copy_of("SkyRL", "skyrl", tmp_path)
    in_float64(checkout / file for file in IN_FLOAT32)
    cases = [f"prompt_mean/{terms}/packed/3" for terms in ("pg", "pg kl", EVERYTHING)]
    errors = [error for error, _ in errors_of(reference, checkout, cases, cp=2).values()]
    assert errors[0] < 1e-12
    assert errors[1] > 0.05
    assert errors[2] > 0.05
