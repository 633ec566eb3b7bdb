"""``lossagg plot``: its shares are the reference's, and what it writes has them."""

import re
import sys
from pathlib import Path

import pytest
from html_reader import Reader
from in_turn import reference_value

from megatron_lossagg.cli.main import main
from megatron_lossagg.cli.picture import figure_of, page
from megatron_lossagg.cli.plans import Split
from megatron_lossagg.cli.rollouts import Rollouts, RolloutsError
from megatron_lossagg.cli.shares import read_buckets, shares_of

pandas = pytest.importorskip("pandas", reason="pandas is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

RECORDED = Path(__file__).parents[2] / "examples" / "drgrpo" / "data" / "rollouts.jsonl"
MODES = [
    "token_mean", "sample_mean", "prompt_mean", "constant", "sample_sum", "token_sum",
    "length_power", "microbatch_token_mean",
]  # fmt: skip
M, DP = 2, 3


def step(active_tokens, prompt, sample=None):
    columns = {"active_tokens": active_tokens, "prompt": prompt, "sample": sample}
    return pandas.DataFrame({name: ids for name, ids in columns.items() if ids is not None})


STEPS = (
    step([3, 9, 40, 1, 0, 12, 3, 700, 20, 9], [0, 0, 1, 1, 1, 0, 2, 2, 2, 2]),
    step([5, 0, 8, 16, 33, 2, 2, 1], [0, 0, 0, 1, 1, 1, 1, 1]),
)
SPLIT = (
    step([3, 9, 40, 1, 0, 12, 3], [0, 0, 1, 1, 1, 0, 2], [0, 0, 1, 2, 2, 3, 4]),
    step([5, 0, 8], [0, 0, 0], [0, 1, 0]),
)
"""Samples that are several sequences."""


def shares(steps, highs=None, *, masked_steps=0, source="a list"):
    rollouts = Rollouts(
        steps=steps, masked_steps=masked_steps, unit="token", caveat="", source=source
    )
    return shares_of(rollouts, Split(microbatches=M, dp=DP), highs)


def records(found):
    return found.buckets.to_dict("records")


def reference(mode, of_step, losses=None):
    sample = list(of_step["sample"]) if "sample" in of_step else None
    tokens, prompt = of_step["active_tokens"].tolist(), list(of_step["prompt"])
    return reference_value(mode, tokens, prompt, sample, losses, divisor=7.0, microbatches=M, dp=DP)


def reference_share(mode, of_step, low, high):
    """Divide the reference if only samples of low to high tokens have a loss by that of all."""
    sample = of_step.get("sample", of_step.index.to_series())
    n_b = of_step["active_tokens"].groupby(sample).transform("sum")
    return reference(mode, of_step, list(n_b.between(low, high))) / reference(mode, of_step)


@pytest.mark.parametrize("steps", [STEPS, SPLIT], ids=["sequences", "split samples"])
@pytest.mark.parametrize("mode", MODES)
def test_a_share_is_the_mean_over_the_steps_of_the_references(mode, steps):
    for bucket in records(shares(steps, highs=[3, 10, 30, 1000])):
        of_steps = [reference_share(mode, s, bucket["low"], bucket["high"]) for s in steps]
        assert bucket[mode] == pytest.approx(sum(of_steps) / len(steps), abs=1e-12)


@pytest.mark.parametrize("highs", [None, [10, 30]])
@pytest.mark.parametrize("steps", [STEPS, SPLIT, STEPS[:1]])
def test_every_share_adds_up_to_1(steps, highs):
    buckets = shares(steps, highs).buckets
    for share in ("responses", "tokens", *MODES):
        assert buckets[share].sum() == pytest.approx(1, rel=1e-12)


def test_sample_mean_follows_the_responses_and_token_mean_the_tokens():
    """Of samples with several sequences too."""
    buckets = shares(SPLIT, [4, 12, 60]).buckets
    for mode, share in (("sample_mean", "responses"), ("token_mean", "tokens")):
        assert buckets[mode].tolist() == pytest.approx(buckets[share].tolist(), abs=1e-12)


def test_shares_by_hand():
    """Lengths 1 and 9 to one prompt, 10 to another: tokens 1/20, 19/20."""
    low, high = records(shares((step([1, 9, 10], [0, 0, 1]),), [1, 10]))
    assert (low["num"], high["num"]) == (1, 2)
    assert low["token_mean"] == pytest.approx(1 / 20)
    assert low["sample_mean"] == pytest.approx(1 / 3)
    assert low["prompt_mean"] == pytest.approx(1 / 2 * 1 / 10)
    assert high["prompt_mean"] == pytest.approx(1 / 2 * 9 / 10 + 1 / 2)


def test_the_exponent_that_is_given_is_drawn(tmp_path, capsys):
    """Weights of lengths 4 and 16 are n^(1-a): 2 and 4, or 4^-1 and 16^-1."""
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"response_length": 4}\n{"response_length": 16}\n')
    for given, exponent, share in (([], "0.5", "66.7%"), (["--exponent", "2"], "2", "20.0%")):
        html = tmp_path / f"{exponent}.html"
        assert main(["plot", str(file), "--buckets", "4,16", "--html", str(html), *given]) == 0
        assert f"length_power has the exponent {exponent}" in capsys.readouterr().out
        (row,) = re.findall(r"<tr>(?:(?!</tr>).)*length_power.*?</tr>", html.read_text(), re.DOTALL)
        assert f"1/(n_b^{exponent} Z)" in row
        assert share in row


def test_modes_with_equal_shares_are_one_group():
    assert shares(STEPS).groups == (
        ("token_mean", "constant", "sample_sum", "token_sum"),
        ("sample_mean",),
        ("prompt_mean",),
        ("length_power",),
        ("microbatch_token_mean",),
    )
    alike = shares((step([5, 5, 5, 5, 5, 5], [0, 0, 1, 1, 2, 2]),), [4, 6])
    assert len(alike.groups) == 1
    assert alike.finding.startswith("Every mode has the same shares")


@pytest.mark.parametrize(
    ("steps", "highs", "finding"),
    [
        (
            (step([10, 10, 10, 20, 20, 20, 100], [0, 0, 0, 0, 1, 1, 1]),),
            [10, 20, 100],
            "Responses of 21 tokens and more are 14.3% of all trained responses. They have 52.6% "
            "of the loss weight under token_mean, 14.3% under sample_mean.",
        ),
        (
            (step([5, 50], [0, 0]),),
            [10, 100, 1000],
            "Responses of 11 tokens and more are 50.0% of all trained responses. They have 90.9% "
            "of the loss weight under token_mean, 50.0% under sample_mean.",
        ),
        (
            # In each step the longest bucket has all responses or none, under every mode.
            (step([1, 9], [0, 0]), step([100], [0])),
            [1, 10, 100],
            "Responses of 11 tokens and more are 50.0% of all trained responses. They have 50.0% "
            "of the loss weight under each of token_mean, sample_mean, length_power.",
        ),
        (
            (step([5] * 7, [0] * 7),),
            [4, 6],
            "Every mode has the same shares on these responses.",
        ),
    ],
    ids=["a quarter at most", "an empty bucket", "equal in the longest", "equal in all"],
)
def test_the_finding_is_about_the_longest_responses(steps, highs, finding):
    assert shares(steps, highs).finding == finding


def test_a_note_says_which_steps_are_left_out():
    assert "1 step with no active token: left out." in shares(STEPS, masked_steps=1).notes


def test_without_prompts_there_is_no_prompt_mean_and_a_note_says_it():
    found = shares((step([5, 8], None),))
    assert "prompt_mean" not in found.modes
    assert "prompt_mean is missing: the file has no prompts." in found.notes


@pytest.mark.parametrize(
    ("lengths", "labels"),
    [
        ([3, 5], ["3", "4", "5"]),
        ([1, 3, 15], ["1-3", "4-6", "7-9", "10-12", "13-15"]),
        ([120, 900, 1000], ["1-200", "201-400", "401-600", "601-800", "801-1000"]),
        ([60, 90, 200, 9000], ["51-100", "101-200", "201-500", "501-1000", "1001-2000",
                               "2001-5000", "5001-10000"]),
        ([2, 3, 3, 10**6], ["2-10000", "10001-20000", "20001-50000", "50001-100000",
                            "100001-200000", "200001-500000", "500001-1000000"]),
        ([1], ["1"]),
    ],
)  # fmt: skip
def test_buckets_are_round_at_most_seven_and_hold_every_response(lengths, labels):
    buckets = shares((step(lengths, [0] * len(lengths)),)).buckets
    assert buckets["label"].tolist() == labels
    assert buckets["num"].sum() == len(lengths)


def test_given_buckets_get_one_more_for_longer_responses():
    found = shares(STEPS, read_buckets("10, 30"))
    assert found.buckets["label"].tolist() == ["1-10", "11-30", "31-700"]


def test_given_buckets_are_at_most_seven_with_the_one_for_longer_responses():
    assert len(shares(STEPS, read_buckets("1,2,3,4,5,6,700")).buckets) == 7
    with pytest.raises(RolloutsError, match="a response of length 700, which needs one more"):
        shares(STEPS, read_buckets("1,2,3,4,5,6,699"))


@pytest.mark.parametrize("text", ["", "3,a", "3,,4", "0,3", "4,3", "3,3", "1,2,3,4,5,6,7,8"])
def test_buckets_that_do_not_rise_are_refused(text):
    with pytest.raises(RolloutsError, match="expected rising integers from 1, at most 7"):
        read_buckets(text)


def test_the_page_loads_nothing_and_has_every_number():
    found = shares(STEPS, [3, 10, 30])
    text = page(found)
    read = Reader(text)
    assert not read.loading()
    assert not re.findall(r"url\((?!#)|@import", text)
    assert text.count("<svg") == 1
    table = {row[0]: row[-len(found.buckets) :] for row in read.lines}
    for mode in MODES:
        assert table[mode] == [f"{share:.1%}" for share in found.buckets[mode]]
    assert page(found) == text


def test_the_picture_has_a_bar_for_each_number():
    found = shares(STEPS, [3, 10, 30])
    above, below = figure_of(found).axes
    assert [bar.get_height() for bar in above.patches] == found.buckets["num"].tolist()
    for group, bars in zip(found.groups, below.containers, strict=True):
        heights = [bar.get_height() for bar in bars]
        assert heights == pytest.approx((100 * found.buckets[group[0]]).tolist(), rel=1e-12)


def test_file_names_are_escaped_in_the_page():
    text = page(shares(STEPS, source="<b>&.jsonl"))
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;.jsonl" in text


def test_the_command_writes_a_png_by_default_in_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(RECORDED)]) == 0
    written = (tmp_path / "rollouts.png").read_bytes()
    assert written.startswith(b"\x89PNG\r\n")
    assert len(written) > 20_000  # something is drawn
    out = capsys.readouterr().out
    assert "960 responses to 120 prompts in 20 steps, 5,032 active tokens" in out
    assert out.endswith("rollouts.png\n")


@pytest.mark.parametrize(
    ("package", "flag"),
    [("pandas", "--html"), ("matplotlib", "--html"), ("matplotlib.figure", "--png"),
     ("jinja2", "--html")],
)  # fmt: skip
def test_a_package_that_is_absent_is_named_with_its_extra(
    tmp_path, monkeypatch, capsys, package, flag
):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["plot", str(RECORDED), flag, str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"needs {package.partition('.')[0]}, which is not installed" in line
    assert line.endswith("pip install 'megatron-lossagg[plot]'")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--html", "absent/page.html"], "--html absent/page.html cannot be written"),
        (["--png", "absent/picture.png"], "--png absent/picture.png cannot be written"),
        (["--png", "picture.doc"], "--png picture.doc cannot be written"),
        (["--png", "picture.pgf"], "--png picture.pgf cannot be written ('xelatex' not found"),
        (["--buckets", "9,3"], "expected rising integers"),
        (["--dp", "0"], "--dp: got 0"),
    ],
)
def test_wrong_usage_ends_with_status_2(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setenv("PATH", "")  # no TeX
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(RECORDED), *flags]) == 2
    assert message in capsys.readouterr().err
