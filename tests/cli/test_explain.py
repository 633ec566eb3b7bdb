"""``lossagg explain``: its numbers are the oracle's, and its factors cancel Megatron's."""

import json
import signal
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from megatron_lossagg.aggregation import ALIASES, MODES
from megatron_lossagg.cli.explanation import DEFAULT_LENGTHS, Split, explain, read_lengths
from megatron_lossagg.cli.main import main
from megatron_lossagg.verify import reference_loss

NAMES = [name for name in MODES if name != "custom"]
DIVISOR = 40.0


def explained(mode, lengths=DEFAULT_LENGTHS, *, divisor=DIVISOR, **options):
    count_empty = options.pop("count_empty", None)
    return explain(
        mode,
        prompts=read_lengths(lengths),
        split=Split(**options),
        divisor=divisor,
        count_empty=count_empty,
    )


def oracle_loss(mode, prompts, split, value, *, count_empty=True):
    """Run the oracle on rows whose token t has the loss value(t), assigned in turn."""
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
    loss = reference_loss.step_loss(
        mode, rows, divisor=divisor, count_empty=count_empty, microbatches=ms
    )
    return float(loss)


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("mode", NAMES)
def test_the_compared_losses_are_the_oracles(mode, count_empty):
    explanation = explained(mode, dp=3, microbatches=2, count_empty=count_empty)
    prompts = read_lengths(DEFAULT_LENGTHS)
    longest = max(n for prompt in prompts for n in prompt)
    by_mode = {c.mode: c for c in explanation.comparisons}
    assert list(by_mode) == NAMES
    explained_mode = by_mode[mode]
    for name, c in by_mode.items():
        options = {"count_empty": count_empty}
        ones = oracle_loss(name, prompts, explanation.split, lambda t: 1.0, **options)
        rising = oracle_loss(name, prompts, explanation.split, lambda t: t / longest, **options)
        assert c.ones == pytest.approx(ones, rel=1e-12)
        assert c.rising == pytest.approx(rising, rel=1e-12)
        assert c.ones_ratio == pytest.approx(ones / explained_mode.ones, rel=1e-12)
        assert c.rising_ratio == pytest.approx(rising / explained_mode.rising, rel=1e-12)


@pytest.mark.parametrize("mode", NAMES)
def test_the_weights_times_tokens_add_up_to_the_loss_of_ones(mode):
    explanation = explained(mode)
    total = sum(row.w_s * row.n_s for row in explanation.rows)
    assert total == pytest.approx(explanation.total_weight, rel=1e-12)
    assert sum(row.part for row in explanation.rows) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(("microbatches", "dp", "cp"), [(4, 8, 2), (1, 1, 1), (3, 5, 7)])
@pytest.mark.parametrize("mode", NAMES)
def test_the_average_loss_scaling_turns_shares_times_k_into_their_sum(mode, microbatches, dp, cp):
    """Megatron's arithmetic written out: the schedule's mean, then DDP's."""
    explanation = explained(mode, microbatches=microbatches, dp=dp, cp=cp)
    assert explanation.num_tokens == (1,) * len(explanation.num_tokens)
    shares = [[Fraction(7 * r + m, 3) for m in range(microbatches)] for r in range(dp * cp)]
    returned = [[share * explanation.factor for share in of_rank] for of_rank in shares]
    after_schedule = [sum(loss / 1 / microbatches for loss in of_rank) for of_rank in returned]
    after_ddp = sum(gradient / len(shares) for gradient in after_schedule)
    assert after_ddp == sum(map(sum, shares))


@pytest.mark.parametrize(("microbatches", "dp", "cp"), [(4, 8, 2), (1, 1, 1), (3, 5, 7)])
@pytest.mark.parametrize("mode", NAMES)
def test_the_per_token_loss_scaling_turns_shares_times_k_into_their_sum(mode, microbatches, dp, cp):
    """Megatron's arithmetic written out: DDP's sum, then / the sum of all num_tokens."""
    explanation = explained(mode, loss_scaling="per_token", microbatches=microbatches, dp=dp, cp=cp)
    shares = [[Fraction(7 * r + m, 3) for m in range(microbatches)] for r in range(dp * cp)]
    after_ddp = sum(share * explanation.factor for of_rank in shares for share in of_rank)
    after_finalize = after_ddp / sum(explanation.num_tokens)
    assert after_finalize == sum(map(sum, shares))


@pytest.mark.parametrize("loss_scaling", ["average", "per_token"])
def test_every_product_of_the_chain_is_that_of_the_factors_up_to_it(loss_scaling):
    explanation = explained("token_mean", loss_scaling=loss_scaling, microbatches=4, dp=8, cp=2)
    product = Fraction(1)
    for link in explanation.chain:
        product *= link.factor
        assert link.so_far == product
    assert product == 1
    assert explanation.chain[0].factor == explanation.factor
    assert [link.where for link in explanation.chain] == [
        "loss_func", "schedule", "DDP", "finalize_model_grads",
    ]  # fmt: skip


def test_num_tokens_add_up_to_n_in_the_per_token_loss_scaling():
    explanation = explained("prompt_mean", loss_scaling="per_token")
    # 12,3,40/5,0,20 assigned in turn to 2 ranks x 2 microbatches: 12+0, 3+20, 40, 5
    assert explanation.num_tokens == (12, 23, 40, 5)
    assert sum(explanation.num_tokens) == explanation.totals.active_tokens == 80


def test_weights_by_hand(capsys):
    """Prompts (3, 5) and (9, 0): N 17, B 4, V 3, P 2."""
    assert main(["explain", "sample_mean", "--lengths", "3,5/9,0"]) == 0
    out = capsys.readouterr().out
    assert "N = 17 active tokens, B = 4 samples (V = 3 with an active token), P = 2" in out
    explanation = explained("sample_mean", "3,5/9,0")
    assert [row.w_s for row in explanation.rows] == [1 / 12, 1 / 20, 1 / 36, 0.0]
    assert [row.n_p for row in explanation.rows] == [8, 8, 9, 9]


def test_an_alias_is_explained_as_the_mode_that_it_stands_for(capsys):
    name = "openrlhf:token_level_loss=False"
    assert main(["explain", name, "--lengths", "3,5/9,0"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("sample_mean: w_s = 1/(V n_b)")
    assert f"{name} is another system's name for it: a fully masked sample does not" in out


def test_a_mode_that_lacks_its_divisor_has_no_numbers(capsys):
    assert main(["explain", "token_mean"]) == 0
    out = capsys.readouterr().out
    (line,) = [x for x in out.splitlines() if x.lstrip().startswith("constant")]
    assert line.split()[-2:] == ["no", "divisor"]
    assert not any(cell[0].isdigit() for cell in line.replace("1/(B L)", "").split())
    assert "To compare with constant, give --divisor." in out


def test_the_factor_left_by_a_bare_share_is_printed(capsys):
    arguments = ["--dp", "8", "--cp", "2", "--microbatches", "4"]
    assert main(["explain", "token_mean", *arguments]) == 0
    assert "trains 1/(M DP CP) = 1/64 of this loss" in " ".join(capsys.readouterr().out.split())


def test_where_k_is_1_a_bare_share_is_right(capsys):
    arguments = ["--dp", "1", "--cp", "1", "--microbatches", "1"]
    assert main(["explain", "token_mean", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "bare share is right too" in out
    assert "of this loss, without" not in out
    assert "M = 1 microbatch per rank" in out
    assert "1 rank x 1 microbatch;" in out


def test_the_printed_flags_have_the_exact_divisor(capsys):
    assert main(["explain", "constant", "--divisor", "1234567"]) == 0
    assert "--loss-aggregation-divisor 1234567\n" in capsys.readouterr().out


def test_json_has_what_is_printed(tmp_path, capsys):
    path = tmp_path / "explained.json"
    assert main(["explain", "constant", "--divisor", "40", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    out = capsys.readouterr().out
    assert written["formula"] == "1/(B 40)"
    assert written["formula"] in out
    assert len(written["rows"]) == 6
    assert written["chain"][-1]["so_far"] == "1"


@pytest.mark.parametrize(
    ("terminal", "widest"), [("40", 72), ("72", 72), ("80", 80), ("100", 100), ("200", 100)]
)
@pytest.mark.parametrize("loss_scaling", ["average", "per_token"])
@pytest.mark.parametrize("mode", NAMES)
def test_text_and_tables_fit_the_terminal(
    monkeypatch, capsys, mode, loss_scaling, terminal, widest
):
    monkeypatch.setenv("COLUMNS", terminal)
    assert main(["explain", mode, "--divisor", "4096", "--loss-scaling", loss_scaling]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if "Train it with" not in line]  # flags are not truncated
    assert max(map(len, lines)) <= widest
    assert max(map(len, lines)) > widest - 12  # and the width is used


def test_a_wide_terminal_shows_the_formulas_beside_the_losses(monkeypatch, capsys):
    rows = {}
    for columns in ("72", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["explain", "constant", "--divisor", "4096"]) == 0
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if line.split()[:1] == ["sample_mean"]]
        rows[columns] = line.split()
    assert [cell for cell in rows["100"] if cell not in ("1/(B", "n_b)")] == rows["72"]


@pytest.mark.parametrize("columns", [72, 80, 100])
def test_list_prints_every_mode_and_every_other_systems_name(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--list"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert names == [*MODES, *ALIASES]
    for mode in MODES.values():
        assert " ".join(mode.meaning.split()) in " ".join(out.split())


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_the_description_of_a_command_fits_80_columns(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    description = text[text.index("\n\n") : text.index("options:")]
    assert max(map(len, description.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["constant"], "--loss-aggregation-divisor"),
        (["prompt_meen"], "did you mean 'prompt_mean' or"),
        (["custom"], "custom has no formula to explain"),
        (["token_mean", "--lengths", "3,-1"], "got '-1', expected a sample's active tokens"),
        (["token_mean", "--lengths", "3,,4"], "got '', expected a sample's active tokens"),
        (["token_mean", "--lengths", "0,0/0"], "got 3 fully masked samples and no active token"),
        (["token_mean", "--dp", "0"], "--dp: got 0, expected an integer from 1"),
        (["token_mean", "--microbatches", "0"], "--microbatches: got 0, expected an integer"),
        (["token_mean", "--dp", "9" * 30], "expected an integer from 1 to 2147483647"),
        (["token_mean", "--cp", str(2**31)], "--cp: got 2147483648, expected an integer"),
        (["token_mean", "--json", "/nowhere/at/all.json"], "cannot be written"),
        (["token_mean", "--lengths", "2147483648", "--loss-scaling", "per_token"], "int32"),
        (["token_mean", "--characters"], "got --characters without --lengths-file"),
        (["token_mean", "--tokenizer", "t.json"], "got --tokenizer without --lengths-file"),
        (["token_mean", "--trust-pickle"], "got --trust-pickle without --lengths-file"),
        (["token_mean", "--buckets", ""], "got --buckets without --lengths-file"),
        (["token_mean", "--characters", "--buckets", "5"], "--characters and --buckets without"),
    ],
)  # fmt: skip
def test_wrong_usage_ends_with_status_2_and_what_to_change(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out


def test_a_reader_that_ends_early_ends_the_command_without_an_error():
    # What is printed while the arguments are still read.
    program = [sys.executable, "-m", "megatron_lossagg", "explain", "--list"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE
