"""``lossagg explain``: its numbers are the oracle's, and its chain of factors ends at 1."""

import json
from fractions import Fraction

import pytest
import torch

from megatron_lossagg.aggregation import MODES
from megatron_lossagg.cli.explain import EXAMPLE, Split, explain, read_lengths
from megatron_lossagg.cli.main import main
from megatron_lossagg.verify import oracle

NAMES = [name for name in MODES if name != "custom"]
DIVISOR = 40.0


def explained(mode, lengths=EXAMPLE, *, divisor=DIVISOR, **options):
    count_empty = options.pop("count_empty", None)
    return explain(
        mode,
        prompts=read_lengths(lengths),
        split=Split(**options),
        divisor=divisor,
        count_empty=count_empty,
    )


def oracle_loss(mode, prompts, split, value, *, count_empty=True):
    """The oracle on rows whose token t has the loss value(t); rows dealt in turn."""
    slots = [(r, m) for m in range(split.microbatches) for r in range(split.dp)]
    rows = []
    for prompt, lengths in enumerate(prompts):
        for n in lengths:
            length = max(n, 1)  # a fully masked sample has a token that does not count
            mask = [1] * n or [0]
            x = [torch.tensor(value(t + 1), dtype=torch.float64) for t in range(length)]
            rows.append(
                {
                    "x": x,
                    "counted": mask,
                    "trained": mask,
                    "sample": len(rows),
                    "prompt": prompt,
                    "microbatch": slots[len(rows) % len(slots)],
                }
            )
    divisor = DIVISOR if MODES[mode].divisor != "none" else None
    ms = [split.microbatches] * split.dp
    loss = oracle.step_loss(mode, rows, divisor=divisor, count_empty=count_empty, microbatches=ms)
    return float(loss)


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("mode", NAMES)
def test_the_losses_beside_one_another_are_the_oracles(mode, count_empty):
    told = explained(mode, dp=3, microbatches=2, count_empty=count_empty)
    prompts = read_lengths(EXAMPLE)
    longest = max(n for prompt in prompts for n in prompt)
    beside = {b.mode: b for b in told.beside}
    assert list(beside) == NAMES
    mine = beside[mode]
    for name, b in beside.items():
        options = {"count_empty": count_empty}
        ones = oracle_loss(name, prompts, told.split, lambda t: 1.0, **options)
        rising = oracle_loss(name, prompts, told.split, lambda t: t / longest, **options)
        assert b.ones == pytest.approx(ones, rel=1e-12)
        assert b.rising == pytest.approx(rising, rel=1e-12)
        assert b.ones_ratio == pytest.approx(ones / mine.ones, rel=1e-12)
        assert b.rising_ratio == pytest.approx(rising / mine.rising, rel=1e-12)


@pytest.mark.parametrize("mode", NAMES)
def test_the_weights_times_tokens_add_up_to_the_loss_of_ones(mode):
    told = explained(mode)
    total = sum(row.w_s * row.n_s for row in told.rows)
    assert total == pytest.approx(told.total_weight, rel=1e-12)
    assert sum(row.part for row in told.rows) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("mode", NAMES)
@pytest.mark.parametrize(("regime", "k"), [("average", 4 * 8 * 2), ("per-token", 80)])
def test_the_chain_of_factors_ends_at_exactly_1(mode, regime, k):
    told = explained(mode, regime=regime, microbatches=4, dp=8, cp=2)
    assert told.factor == k
    product = Fraction(1)
    for link in told.chain:
        product *= link.factor
        assert link.so_far == product
    assert product == 1
    assert [link.where for link in told.chain] == [
        "loss_func", "schedule", "DDP", "finalize_model_grads",
    ]  # fmt: skip


def test_num_tokens_add_up_to_n_in_the_per_token_regime():
    told = explained("prompt_mean", regime="per-token")
    # 12,3,40/5,0,20 dealt in turn to 2 ranks x 2 microbatches: 12+0, 3+20, 40, 5
    assert told.num_tokens == (12, 23, 40, 5)
    assert sum(told.num_tokens) == told.totals.active_tokens == 80


def test_weights_by_hand(capsys):
    """Prompts (3, 5) and (9, 0): N 17, B 4, V 3, P 2."""
    assert main(["explain", "sample_mean", "--lengths", "3,5/9,0"]) == 0
    out = capsys.readouterr().out
    assert "N = 17 active tokens, B = 4 samples (V = 3 with an active token), P = 2" in out
    told = explained("sample_mean", "3,5/9,0")
    assert [row.w_s for row in told.rows] == [1 / 12, 1 / 20, 1 / 36, 0.0]
    assert [row.n_p for row in told.rows] == [8, 8, 9, 9]


def test_an_alias_says_what_it_stands_for(capsys):
    name = "nemo-rl:token_level_loss=False"
    assert main(["explain", name, "--lengths", "3,5/9,0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sample_mean: w_s = 1/(V n_b)")
    assert f"{name} stands for it: a fully masked sample leaves the count." in out


def test_a_mode_without_its_divisor_is_not_made_up(capsys):
    assert main(["explain", "token_mean"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.lstrip().startswith("constant")]
    assert line.endswith("needs --divisor")


def test_a_regime_that_is_not_undone_says_what_would_be_trained(capsys):
    arguments = ["--dp", "8", "--cp", "2", "--microbatches", "4"]
    assert main(["explain", "token_mean", *arguments]) == 0
    assert "trains 1/(M DP CP) = 1/64 of this loss" in " ".join(capsys.readouterr().out.split())


def test_where_k_is_1_a_bare_share_is_not_called_wrong(capsys):
    arguments = ["--dp", "1", "--cp", "1", "--microbatches", "1"]
    assert main(["explain", "token_mean", *arguments]) == 0
    out = capsys.readouterr().out
    assert "bare share is right too" in out
    assert "of this loss, without" not in " ".join(out.split())


def test_the_flags_that_train_it_have_the_divisor_exactly(capsys):
    assert main(["explain", "constant", "--divisor", "1234567"]) == 0
    assert "--loss-aggregation-divisor 1234567\n" in capsys.readouterr().out


def test_json_has_what_is_printed(tmp_path, capsys):
    path = tmp_path / "explained.json"
    assert main(["explain", "constant", "--divisor", "40", "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    out = capsys.readouterr().out
    assert told["formula"] == "1/(B 40)"
    assert told["formula"] in out
    assert len(told["rows"]) == 6
    assert told["chain"][-1]["so_far"] == "1"


def test_text_is_at_most_100_columns_wide(capsys):
    assert main(["explain", "constant", "--divisor", "40960"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["constant"], "--loss-aggregation-divisor"),
        (["prompt_meen"], "did you mean 'prompt_mean'?"),
        (["custom"], "custom has no formula to explain"),
        (["token_mean", "--lengths", "3,-1"], "has '-1' where a sample's active tokens should be"),
        (["token_mean", "--lengths", "3,,4"], "has '' where a sample's active tokens should be"),
        (["token_mean", "--lengths", "0,0/0"], "3 fully masked samples and no active token"),
        (["token_mean", "--dp", "0"], "--dp is a whole number from 1, got 0"),
        (["token_mean", "--microbatches", "0"], "--microbatches is a whole number from 1, got 0"),
        (["token_mean", "--json", "/nowhere/at/all.json"], "cannot be written"),
        (["token_mean", "--lengths", "2147483648", "--regime", "per-token"], "int32"),
    ],
)  # fmt: skip
def test_wrong_usage_ends_with_status_2_and_says_what_to_change(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
