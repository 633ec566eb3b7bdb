"""``lossagg weigh --framework primus`` on a checkout, and on a wrong one.

``FRAMEWORKS_DIR=... pytest tests/frameworks/primus``, after ``make test-frameworks``.
"""

import pytest
from frameworks import checkout_of, copy_of, needs
from weighed import PER_TOKEN, assert_the_page_says, right, weighed

from megatron_lossagg.verify.drivers.driver import cut, draw

pytestmark = [pytest.mark.launches, needs("Primus", installed=True), needs("Megatron-LM")]
CHECKOUTS = [checkout_of("Primus"), checkout_of("Megatron-LM")]


@pytest.mark.parametrize("cp", [1, 2])
def test_primus_trains_as_megatron_lm_does_and_its_sft_takes_every_token_cp_times(tmp_path, cp):
    steps, _ = weighed("primus", tmp_path, *CHECKOUTS, cp=cp)
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


def test_a_primus_whose_sft_counts_no_tokens_is_told(tmp_path):
    copy = copy_of("Primus", "primus", tmp_path)
    step = copy / "primus" / "backends" / "megatron" / "sft" / "forward_step.py"
    text, counted = step.read_text(), "num_tokens = loss_mask.sum()"
    assert counted in text
    step.write_text(text.replace(counted, "num_tokens = torch.ones_like(loss_mask).sum()"))
    more = ["--setting", "SFT" + PER_TOKEN]
    steps, printed = weighed("primus", tmp_path, copy, CHECKOUTS[1], more=more)
    (terms,) = steps.values()
    padded = 12 * 24
    assert terms["loss"]["relative"] == pytest.approx([84 / padded] * 2)
    assert "sample_mean of padded lengths" in printed  # all are 24: the mean over all tokens


def test_a_mode_of_ours_is_trained_by_its_own_loop(tmp_path):
    more = ["--loss-aggregation", "sample_mean", "--edges"]
    steps, _ = weighed("primus", tmp_path, *CHECKOUTS, cp=2, more=more)
    assert right(steps["sample_mean"])
