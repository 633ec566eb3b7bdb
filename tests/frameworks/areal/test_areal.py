"""AReaL's integration without AReaL, and with its own engine where there is a checkout."""

import os
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import areal_page
import pytest
from conftest import ENVIRONMENT, TESTS, launched, worker_path
from frameworks import copy_of, in_float64, needs, reference

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.integrations import areal

MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "prompt_mean", "length_power")
MODES_WITHOUT_EMPTY = ("prompt_mean without empty", "sample_mean without empty")
IN_FLOAT64 = ("utils/functional/vocab_parallel.py", "engine/core/train_engine.py")
STATISTICS = "utils/stats_tracker.py"
"""AReaL takes float32 only in its statistics."""


def config_of(**changes):
    spec = SimpleNamespace(env_vars={})
    actor = {"m2_threshold": None, "enable_tree_training": False, "_version": "v1"}
    actor |= {"ppo_n_minibatches": 4, "scheduling_spec": [spec]}
    teacher = changes.pop("teacher", None)
    return SimpleNamespace(actor=SimpleNamespace(**{**actor, **changes}), teacher=teacher)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"m2_threshold": 0.04}, "actor.m2_threshold"),
        ({"enable_tree_training": True}, "actor.enable_tree_training"),
        ({"_version": "v2"}, "actor._version"),
        ({"teacher": SimpleNamespace()}, "teacher"),
        ({"mode": "prompt_mean"}, "actor.ppo_n_minibatches=4"),
    ],
)
def test_a_configuration_that_would_train_other_weights_is_refused_as_the_trainer_starts(
    changes, name
):
    aggregation = Aggregation(changes.pop("mode", "sample_mean"))
    with pytest.raises(ContractError, match=f"got {re.escape(name)}"):
        areal.check_config(config_of(**changes), aggregation)


def test_a_configuration_that_trains_the_weights_is_accepted():
    areal.check_config(config_of(), Aggregation("sample_mean"))
    areal.check_config(config_of(ppo_n_minibatches=1), Aggregation("prompt_mean"))
    areal.check_config(SimpleNamespace(actor=config_of().actor), Aggregation("token_mean"))


@pytest.mark.parametrize("mode", ["microbatch_token_mean", "balanced"])
def test_a_mode_that_areal_has_no_ids_for_is_refused(mode):
    with pytest.raises(AggregationError, match="expected a mode of whole steps"):
        areal.aggregated(object, Aggregation(mode))


@pytest.mark.parametrize(
    "aggregation",
    [
        Aggregation("token_mean"),
        Aggregation("constant", divisor=4096),
        Aggregation("sample_mean", count_empty=False),
        Aggregation("length_power", exponent=0.5),
        Aggregation(weights="megatron_lossagg.integrations.areal:check_config"),
    ],
    ids=lambda one: one.mode,
)
def test_a_worker_reads_the_aggregation_of_the_trainer_from_its_environment(
    aggregation, monkeypatch
):
    monkeypatch.setenv("LOSS_AGGREGATION_DIVISOR", "3")  # left by a shell
    variables = areal._variables(aggregation)
    assert not set(",=") & set("".join(variables.values()))  # AReaL joins them by commas
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert areal._of_environment() == aggregation


def test_a_worker_without_the_aggregation_is_an_error(monkeypatch):
    for name in areal._variables(Aggregation("token_mean")):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ContractError, match="got no LOSS_AGGREGATION"):
        areal._of_environment()


class OtherTrainer:
    """A trainer of another engine than Megatron's."""

    def __init__(self, config):
        self.config = config

    def _create_actor(self, config):
        return OtherTrainer(config)


def test_a_mode_with_prompts_is_refused_as_the_trainer_of_sft_starts():
    class SFTTrainer:
        def __init__(self, config):
            self.config = config
            self.actor = self._create_actor(config.actor)

    made = areal.aggregated(SFTTrainer, Aggregation("prompt_mean"))
    with pytest.raises(AggregationError, match=r"got prompt_mean.* with SFTTrainer, expected"):
        made(config_of(ppo_n_minibatches=1))


def test_another_engine_is_refused_and_areals_own_are_back_afterwards(monkeypatch):
    engines = {name: type(name, (), {}) for name, _ in areal._ENGINES.values()}
    for name in ("areal", "areal.engine", "areal.engine.megatron_engine"):
        module = ModuleType(name)
        vars(module).update(engines)
        monkeypatch.setitem(sys.modules, name, module)
    for name in areal._variables(Aggregation("token_mean")):
        monkeypatch.setenv(name, "")
    areal._engine.cache_clear()
    config = config_of()
    trainer = areal.aggregated(OtherTrainer, Aggregation("sample_mean"))(config)
    with pytest.raises(ContractError, match=r"got the engine .*OtherTrainer"):
        trainer._create_actor(config.actor)
    areal._engine.cache_clear()
    assert {name: getattr(sys.modules["areal.engine"], name) for name in engines} == engines
    (spec,) = config.actor.scheduling_spec
    assert spec.env_vars["LOSS_AGGREGATION"] == "sample_mean" == os.environ["LOSS_AGGREGATION"]


@pytest.fixture
def errors_of(launches, tmp_path):
    """Return a function that trains cases on AReaL's engine, computing in float64."""

    def run(cases, *, cp=1, tp=1, pp=1, processes=4):
        checkout = copy_of("AReaL", "areal", tmp_path)
        in_float64(checkout / "areal" / file for file in (*IN_FLOAT64, STATISTICS))
        tracker = checkout / "areal" / STATISTICS
        text = tracker.read_text()
        changed = text.replace("dtype != torch.float:", "dtype not in (torch.float, torch.double):")
        assert changed != text
        tracker.write_text(changed)
        arguments = (checkout, reference("float64", pp), cp, tp, pp, 1e-12, *cases)
        out = launched("frameworks/areal/areal_worker.py", *arguments, processes=processes)
        lines = dict(re.findall(r"^([a-z_ ]+/\w+/\w+/\w+): (\S+)$", out, re.M))
        assert list(lines) == list(cases), out
        weighed = [one for one in cases if re.search("/pg/.*/(ours|areal|per_token)$", one)]
        assert re.findall(r"^(\S.*): weighed$", out, re.M) == weighed
        return [float(error) for error in lines.values()]

    return run


@needs("AReaL", installed=True)
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_areals_engine_trains_the_policy_loss_and_sft_by_the_mode(errors_of, sizes):
    cases = [f"{mode}/pg/3/ours" for mode in (*MODES, *MODES_WITHOUT_EMPTY)]
    cases += [f"{mode}/pg/tokens/ours" for mode in ("prompt_mean", "sample_mean")]
    cases += [f"{mode}/nll/3/ours" for mode in (*MODES, *MODES_WITHOUT_EMPTY) if "pr" not in mode]
    assert max(errors_of(cases, **sizes)) < 1e-12


@needs("AReaL", installed=True)
def test_each_of_several_optimizer_steps_is_counted_by_itself(errors_of):
    assert max(errors_of(["sample_mean/pg/1/steps", "constant/pg/3/steps"], processes=2)) < 1e-12


@needs("AReaL", installed=True)
def test_a_wrong_factor_and_areals_own_loss_are_far_from_the_mode(errors_of):
    cases = ["sample_mean/pg/3/local", "sample_mean/pg/3/areal", "sample_mean/nll/3/areal"]
    assert min(errors_of(cases, processes=2)) > 0.1


@needs("AReaL", installed=True)
def test_what_the_page_says_of_areal_without_this_package(errors_of):
    cases = ["token_mean/pg/3/areal", "token_mean/nll/3/areal", "token_mean/pg/3/per_token"]
    own, sft, per_token, first, m2po = errors_of(
        [*cases, "token_mean/pg/1/m2po", "token_mean/pg/3/m2po"], cp=2
    )
    assert own < 1e-12  # a token mean on any parallelism
    assert 1e-7 < sft < 1e-5  # it adds 1e-5 to the tokens
    assert per_token < 1e-12  # DP CP times too large
    assert first == 0
    assert m2po > 0.05  # depends on the microbatches


@pytest.mark.launches
@needs("AReaL", installed=True)
def test_areals_trainers_make_our_engines_and_its_losses_are_proportional_to_advantages(
    tmp_path,
):
    checkout = copy_of("AReaL", "areal", tmp_path)
    done = subprocess.run(
        [sys.executable, str(TESTS / "frameworks" / "areal" / "areal_trainers.py"), str(checkout)],
        env={**ENVIRONMENT, "PYTHONPATH": worker_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "losses and trainers: as expected" in done.stdout, done.stdout + done.stderr


@pytest.mark.launches
@needs("AReaL", installed=True)
@pytest.mark.parametrize("weighed", [False, True])
def test_areals_trainer_tells_the_actors_workers_our_engine_and_the_mode(tmp_path, weighed):
    found, done = areal_page.start(tmp_path, weighed=weighed)
    engine = "WeighedActor" if weighed else "LossAggregationActor"
    wanted = {"engine": f"megatron_lossagg.integrations.areal.{engine}", "role": "actor"}
    mode = {"aggregation": None} if weighed else {"aggregation": "sample_mean: w_s = 1/(B n_b)"}
    assert found == {**wanted, **mode, "weighs": weighed}, done.stderr
