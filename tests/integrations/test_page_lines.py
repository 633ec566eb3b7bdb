"""The lines of the pages of frameworks that lie in checkouts, started as a user types them.

Released ones: ``page_checks.py``. Megatron-LM's block for a laptop: ``test_megatron_lm.py``.
"""

from argparse import ArgumentParser

import page_lines
import pytest
from frameworks import checkout_of, needs

from megatron_lossagg import add_loss_aggregation_args
from megatron_lossagg.loop.flags import aggregation_from_args

pytestmark = pytest.mark.launches


def test_an_aliass_line_is_the_mode_that_its_system_names():
    parser = add_loss_aggregation_args(ArgumentParser())
    args = parser.parse_args(page_lines.words(page_lines.blocks("aliases", "sh")[0]))
    assert str(aggregation_from_args(args)) == "constant: w_s = 1/(B 4096)"


@needs("SkyRL", installed=True)
def test_skyrl_starts_by_the_pages_line_and_its_trainer_in_ray_trains_the_mode(tmp_path):
    page_lines.check_skyrl(tmp_path, checkout_of("SkyRL"))


@needs("SkyRL", installed=True)
def test_skyrl_weighs_its_own_token_mean_by_the_page_of_weighing(tmp_path):
    found, done = page_lines.skyrl(tmp_path, checkout_of("SkyRL"), weighed=True)
    assert found is not None, done.stderr[-4000:]
    assert found["policy"] == "WeighedPolicyWorker"
    (weight,) = set(found["weights"])
    assert weight == pytest.approx(1 / sum(n for _, n in found["sequences"]))


@needs("Megatron-LM", installed=True)
@pytest.mark.parametrize(
    "framework", [pytest.param(one, marks=needs(one)) for one in ("slime", "miles")]
)
def test_slime_and_miles_read_the_pages_file_and_say_what_they_are_to_train(tmp_path, framework):
    mode = {"slime": "token_mean: w_s = 1/N", "miles": "prompt_mean: w_s = 1/(P n_p)"}[framework]
    found, done = page_lines.rollouts(tmp_path, framework)
    assert found == {"aggregation": mode, "carries": "carry_weights"}, done.stderr
    assert f"megatron_lossagg: {framework} is to train {mode}" in done.stdout + done.stderr


@needs("Megatron-LM", installed=True)
@pytest.mark.parametrize(
    "framework", [pytest.param(one, marks=needs(one)) for one in ("slime", "miles")]
)
def test_slime_and_miles_weigh_by_the_line_of_the_page_of_weighing(tmp_path, framework):
    found, done = page_lines.rollouts(tmp_path, framework, weighed=True)
    assert found == {"weighs": True}, done.stderr


@needs("ms-swift", installed=True)
@pytest.mark.parametrize("trained", ["sft", "grpo"])
def test_an_ms_swift_before_4_6_0_is_refused_by_the_plugin(tmp_path, trained):
    found, done = page_lines.ms_swift(tmp_path, trained, paths=[checkout_of("ms-swift")])
    assert found is None
    assert "got an ms-swift whose MegatronTrainer has no _log_callback" in done.stderr


MODE = {"aggregation": "sample_mean: w_s = 1/(B n_b)"}


@needs("Megatron-Bridge/3rdparty/Megatron-LM/megatron", installed=True)
def test_bridges_finetune_has_the_mode_by_the_pages_call(tmp_path):
    found, done = page_lines.bridge(tmp_path)
    assert found == MODE, done.stderr


@needs("LLaMA-Factory/src", installed=True)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("bridge", marks=needs("Megatron-Bridge/3rdparty/Megatron-LM/megatron")),
        pytest.param("mcore_adapter", marks=needs("ROLL/mcore_adapter/src")),
    ],
)
def test_llama_factory_reads_its_file_and_its_backend_has_the_mode(tmp_path, backend):
    found, done = page_lines.llama_factory(tmp_path, backend)
    assert found == MODE, done.stderr


@needs("Primus", installed=True)
@needs("Megatron-LM")
def test_primus_trainer_reaches_megatron_lm_with_the_mode(tmp_path):
    found, done = page_lines.primus(tmp_path)
    assert found == MODE, done.stdout


@needs("AReaL", installed=True)
@pytest.mark.parametrize("weighed", [False, True])
def test_areals_trainer_tells_the_actors_workers_our_engine_and_the_mode(tmp_path, weighed):
    found, done = page_lines.areal(tmp_path, weighed=weighed)
    engine = "WeighedActor" if weighed else "LossAggregationActor"
    wanted = {"engine": f"megatron_lossagg.integrations.areal.{engine}", "role": "actor"}
    mode = {"aggregation": None} if weighed else MODE
    assert found == {**wanted, **mode, "weighs": weighed}, done.stderr


@needs("NeMo-RL", installed=True)
@pytest.mark.parametrize("weighed", [False, True])
def test_nemo_rls_script_gives_its_trainer_the_wrapped_loss_function(tmp_path, weighed):
    found, done = page_lines.nemo_rl(tmp_path, weighed=weighed)
    mode = None if weighed else "constant: w_s = 1/(B 40960)"
    assert found == {"aggregation": mode, "of": "ClippedPGLossFn", "weighs": weighed}, done.stderr
