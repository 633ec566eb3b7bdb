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
@pytest.mark.parametrize("command", ["sft", "rlhf"])
def test_an_ms_swift_before_4_6_0_is_refused_by_the_plugin(tmp_path, command):
    found, done = page_lines.ms_swift(tmp_path, command, paths=[checkout_of("ms-swift")])
    assert found is None
    assert "got an ms-swift whose MegatronTrainer has no _log_callback" in done.stderr
