"""``lossagg weigh --framework roll`` on a checkout, and on a wrong one.

``FRAMEWORKS_DIR=... pytest tests/frameworks/roll``, after ``make test-frameworks``.
"""

import pytest
from frameworks import checkout_of, copy_of, needs
from weighed import PER_TOKEN, assert_the_page_says, right, weighed

pytestmark = [pytest.mark.launches, needs("ROLL", installed=True)]
MODE, PACKED = "loss_agg_mode: ", ", use_sequence_packing"


@pytest.mark.parametrize("cp", [1, 2])
def test_rolls_modes_are_what_they_say_but_for_the_norm_and_its_trainer_is_one_cpth(tmp_path, cp):
    steps, _ = weighed("roll", tmp_path, checkout_of("ROLL"), cp=cp)
    for mode in ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum"):
        assert right(steps[MODE + mode])
    assert right(steps["the SFT pipeline"])
    norm = MODE + "seq-mean-token-sum-norm"
    for name, term in steps[norm].items():
        if term["coefficient"] is not None:  # of 12 sequences
            assert term["relative"] == pytest.approx([12, 12]), name
            packed = steps[norm + PACKED][name]
            # 23 tokens but the first, or 15 and 31 of a sequence padded to 16 or to 32.
            assert packed["relative"] == pytest.approx([12 * 23 / 31, 12 * 23 / 15])
    factor = 1 / cp
    trainer = steps["mcore_adapter's trainer"]["loss"]["weighed"]
    assert trainer["nearest"] == "microbatch_token_mean"
    assert trainer["factor"] == pytest.approx(factor)
    per_token = steps["mcore_adapter's trainer" + PER_TOKEN]["loss"]
    assert per_token["relative"] == pytest.approx([factor, factor])
    assert_the_page_says("ROLL", "**12 times constant**", "**8.9 to 18.4 times its weights**")
    assert_the_page_says("ROLL", "**0.5 times token_mean**")


def test_a_roll_that_scales_by_microbatches_only_trains_a_half(tmp_path):
    copy = copy_of("ROLL", "roll", tmp_path)
    (copy / "mcore_adapter").symlink_to(checkout_of("ROLL/mcore_adapter"))
    strategy = copy / "roll" / "distributed" / "strategy" / "megatron_strategy.py"
    text, right_scale = (
        strategy.read_text(),
        "num_microbatches * mpu.get_data_parallel_world_size()",
    )
    assert right_scale in text
    strategy.write_text(text.replace(right_scale, "num_microbatches"))
    steps, printed = weighed("roll", tmp_path, copy, more=["--setting", MODE + "token-mean"])
    (terms,) = steps.values()
    assert terms["weighted_pg_loss"]["relative"] == pytest.approx([0.5, 0.5])
    assert "verdict: trains 0.5 times token_mean" in printed


def test_a_mode_of_ours_is_trained_by_its_own_loop(tmp_path):
    more = ["--loss-aggregation", "sample_mean", "--edges"]
    steps, _ = weighed("roll", tmp_path, checkout_of("ROLL"), cp=2, more=more)
    assert right(steps["sample_mean"])
