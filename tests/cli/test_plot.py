"""``lossagg plot``: its shares are the reference's, and what it writes has them."""

import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
from html_reader import Reader
from in_turn import reference_value

from megatron_lossagg.cli.explanation import EXPONENT
from megatron_lossagg.cli.main import main
from megatron_lossagg.cli.plot import figure_of, page, shares_of
from megatron_lossagg.cli.rollouts import Rollouts
from megatron_lossagg.reduction.modes import MODES

pandas = pytest.importorskip("pandas", reason="pandas is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

RECORDED = Path(__file__).parents[2] / "examples" / "drgrpo" / "data" / "rollouts.jsonl"
LEFT_OUT = ("balanced", "row_mean", "microbatch_token_mean", "custom", "own_weights")
"""They need what no file has: groups, rows, microbatches, code."""
M, DP = 2, 3


def step(active_tokens, prompt, sample=None):
    sample = range(len(active_tokens)) if sample is None else sample
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


def shares(steps, notes=()):
    return shares_of(Rollouts(steps=steps, unit="token", notes=notes), EXPONENT)


def column_of(mode, buckets):
    """Return the shares under a mode."""
    (name,) = [name for name in buckets if mode in re.findall(r"\w+", name)]
    return buckets[name]


def bounds(label):
    """Return the lowest and the highest length of a bucket."""
    low, _, high = label.partition("-")
    return int(low), int(high or low)


def reference(mode, of_step, losses=None):
    tokens, prompt, sample = (of_step[c].tolist() for c in ("active_tokens", "prompt", "sample"))
    return reference_value(mode, tokens, prompt, sample, losses, divisor=7.0, microbatches=M, dp=DP)


def reference_share(mode, of_step, low, high):
    """Divide the reference if only samples of low to high tokens have a loss by that of all."""
    n_b = of_step["active_tokens"].groupby(of_step["sample"]).transform("sum")
    return reference(mode, of_step, list(n_b.between(low, high))) / reference(mode, of_step)


@pytest.mark.parametrize("steps", [STEPS, SPLIT], ids=["sequences", "split samples"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in LEFT_OUT])
def test_a_share_is_the_mean_over_the_steps_of_the_references(mode, steps):
    found = column_of(mode, shares(steps).buckets)
    assert len(found) > 2
    for label, share in found.items():
        of_steps = [reference_share(mode, s, *bounds(label)) for s in steps]
        assert share == pytest.approx(sum(of_steps) / len(steps), abs=1e-12)


@pytest.mark.parametrize("steps", [STEPS, SPLIT, STEPS[:1]])
def test_every_share_adds_up_to_1(steps):
    buckets = shares(steps).buckets
    assert buckets.sum().tolist() == pytest.approx([1] * 6, rel=1e-12)


def test_sample_mean_follows_the_responses_and_token_mean_the_tokens():
    """Of samples with several sequences too."""
    buckets = shares(SPLIT).buckets
    for mode, share in (("sample_mean", "responses"), ("constant", "tokens")):
        found = column_of(mode, buckets).tolist()
        assert found == pytest.approx(buckets[share].tolist(), abs=1e-12)


def test_shares_by_hand():
    """Lengths 1 and 5 to one prompt, 6 to another."""
    found = shares((step([1, 5, 6], [0, 0, 1]),))
    assert found.num == [1, 0, 0, 0, 1, 1]
    lowest, highest = found.buckets.loc["1"], found.buckets.loc["6"]
    assert lowest["tokens"] == column_of("token_mean", found.buckets)["1"] == pytest.approx(1 / 12)
    assert lowest["sample_mean"] == pytest.approx(1 / 3)
    assert lowest["prompt_mean"] == pytest.approx(1 / 2 * 1 / 6)
    assert highest["prompt_mean"] == pytest.approx(1 / 2)


def test_the_exponent_that_is_given_is_drawn(tmp_path, capsys):
    """Weights of lengths 1 and 4 are n^(1-a): 1 and 2, or 1^-1 and 4^-1."""
    file, html = tmp_path / "lengths.jsonl", tmp_path / "page.html"
    file.write_text('{"response_length": 1}\n{"response_length": 4}\n')
    for given, exponent, share in (([], "0.5", "66.7%"), (["--exponent", "2"], "2", "20.0%")):
        assert main(["plot", str(file), "--html", str(html), *given]) == 0
        (line,) = [x for x in Reader(html.read_text()).lines if "length_power" in x[0]]
        assert line[0] == f"length_power (a = {exponent})"
        assert line[-1] == share


@pytest.mark.parametrize(
    ("steps", "finding"),
    [
        (
            (step([1, 1, 1, 2, 2, 2, 6], [0, 0, 0, 0, 1, 1, 1]),),
            "Responses of 3 tokens and more are 14.3% of all trained responses. They have 40.0% "
            "of the loss weight under token_mean, 14.3% under sample_mean.",
        ),
        (
            (step([5, 6], None),),
            "Responses of 6 tokens and more are 50.0% of all trained responses. They have 54.5% "
            "of the loss weight under token_mean, 50.0% under sample_mean.",
        ),
        ((step([5] * 7, [0] * 7),), "Every mode has the same shares on these responses."),
    ],
    ids=["a quarter at most", "a bucket at least", "equal"],
)
def test_the_finding_is_about_the_longest_responses(steps, finding):
    assert shares(steps).finding == finding


def test_without_prompts_there_is_no_prompt_mean_and_a_note_says_it():
    found = shares((step([5, 8], None),))
    assert "prompt_mean" not in found.buckets
    assert "prompt_mean is missing: the file has no prompts." in found.notes


@pytest.mark.parametrize(
    ("lengths", "labels"),
    [
        ([1], ["1"]),
        ([3, 5], ["3", "4", "5"]),
        ([1, 3, 15], ["1-3", "4-6", "7-9", "10-12", "13-15"]),
        ([120, 900, 1000], ["1-150", "151-300", "301-450", "451-600", "601-750", "751-900",
                            "901-1050"]),
        ([60, 90, 200, 9000], ["51-100", "101-200", "201-500", "501-1000", "1001-2000",
                               "2001-5000", "5001-10000"]),
        ([2, 3, 3, 10**6], ["2-10000", "10001-20000", "20001-50000", "50001-100000",
                            "100001-200000", "200001-500000", "500001-1000000"]),
    ],
)  # fmt: skip
def test_buckets_are_round_few_and_hold_every_response(lengths, labels):
    found = shares((step(lengths, [0] * len(lengths)),))
    assert found.buckets.index.tolist() == labels
    assert sum(found.num) == len(lengths)


def test_the_page_loads_nothing_and_has_every_number():
    found = shares(STEPS)
    text = page(found)
    read = Reader(text)
    assert not read.loading()
    assert not re.findall(r"url\((?!#)|@import", text)
    assert text.count("<svg") == 1
    assert read.lines == [
        [name, *(f"{share:.1%}" for share in shares_of)]
        for name, shares_of in found.buckets.items()
    ]


def test_the_picture_has_a_bar_for_each_number():
    found = shares(STEPS)
    above, below = figure_of(found).axes
    assert [bar.get_height() for bar in above.patches] == found.num
    assert len(below.containers) == 4
    for bars in below.containers:
        heights = [bar.get_height() for bar in bars]
        assert heights == pytest.approx((100 * found.buckets[bars.get_label()]).tolist())


FEW = {
    "lengths that grow": [2, 3, 3, 10**6],
    "two long ones": [1, 131072, 131072],
    "large numbers": [10**9 + 5, 10**9 + 90, 10**9],
    "seven buckets": [60, 90, 200, 9000],
    "equal ones": [9000] * 3,
    "one": [7],
    "two": [3, 5],
    "eight": [512, 300, 4096, 12, 900, 1500, 77, 2048],
}


@pytest.mark.parametrize("unit", ["token", "character"])
@pytest.mark.parametrize("lengths", FEW.values(), ids=FEW)
def test_no_label_of_the_picture_lies_on_another_or_outside(lengths, unit):
    steps = (step(lengths, [number // 2 for number in range(len(lengths))]),)
    figure = figure_of(shares_of(Rollouts(steps=steps, unit=unit, notes=()), EXPONENT))
    figure.draw_without_rendering()
    labels = [*figure.texts, figure._suptitle]
    for axes in figure.axes:
        low, high = axes.get_ylim()
        labels += [axes.xaxis.label, axes.yaxis.label, axes._left_title, *axes.texts]
        labels += [tick.label1 for tick in axes.xaxis.get_major_ticks()]
        ticks = axes.yaxis.get_major_ticks()
        labels += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
        labels += axes.get_legend().get_texts() if axes.get_legend() else []
    labels = {label for label in labels if label.get_visible() and label.get_text().strip()}
    boxes = [(label.get_text(), label.get_window_extent()) for label in labels]
    assert len(boxes) > 4 * len(figure.axes[1].get_xticks())
    on_another = [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)]
    assert not on_another
    outside = [text for text, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.x1 or box.y0 < 0]
    assert not outside


def test_file_names_are_escaped_in_the_page():
    text = page(shares(STEPS, notes=["<b>&.jsonl"]))
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
    [("pandas", "--html"), ("matplotlib.ticker", "--html"), ("matplotlib.figure", "--png"),
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
        (["--png", "picture.doc"], "--png: no picture as 'doc' (Format 'doc' is not supported"),
        (["--png", "picture.pgf"], "--png: no picture as 'pgf' ('xelatex' not found"),
        (["--exponent", "nan"], "expected a finite number: change --exponent"),
    ],
)
def test_wrong_usage_ends_with_status_2(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setenv("PATH", "")  # no TeX
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(RECORDED), *flags]) == 2
    assert message in capsys.readouterr().err
