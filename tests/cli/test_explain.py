"""``lossagg explain``: its numbers are the reference's, and its factors cancel Megatron's."""

import json
import re
import signal

import forked_command
import pytest
from in_turn import reference_value

from megatron_lossagg.cli.explanation import DEFAULT_LENGTHS, EXPONENT, Split, explain, read_lengths
from megatron_lossagg.cli.main import _COMMANDS, _parser, main
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.modes import ALIASES, MODES

NAMES = [name for name in MODES if name not in ("custom", "own_weights")]
ONLY_ITSELF = ("balanced", "row_mean")
DIVISOR = 40.0
SHORT = "12,3,40/5,0,20"


def explained(
    mode, lengths=DEFAULT_LENGTHS, *, divisor=DIVISOR, count_empty=None, weights=None, **options
):
    return explain(
        mode,
        read_lengths(lengths),
        Split(**options),
        divisor=divisor,
        exponent=EXPONENT,
        count_empty=count_empty,
        weights=weights,
    )


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("mode", NAMES)
def test_the_compared_losses_are_those_of_the_reference(mode, count_empty):
    explanation = explained(mode, SHORT, dp=3, microbatches=2, count_empty=count_empty)
    by_mode = {c.mode: c for c in explanation.comparisons}
    assert list(by_mode) == [name for name in NAMES if name == mode or name not in ONLY_ITSELF]
    tokens, prompt = [12, 3, 40, 5, 0, 20], [0, 0, 0, 1, 1, 1]
    for name, c in by_mode.items():
        loss = reference_value(
            name,
            tokens,
            prompt,
            divisor=DIVISOR,
            microbatches=2,
            dp=3,
            count_empty=count_empty,
        )
        assert c.loss == pytest.approx(loss, rel=1e-12)
        assert c.ratio == pytest.approx(loss / by_mode[mode].loss, rel=1e-12)
        assert (c.gradient == "this mode") == (name == mode)


def test_the_flags_of_a_training_run_are_never_cut_off(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "72")
    arguments = ["--exponent", "0.333333333", "--no-count-empty"]
    assert main(["explain", "length_power", *arguments]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "Train it with" in x]
    assert line.endswith(" 0.333333333 --no-loss-aggregation-count-empty")


def test_a_formula_that_is_too_wide_is_wrapped_and_cuts_nothing(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["explain", "length_power", "--exponent", "0.333333333", "--divisor", "9999"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  microbatch_token_mean  1/\(M DP n_mb\) .* reweighted$", out, re.MULTILINE)


def test_modes_that_weigh_tokens_alike_only_scale_the_gradient():
    kinds = {c.mode: c.gradient for c in explained("constant").comparisons}
    assert kinds == {
        "constant": "this mode", "token_mean": "scaled", "sample_sum": "scaled",
        "token_sum": "scaled", "sample_mean": "reweighted", "prompt_mean": "reweighted",
        "length_power": "reweighted", "microbatch_token_mean": "reweighted",
    }  # fmt: skip


def test_side_losses_weigh_more_by_the_inverse_of_the_sum_of_weights():
    explanation = explained("token_mean", "12,3,40/5,20,0", divisor=40.0)
    side = {c.mode: c.side for c in explanation.comparisons}
    n, (b, v) = 12 + 3 + 40 + 5 + 20, (6, 5)
    assert side["constant"] == pytest.approx(b * 40 / n, rel=1e-12)
    assert side["sample_sum"] == pytest.approx(b / n, rel=1e-12)
    assert side["token_sum"] == pytest.approx(40 / n, rel=1e-12)
    assert side["sample_mean"] == pytest.approx(b / v, rel=1e-12)
    for mode in ("token_mean", "prompt_mean", "length_power"):
        assert side[mode] == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("exponent", "equal"), [(0, "token_mean"), (1, "sample_mean")])
def test_length_power_only_scales_the_mode_at_each_of_its_ends(exponent, equal):
    """Not empty, so that weights of sample_mean sum to 1 too."""
    explanation = explain(
        "length_power", read_lengths("12,3,40/5,20"), Split(), divisor=40.0, exponent=exponent
    )
    by_mode = {c.mode: c for c in explanation.comparisons}
    assert by_mode[equal].gradient == "scaled"
    assert by_mode[equal].ratio == pytest.approx(1, rel=1e-12)
    assert explanation.flags.endswith(f"--loss-aggregation-exponent {exponent}")


def test_length_power_is_compared_at_the_exponent_that_is_given(capsys):
    lengths = ["--lengths", "4,16"]
    assert main(["explain", "token_mean", *lengths]) == 0
    assert "length_power is compared at a = 0.5; --exponent changes it." in capsys.readouterr().out
    assert main(["explain", "token_mean", "--exponent", "2", *lengths]) == 0
    out = capsys.readouterr().out
    assert "1/(n_b^2 Z)" in out
    assert "It takes no exponent: 2 is used for length_power below." in out
    assert main(["explain", "length_power", *lengths]) == 2
    assert "needs an exponent and got none" in capsys.readouterr().err


def test_z_is_printed_for_a_check_by_hand(capsys):
    """Z = 4^0.5 + 16^0.5 = 6: w_s = 1 / (2 * 6) and 1 / (4 * 6)."""
    options = ["--loss-aggregation-exponent", "0.5", "--lengths", "4,16"]
    assert main(["explain", "length_power", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  Z +sum of n_b\^\(1-a\) over samples, a = 0.5: 6$", out, re.MULTILINE)
    assert re.search(r"^ +0 +0 +4 +4 +0.0833333 +0.333333 +33.3%$", out, re.MULTILINE)
    assert re.search(r"^ +1 +0 +16 +16 +0.0416667 +0.666667 +66.7%$", out, re.MULTILINE)


def test_a_number_in_a_formula_is_no_symbol(capsys):
    assert main(["explain", "constant", "--divisor", "1e20"]) == 0
    assert main(["explain", "length_power", "--exponent", "1e-05"]) == 0
    assert "n_b^1e-05" in capsys.readouterr().out


@pytest.mark.parametrize("mode", NAMES)
def test_the_weights_times_tokens_add_up_to_the_loss_of_ones(mode):
    explanation = explained(mode)
    total = sum(s["w_s"] * s["n_s"] for s in explanation.sequences)
    (own,) = [c.loss for c in explanation.comparisons if c.mode == mode]
    assert total == pytest.approx(own, rel=1e-12)
    assert sum(s["share"] for s in explanation.sequences) == pytest.approx(1.0, rel=1e-12)


def test_num_tokens_add_up_to_n_which_is_k_in_the_per_token_loss_scaling():
    explanation = explained("prompt_mean", SHORT, loss_scaling="per_token")
    # 12,3,40/5,0,20 assigned in turn to 2 ranks x 2 microbatches: 12+0, 3+20, 40, 5
    assert explanation.num_tokens == (12, 23, 40, 5)
    assert sum(explanation.num_tokens) == explanation.counts["N"] == 80
    assert explanation.k == explanation.chain[0].factor == 80
    places = [(one["rank"], one["microbatch"]) for one in explanation.sequences]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0)]


def test_weights_by_hand(capsys):
    """Prompts (3, 5) and (9, 0): N 17, B 4, V 3, P 2."""
    assert main(["explain", "sample_mean", "--lengths", "3,5/9,0"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  B +samples of the step: 4$", out, re.MULTILINE)
    assert re.search(r"^ +sum +0\.75 +100\.0%$", out, re.MULTILINE)
    explanation = explained("sample_mean", "3,5/9,0")
    assert [s["w_s"] for s in explanation.sequences] == [1 / 12, 1 / 20, 1 / 36, 0.0]
    assert [s["n_p"] for s in explanation.sequences] == [8, 8, 9, 9]


@pytest.mark.parametrize("count_empty", ["--count-empty", "--no-count-empty"])
@pytest.mark.parametrize("mode", NAMES)
def test_every_symbol_of_a_formula_is_explained(capsys, mode, count_empty):
    numbers = ["--divisor", "16384", "--exponent", "0.5"]
    assert main(["explain", mode, *numbers, count_empty]) == 0
    out = capsys.readouterr().out
    symbols = re.findall(r"\b[A-Za-z]\w*", out.splitlines()[0].partition(":")[2])
    assert symbols[0] == "w_s"
    for symbol in symbols:
        assert re.search(rf"^  {symbol} +[a-z]", out, re.MULTILINE)


def test_a_minus_makes_the_groups_of_balanced():
    """Of prompt 0 the groups (4, 2) and (8), of prompt 1 (5) and (0, 1): B 6."""
    explanation = explained("balanced", "4,8-,2/5-,0,1")
    assert [s["w_s"] for s in explanation.sequences] == pytest.approx(
        [2 / 36, 1 / 48, 2 / 36, 1 / 30, 0, 2 / 6], rel=1e-12
    )


def test_a_weights_function_is_explained(capsys):
    path = "megatron_lossagg.verify.cases:mean_of_prompts"
    arguments = ["--weights-path", path, "--lengths", "3,5/9,0", "--no-count-empty"]
    assert main(["explain", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("own_weights: w_s = known to the weights function")
    assert f"--loss-aggregation-weights-path {path} --no-loss-aggregation-count-empty" in out
    explanation = explained("", "3,5/9,0", weights=path, count_empty=False)
    assert [s["w_s"] for s in explanation.sequences] == [1 / 12, 1 / 20, 1 / 18, 0]


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
    assert line.split() == ["constant", "1/(B", "L)", "no", "divisor"]
    assert "To compare with constant, give --divisor." in out


def test_the_factor_left_by_a_bare_partial_loss_is_printed(capsys):
    arguments = ["--dp", "8", "--cp", "2", "--microbatches", "4"]
    assert main(["explain", "token_mean", *arguments]) == 0
    out = capsys.readouterr().out
    assert "trains 1/(M DP CP) = 1/64 of this loss" in " ".join(out.split())
    assert re.findall(r"^  (loss_func|schedule|DDP) .* ([\d/]+) +([\d/]+)$", out, re.MULTILINE) == [
        ("loss_func", "64", "64"),
        ("schedule", "1/4", "16"),
        ("DDP", "1/16", "1"),
    ]


def test_the_chain_is_printed_after_the_dashboard_if_a_parallelism_is_given(capsys):
    for given in ([], ["--dp", "2"], ["--cp", "2"], ["--microbatches", "2"],
                  ["--loss-scaling", "average"]):  # fmt: skip
        assert main(["explain", "token_mean", *given]) == 0
        headings = re.findall(r"^[A-Z ]+$", capsys.readouterr().out, re.MULTILINE)
        chain = ["FROM LOSS TO GRADIENT"] if given else []
        assert headings == ["WEIGHTS", "ON THE DASHBOARD", *chain]


def test_where_k_is_1_a_bare_partial_loss_is_right(capsys):
    arguments = ["--dp", "1", "--cp", "1", "--microbatches", "1"]
    assert main(["explain", "token_mean", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "bare partial loss is right too" in out
    assert "of this loss, without" not in out
    assert "M = 1 microbatch," in out
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
    assert len(written["sequences"]) == 8
    assert written["chain"][-1]["factor"] == "1"


@pytest.mark.parametrize(
    ("mode", "loss_scaling", "terminal", "widest"),
    [
        ("token_mean", "average", "40", 72),
        ("length_power", "per_token", "72", 72),
        ("microbatch_token_mean", "per_token", "80", 80),
        ("microbatch_token_mean", "average", "200", 100),
    ],
)
def test_text_and_tables_fit_the_terminal(
    monkeypatch, capsys, mode, loss_scaling, terminal, widest
):
    monkeypatch.setenv("COLUMNS", terminal)
    numbers = ["--divisor", "16384", "--exponent", str(EXPONENT)]
    assert main(["explain", mode, *numbers, "--loss-scaling", loss_scaling]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if "Train it with" not in line]  # flags are not wrapped
    assert max(map(len, lines)) <= widest
    assert max(map(len, lines)) > widest - 12  # and the width is used
    assert lines == [line.rstrip() for line in lines]
    for c in explained(mode, divisor=16384.0).comparisons:  # nothing is cut
        assert any(line.split() == [c.mode, *c.w_s.split(), f"{c.loss:.5g}", f"{c.ratio:.5g}",
                                    *c.gradient.split()] for line in lines)  # fmt: skip


def test_a_divisor_below_a_response_is_warned_of_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(faults, "_warned", set())  # the warning is given once per process
    assert main(["explain", "constant", "--divisor", "4096"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lossagg: constant divides by 4096, and a sample has 8000 tokens")
    assert line.endswith("; check --divisor")


@pytest.mark.parametrize("columns", [72, 100])
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


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_help_of_a_command_fits_80_columns_and_ends_with_an_example(
    monkeypatch, capsys, command
):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    description = text[text.index("\n\n") : text.index("options:")]
    assert max(map(len, description.splitlines())) <= 80
    heading, example = text.splitlines()[-2:]
    assert heading == "example:"
    assert len(example) <= 80
    _, found, words = example.strip().partition("lossagg ")  # or -m megatron_lossagg
    args = _parser(words.split()).parse_args(words.split())
    assert found
    assert args.run.__module__ == _COMMANDS[command][0]


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: lossagg")
    for command, (_, summary, _) in _COMMANDS.items():
        assert f"{command} {summary}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["constant"], "'constant' divides by a constant length and got none: pass the longest "),
        (["trl:dr_grpo"], "longest response that generation allows as --divisor"),
        (["length_power"], "needs an exponent and got none: pass --exponent,"),
        (["dapo"], "'dapo' names two losses: token_mean, "),
        (["gspo"], "'gspo' is a policy loss and no aggregation. "),
        (["dpo"], "'dpo' is a loss of pairs and no aggregation: examples/pairs.py"),
        (["xyz"], "microbatch_token_mean; other systems' names are written system:name"),
        (["constant", "--divisor", "0"], "finite number above 0: change --divisor"),
        (["length_power", "--exponent", "inf"], "a finite number: change --exponent"),
        (["prompt_meen"], "did you mean 'prompt_mean'?"),
        (["custom"], "custom has no formula to explain"),
        (["token_mean", "--lengths", "3,-1"], "got '-1', expected a sample's active tokens"),
        (["token_mean", "--lengths", "3,,4"], "got '', expected a sample's active tokens"),
        (["token_mean", "--lengths", "0,0/0"], "got 3 fully masked samples and no active token"),
        (["token_mean", "--lengths", "4x/0"], "got 2 fully masked or left out samples"),
        (["token_mean", "--dp", "0"], "--dp: got 0, expected an integer from 1"),
        (["token_mean", "--microbatches", "0"], "--microbatches: got 0, expected an integer"),
        (["token_mean", "--dp", "9" * 30], "expected an integer from 1 to 2147483647"),
        (["token_mean", "--cp", str(2**31)], "--cp: got 2147483648, expected an integer"),
        (["token_mean", "--json", "/nowhere/at/all.json"], "cannot be written"),
        (["token_mean", "--lengths", "2147483648", "--loss-scaling", "per_token"], "int32"),
    ],
)  # fmt: skip
def test_wrong_usage_ends_with_status_2_and_what_to_change(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out


def test_one_prompt_that_was_typed_is_no_placeholder(capsys):
    assert main(["explain", "grpo", "--lengths", "3,4"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("sample_mean: w_s = 1/(B n_b)\n")
    sentence = "grpo is the paper's name for it, if all groups have the same number of samples."
    assert sentence in " ".join(out.split())
    assert not err


@pytest.mark.launches
def test_a_reader_that_ends_early_ends_the_command_without_an_error():
    # What is printed while the arguments are still read.
    done = forked_command.lossagg("explain", "--list", output="without a reader")
    assert done == (-signal.SIGPIPE, "", "")


@pytest.mark.parametrize("mode", [name for name in NAMES if name != "microbatch_token_mean"])
def test_a_sample_with_an_x_is_left_out_of_every_count(mode):
    found, wanted = explained(mode, "4,1/5x,3-x/2,0,7x"), explained(mode, "4,1/2,0")
    weights = [one["w_s"] for one in found.sequences]
    assert [weights[number] for number in (0, 1, 4, 5)] == [s["w_s"] for s in wanted.sequences]
    assert [weights[number] for number in (2, 3, 6)] == [0, 0, 0]
    assert found.counts == wanted.counts
    losses = [(c.mode, c.loss) for c in found.comparisons if c.mode != "microbatch_token_mean"]
    for mode_compared, loss in losses:
        (of_wanted,) = (c.loss for c in wanted.comparisons if c.mode == mode_compared)
        assert loss == pytest.approx(of_wanted, rel=1e-14)
