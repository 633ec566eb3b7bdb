"""The lines of the pages of frameworks that lie in checkouts, started as a user types them.

Released ones: ``page_checks.py``. Megatron-LM's block for a laptop: ``test_megatron_lm.py``.
"""

import page_lines
import pytest
from frameworks import checkout_of, needs

pytestmark = pytest.mark.launches


@needs("SkyRL", installed=True)
def test_skyrl_starts_by_the_pages_line_and_its_trainer_in_ray_trains_the_mode(tmp_path):
    page_lines.check_skyrl(tmp_path, checkout_of("SkyRL"))


@needs("Megatron-LM", installed=True)
@pytest.mark.parametrize(
    "framework", [pytest.param(one, marks=needs(one)) for one in ("slime", "miles")]
)
def test_slime_and_miles_read_the_pages_file_and_say_what_they_are_to_train(tmp_path, framework):
    mode = {"slime": "token_mean: w_s = 1/N", "miles": "prompt_mean: w_s = 1/(P n_p)"}[framework]
    found, done = page_lines.rollouts(tmp_path, framework)
    assert found == {"aggregation": mode, "carries": "carry_weights"}, done.stderr
    assert f"megatron_lossagg: {framework} is to train {mode}" in done.stdout + done.stderr


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
def test_areals_trainer_tells_the_actors_workers_our_engine_and_the_mode(tmp_path):
    found, done = page_lines.areal(tmp_path)
    engine = "megatron_lossagg.integrations.areal.LossAggregationActor"
    assert found == {**MODE, "engine": engine, "role": "actor"}, done.stderr


@needs("NeMo-RL", installed=True)
def test_nemo_rls_script_gives_its_trainer_the_wrapped_loss_function(tmp_path):
    found, done = page_lines.nemo_rl(tmp_path)
    assert found == {"aggregation": "constant: w_s = 1/(B 40960)", "of": "ClippedPGLossFn"}, (
        done.stderr
    )
