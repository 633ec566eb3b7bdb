"""``lossagg weigh --framework open-instruct`` on a checkout, and on a wrong one.

``FRAMEWORKS_DIR=... pytest tests/frameworks/open_instruct``, after ``make test-frameworks``.
"""

import pytest
from frameworks import checkout_of, copy_of, needs
from weighed import assert_the_page_says, ended, right, verdicts, weighed

pytestmark = [pytest.mark.launches, needs("open-instruct", installed=True)]


def test_open_instructs_grpo_is_its_denominators_and_its_sft_averages_microbatches(tmp_path):
    steps, _ = weighed("open-instruct", tmp_path, checkout_of("open-instruct"))
    assert right(steps["grpo_fast.py --loss_denominator token"])
    assert right(steps["grpo_fast.py --loss_denominator 40"])
    assert verdicts(steps)["finetune.py"] == {"loss": ("microbatch_token_mean", 1)}
    assert_the_page_says("open-instruct", "**microbatch_token_mean**")


def test_an_open_instruct_that_does_not_multiply_by_its_ranks_trains_a_half(tmp_path):
    copy = copy_of("open-instruct", "open_instruct", tmp_path)
    trainer = copy / "open_instruct" / "grpo_fast.py"
    text = trainer.read_text()
    scaled = "loss *= self.args.world_size // self.args.sequence_parallel_size"
    assert scaled in text
    trainer.write_text(text.replace(scaled, "loss *= 1"))
    steps, printed = weighed("open-instruct", tmp_path, copy, more=[])
    (terms,) = steps.values()
    assert terms["loss"]["relative"] == pytest.approx([0.5, 0.5])
    assert "verdict: trains 0.5 times token_mean" in printed


def test_open_instruct_has_no_context_parallelism_here(tmp_path):
    found = ended("open-instruct", tmp_path, checkout_of("open-instruct"), more=["--cp", "2"])
    assert found[0] == 2
    assert "got --cp 2 with open-instruct, expected --cp 1" in found[1]
