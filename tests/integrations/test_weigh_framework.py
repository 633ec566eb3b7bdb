"""``lossagg weigh --framework`` on checkouts of systems, and on wrong ones.

``FRAMEWORKS_DIR=... pytest tests/integrations/test_weigh_framework.py``, after ``make
test-frameworks``. What a term trains is compared with loops over tokens in float64.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import TESTS
from frameworks import INSTALLED, checkout_of, copy_of, lacks, needs

from megatron_lossagg.verify.drivers.driver import draw
from megatron_lossagg.verify.drivers.hooked import cut

pytestmark = pytest.mark.launches
PAGE = TESTS.parent / "docs" / "reference" / "what-frameworks-train.md"
NO_PRIMUS = lacks("Megatron-LM") or lacks("Primus", installed=True)
NEEDED = {
    "megatron-lm": needs("Megatron-LM", installed=True),
    "roll": needs("ROLL", installed=True),
    "primus": pytest.mark.skipif(bool(NO_PRIMUS), reason=NO_PRIMUS),
    "open-instruct": needs("open-instruct", installed=True),
}
MEGATRON_LM = [checkout_of("Megatron-LM")]
PER_TOKEN = ", calculate_per_token_loss"
MODE, PACKED = "loss_agg_mode: ", ", use_sequence_packing"


def weighed(name, folder, *paths, cp=1, more=("--setting", "all")):
    """Run the command in an empty folder; return its steps by setting, and what it printed."""
    report = folder / "report.json"
    size = ["--dp", "2", "--cp", str(cp), "--json", str(report)]
    status, printed = ended(name, folder, *paths, more=[*size, *more])
    assert status == 0, printed
    steps = json.loads(report.read_text())["steps"]
    return {step["trained"]: step["terms"] for step in steps}, printed


def ended(name, folder, *paths, more):
    """Run the command in an empty folder; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_lossagg", "weigh", "--framework", name, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, INSTALLED]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


def verdicts(steps):
    """Return of each setting and term what is trained, next to its coefficient."""
    return {
        setting: {
            name: (
                term["weighed"]["nearest"],
                round((term["weighed"]["factor"] or 0) / term["coefficient"], 6),
            )
            for name, term in terms.items()
            if term["coefficient"] is not None
        }
        for setting, terms in steps.items()
    }


def assert_the_page_says(name, *texts):
    section = PAGE.read_text().partition(f"\n## {name} ")[2].partition("\n## ")[0]
    for text in texts:
        assert text in section


def right(terms):
    """Whether every term that the driver knows has the weights that the setting's name promises."""
    return all(one["error"] < 1e-5 for one in terms.values() if one["coefficient"] is not None)


@NEEDED["megatron-lm"]
@pytest.mark.parametrize(
    ("changed", "into", "said"),
    [
        ("losses * loss_mask)", "losses / 0 * loss_mask)", "got exit code 16 from train_step"),
        ("'lm loss'", "'its loss'", "got ['its loss'] in the log of train_step"),
    ],
)
def test_a_megatron_lm_that_logs_no_loss_is_told_why(tmp_path, changed, into, said):
    text = (MEGATRON_LM[0] / "pretrain_gpt.py").read_text()
    assert changed in text
    (tmp_path / "pretrain_gpt.py").write_text(text.replace(changed, into))
    more = ["--setting", "all"]
    status, printed = ended("megatron-lm", tmp_path, tmp_path, *MEGATRON_LM, more=more)
    assert status == 1
    assert printed.rstrip().splitlines()[-1].partition("FrameworkError: ")[2].startswith(said)


@NEEDED["roll"]
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


@NEEDED["roll"]
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


@NEEDED["primus"]
@pytest.mark.parametrize("cp", [1, 2])
def test_primus_trains_as_megatron_lm_does_and_its_sft_takes_every_token_cp_times(tmp_path, cp):
    steps, _ = weighed("primus", tmp_path, checkout_of("Primus"), *MEGATRON_LM, cp=cp)
    assert right(steps["pretraining" + PER_TOKEN])
    sft = steps["SFT"]["loss"]["weighed"]
    assert sft["trains"] == "microbatch_token_mean"
    assert steps["SFT" + PER_TOKEN]["loss"]["weighed"]["trains"] == "token_mean"
    assert sft["tokens"] == 84 * cp  # which are 84
    stock = steps["pretraining"]["loss"]["weighed"]
    assert stock["trains"] == ("microbatch_token_mean" if cp == 1 else None)
    low, high = means_of_ranks(cp)
    found = stock["modes"]["microbatch_token_mean"]
    assert (found["min"], found["max"]) == pytest.approx((low, high), rel=1e-5)
    if cp == 2:
        assert any("context-parallel rank" in cause for cause in stock["causes"])
        trained = f"**none**: {low:.3g} to {high:.3g} times microbatch_token_mean"
        assert_the_page_says("Primus", f"| microbatch_token_mean | {trained} |")
        assert_the_page_says(
            "Primus", "microbatch_token_mean of 168 tokens", "each rank trains all 84"
        )


def means_of_ranks(cp, width=24):
    """Return what a mean over each context-parallel rank's tokens is to one over a microbatch's.

    The smallest and the largest: n_b / (CP n_br), for the zigzag chunks of padded sequences.
    """
    drawn, chunk, ratios = draw(edges=False), width // (2 * cp), []
    for dp_rank in range(2):
        for part in cut(drawn[dp_rank::2]):
            targets = [
                len(one.tokens) - len(one.mask) + i - 1
                for one in part
                for i, is_active in enumerate(one.mask)
                if is_active
            ]
            ranks = [min(t // chunk, 2 * cp - 1 - t // chunk) for t in targets]
            ratios += [len(ranks) / (cp * ranks.count(rank)) for rank in {*ranks}]
    return min(ratios), max(ratios)


@NEEDED["primus"]
def test_a_primus_whose_sft_counts_no_tokens_is_told(tmp_path):
    copy = copy_of("Primus", "primus", tmp_path)
    step = copy / "primus" / "backends" / "megatron" / "sft" / "forward_step.py"
    text, counted = step.read_text(), "num_tokens = loss_mask.sum()"
    assert counted in text
    step.write_text(text.replace(counted, "num_tokens = torch.ones_like(loss_mask).sum()"))
    more = ["--setting", "SFT" + PER_TOKEN]
    steps, printed = weighed("primus", tmp_path, copy, *MEGATRON_LM, more=more)
    (terms,) = steps.values()
    padded = 12 * 24
    assert terms["loss"]["relative"] == pytest.approx([84 / padded] * 2)
    assert "sample_mean of padded lengths" in printed  # all are 24: the mean over all tokens


@NEEDED["open-instruct"]
def test_open_instructs_grpo_is_its_denominators_and_its_sft_averages_microbatches(tmp_path):
    steps, _ = weighed("open-instruct", tmp_path, checkout_of("open-instruct"))
    assert right(steps["grpo_fast.py --loss_denominator token"])
    assert right(steps["grpo_fast.py --loss_denominator 40"])
    assert verdicts(steps)["finetune.py"] == {"loss": ("microbatch_token_mean", 1)}
    assert_the_page_says("open-instruct", "**microbatch_token_mean**")


@NEEDED["open-instruct"]
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


@NEEDED["open-instruct"]
def test_open_instruct_has_no_context_parallelism_here(tmp_path):
    found = ended("open-instruct", tmp_path, checkout_of("open-instruct"), more=["--cp", "2"])
    assert found[0] == 2
    assert "got --cp 2 with open-instruct, expected --cp 1" in found[1]


@pytest.mark.parametrize(
    ("name", "checkouts"),
    [
        pytest.param("roll", ["ROLL"], marks=NEEDED["roll"]),
        pytest.param("primus", ["Primus", "Megatron-LM"], marks=NEEDED["primus"]),
    ],
)
def test_a_mode_of_ours_is_trained_by_their_own_loops(tmp_path, name, checkouts):
    paths = [checkout_of(one) for one in checkouts]
    more = ["--loss-aggregation", "sample_mean", "--edges"]
    steps, _ = weighed(name, tmp_path, *paths, cp=2, more=more)
    assert right(steps["sample_mean"])
