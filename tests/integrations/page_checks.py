"""The lines of the pages of released frameworks, started as a user types them."""

import page_lines
import pytest
from page_lines import INSTALLED

RELEASES = ["", "skyrl-0.4.0"]


@pytest.mark.parametrize("release", RELEASES)
def test_skyrl_starts_by_the_pages_line_and_its_trainer_in_ray_trains_the_mode(tmp_path, release):
    page_lines.check_skyrl(tmp_path, INSTALLED / release)


def test_verl_starts_by_the_pages_line_and_its_task_in_ray_has_our_engine_and_the_mode(tmp_path):
    found = page_lines.verl(tmp_path)
    assert found == {
        "engine": "megatron_lossagg.integrations.verl",
        "aggregation": "constant: w_s = 1/(B 40960)",
    }


@pytest.mark.parametrize(
    ("trained", "trainer"),
    [
        ("sft", "MegatronTrainer"),
        ("grpo", "MegatronGRPOTrainer"),
        ("gkd", "MegatronGKDTrainer"),
    ],
)
def test_ms_swift_starts_by_the_pages_line_and_the_plugin_is_in_its_process(
    tmp_path, trained, trainer
):
    found, done = page_lines.ms_swift(tmp_path, trained)
    assert found == {"trainer": trainer, "aggregation": "sample_mean: w_s = 1/(B n_b)"}, done.stderr
