"""The page of ``lossagg verify --html``: complete, escaped, self-contained, and it fits."""

import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from megatron_lossagg.verify.page import page
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE

LAYOUTS = ["DP 4, M 3", "DP 2 x CP 2, M 3, distributed optimizer, overlap grad reduce, bshd"]
CASES = ["token_mean", "sample_mean, count_empty=False", "constant + token_mean"]
LOSS_SCALINGS = ["average", "per_token"]
VOID = {"meta", "br", "link", "img"}


def verdict(**changes):
    return {
        "layout": LAYOUTS[0],
        "case": CASES[0],
        "formula": "1/(B 4096)",
        "loss_scaling": LOSS_SCALINGS[0],
        "k": 12,
        "gradient_error": 1.25e-15,
        "loss_error": 0.0,
        "weight_sum_error": 5.6e-08,
        "measured_factor": 0.9999999999999998,
        "tolerance": 1e-12,
        "causes": [],
        "explanation": "",
        "passed": True,
        **changes,
    }


def failed(**changes):
    wrong = {
        "gradient_error": 2 / 3,
        "measured_factor": 1 / 3,
        "causes": ["over_m"],
        "explanation": "gradient: measured factor 0.333333333333 = 1/M, expected 1: K lacks M",
        "passed": False,
    }
    return verdict(**{**wrong, **changes})


def report(verdicts=None, **changes):
    if verdicts is None:
        keys = [(a, b, c) for a in LAYOUTS for b in LOSS_SCALINGS for c in CASES]
        verdicts = [verdict(layout=a, loss_scaling=b, case=c) for a, b, c in keys]
    return {
        "tool": {"name": "megatron_lossagg", "version": "0.1.0"},
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": 41.2,
        "command": "lossagg verify --html page.html",
        "environment": [
            {"name": "torch", "state": "found", "version": "2.13.0", "detail": "CPU and gloo"},
            {"name": "transformer-engine", "state": "missing", "version": "", "detail": "optional"},
            {"name": "apex", "state": "broken", "version": "0.9", "detail": "another project"},
            {
                "name": "megatron-core",
                "state": "found",
                "version": "0.16.1",
                "path": "/folder/of/megatron",
                "commit": "0123456789ab, modified",
            },
        ],
        "layouts": LAYOUTS,
        "num_verdicts": len(verdicts),
        "verdicts": verdicts,
        "passed": all(v["passed"] for v in verdicts),
        **changes,
    }


class Reader(HTMLParser):
    """A page's tags, sequences and text; raises where a tag is not closed in its place."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.sequences, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr" and "tbody" in self.open:
            self.sequences.append([])

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if "tbody" in self.open:
            self.sequences[-1].append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def of_class(self, name):
        return [tag for tag, attrs in self.tags if name in (attrs.get("class") or "").split()]


MIXED = report(
    [
        verdict(),
        failed(),
        failed(gradient_error=math.inf, measured_factor=math.nan),
        failed(gradient_error=None, loss_error=None, weight_sum_error=None, measured_factor=None),
        failed(layout=LAYOUTS[1], gradient_error=4.5e30, causes=[]),
        verdict(layout=LAYOUTS[1], gradient_error=0.0),
        verdict(layout=LAYOUTS[1], tolerance=1e-5),
    ]
)


def test_every_verdict_has_a_line_with_its_formula_and_numbers():
    verdicts = report()["verdicts"]
    sequences = Reader(page(report())).sequences
    assert len(sequences) == len(verdicts) == 12
    for sequence, wanted in zip(sequences, verdicts, strict=True):
        numbers = ["12", "1", "1.2e-15", "0", "5.6e-08"]
        assert sequence == [
            wanted["case"],
            wanted["formula"],
            wanted["loss_scaling"],
            *numbers,
            "PASS",
        ]


@pytest.mark.parametrize(
    ("given", "headline"),
    [
        (report(), "12 of 12 cases pass: the trained loss is the configured loss"),
        (MIXED, "4 of 7 cases fail: the trained or the reported loss is not the configured loss"),
        (report([verdict()], layouts=LAYOUTS[:1]), "1 of 1 case passes: the trained loss is"),
        (report([verdict(), failed()]), "1 of 2 cases fails: the trained or the reported"),
        (report([verdict()] * 2, passed=False), "The run did not finish: 2 cases measured"),
        (report([verdict()]), "The run did not finish: 1 case measured"),  # a layout has no case
        (report([]), "The run did not finish: nothing was measured"),
    ],
)
def test_the_result_is_at_the_top(given, headline):
    read = Reader(page(given))
    assert read.text.startswith(f"{headline}")  # the title
    assert f"lossagg verify {headline}" in read.text.replace(" :", ":")


def test_the_table_follows_the_result_and_the_causes_follow_the_table():
    text = page(MIXED)
    order = ["<h1>", "<h2>Cases<", "Why</h2>", "<h2>Gradient", "<h2>Run<", "<h2>How to read it<"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_versions_and_layouts_are_listed_with_the_checkout_of_megatron():
    text = Reader(page(report())).text
    for words in ("0.1.0", "2.13.0", "CPU and gloo", "broken 0.9 another project", *LAYOUTS):
        assert words in text
    assert "lossagg verify --html page.html" in text
    assert "missing optional" in text
    assert "0.16.1 /folder/of/megatron, commit 0123456789ab, modified" in text


def test_a_failed_case_has_its_explanation_and_a_passing_one_none():
    for sequence, given in zip(Reader(page(MIXED)).sequences, MIXED["verdicts"], strict=True):
        assert sequence[8:] == ["PASS"] if given["passed"] else ["FAIL", given["explanation"]]


def test_causes_are_listed_once_with_a_link_to_their_first_case():
    read = Reader(page(MIXED))
    links = [attrs["href"] for tag, attrs in read.tags if tag == "a"]
    targets = {attrs["id"] for _, attrs in read.tags if "id" in attrs}
    assert {"#why", "#case-2", "#case-5"} <= set(links)
    assert {link.removeprefix("#") for link in links} <= targets
    assert read.text.count("over_m") == 1
    assert "no known cause" in read.text


def test_a_layout_without_cases_is_listed():
    text = Reader(page(report([verdict()], passed=False))).text
    assert f"The run ended before the cases of {LAYOUTS[1]}" in text
    assert f"{LAYOUTS[1]} not measured" in text


def test_what_is_out_of_tolerance_is_marked():
    over = [
        verdict(weight_sum_error=2 * WEIGHT_SUM_TOLERANCE, passed=False),
        failed(loss_error=math.nan),
    ]
    assert Reader(page(report())).of_class("over") == []
    assert len(Reader(page(report(over))).of_class("over")) == 3


def test_a_point_for_every_finite_error_and_a_place_for_the_others():
    read = Reader(page(MIXED))
    assert len(read.of_class("point")) == 5
    assert len(read.of_class("lost")) == 2
    assert "nan" not in page(MIXED).lower()
    assert "inf" not in re.sub("infinities", "", page(MIXED))


def test_an_error_is_drawn_left_or_right_of_its_tolerance():
    text = page(report([verdict(), failed(), verdict(gradient_error=0.0)], layouts=LAYOUTS[:1]))
    (bar,) = (float(x) for x in re.findall(r'class="bar" d="M([\d.]+)', text))
    right, zero = (float(x) for x in re.findall(r'class="point pass" cx="([\d.]+)', text))
    (wrong,) = (float(x) for x in re.findall(r'class="point fail" d="M([\d.]+)', text))
    assert zero < right < bar < wrong


def test_text_is_escaped():
    evil = "<script>alert('&\"')</script>"
    fact = {"name": evil, "state": evil, "version": evil, "detail": evil}
    place = {"path": evil, "commit": evil}
    words = dict.fromkeys(("layout", "case", "formula", "loss_scaling", "k", "explanation"), evil)
    sequences = [failed(**words, causes=[evil])]
    given = report(
        sequences,
        layouts=[evil, f"{evil} without cases"],
        command=evil,
        started=evil,
        environment=[fact, {**fact, "version": ""}, {**fact, **place}],
        tool={"name": evil, "version": evil},
    )
    read = Reader(page(given))
    assert read.text.count(evil) >= 16
    shapes, harmless = (
        {(tag, *attrs) for tag, attrs in r.tags} for r in (read, Reader(page(MIXED)))
    )
    assert shapes <= harmless


@pytest.mark.parametrize("given", [report(), MIXED, report([])], ids=["passed", "mixed", "empty"])
def test_the_page_loads_nothing_and_runs_nothing(given):
    text = page(given)
    read = Reader(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in read.tags}
    assert not any({"src", "srcset", "data"} & set(attrs) for _, attrs in read.tags)
    assert all(attrs["href"].startswith("#") for _, attrs in read.tags if "href" in attrs)
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_the_plot_has_a_title_and_a_description():
    read = Reader(page(MIXED))
    (plot,) = (attrs for tag, attrs in read.tags if tag == "svg" and "role" in attrs)
    targets = {attrs["id"]: tag for tag, attrs in read.tags if "id" in attrs}
    assert [targets[name] for name in plot["aria-labelledby"].split()] == ["title", "desc"]
    described = "7 cases on 2 layouts, logarithmic scale. Errors from 0 to 4.5e+30. 2 cases without"
    assert f"{described} a finite error." in read.text


def test_one_layout_and_one_case_are_singular():
    text = Reader(page(report([verdict()], layouts=LAYOUTS[:1]))).text
    assert "1 case on 1 layout, logarithmic scale." in text


def luminance(colour):
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_in_both_schemes(scheme):
    root = re.findall(r":root\{(.*?)\}", page(report()), re.DOTALL)[scheme]
    colours = {name: luminance(c) for name, c in re.findall(r"--(\w+):#([0-9a-f]+)", root)}
    for name in ("ink", "soft", "pass", "fail"):
        darker, lighter = sorted((colours[name], colours["paper"]))
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, name  # WCAG AA


# The browser shows the page in a frame 1000 pixels wide; the script around the frame measures
# it, so that the page itself is the one that users get.

MEASURE = """<!DOCTYPE html><meta charset="utf-8"><title>not measured</title>
<iframe id="page" style="width:1000px;height:4000px;border:0" srcdoc="%s"></iframe>
<pre id="measured"></pre>
<script>
addEventListener("load", () => {
  const page = document.getElementById("page").contentDocument;
  const all = [...page.body.querySelectorAll("*")];
  const name = (element) => element.tagName + " " + element.textContent.trim().slice(0, 60);
  const leaves = (element) => {
    const box = element.getBoundingClientRect();
    return box.right > 1000.5 || box.left < -0.5;
  };
  const spills = (element) =>
    element.clientWidth > 0 && !element.closest("svg")
    && element.scrollWidth > element.clientWidth + 1;
  const root = page.documentElement;
  document.getElementById("measured").textContent = JSON.stringify({
    sequences: page.querySelectorAll("tbody tr").length,
    sequences_seen: [...page.querySelectorAll("tbody tr")].filter((sequence) =>
    sequence.offsetHeight > 10).length,
    points: page.querySelectorAll("svg .point").length,
    width: [root.clientWidth, root.scrollWidth],
    overflowing: all.filter((element) => leaves(element) || spills(element)).map(name),
    loaded: page.defaultView.performance.getEntriesByType("resource").length,
    columns: new Set([...page.querySelectorAll("table:not(.framework) tbody tr")].map((sequence) =>
      [...sequence.cells].slice(0, 9).map((cell) => cell.offsetLeft).join())).size,
  });
});
</script>
"""

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LONG = "a_word_that_is_much_longer_than_its_place_" * 4
WIDE = report(
    [
        *MIXED["verdicts"],
        failed(case=LONG, measured_factor=-1.23456789e-123, k=2**31, explanation=LONG * 2),
        failed(layout=f"DP 1024 x TP 8, M 4096, {LONG}", causes=[LONG]),
    ],
    command=f"lossagg verify --html {LONG}",
    environment=[{"name": LONG, "state": "broken", "version": LONG, "detail": LONG}],
)


def check(**changes):
    return {
        "check": "verl:token-mean",
        "function": "verl.trainer.ppo.core_algos.agg_loss",
        "state": "PASS",
        "got": 0.5,
        "wanted": 0.5,
        "loss_error": 0.0,
        "gradient_error": 1.5e-16,
        "explanation": "",
        **changes,
    }


def hosted(*checks):
    passed = all(each["state"] != "FAIL" for each in checks)
    framework = {"name": "verl", "seconds": 6.2, "passed": passed, "checks": list(checks)}
    return report(framework=framework, passed=passed)


NOT_RUN = check(
    check=LONG, state="NOT RUN", got=None, wanted=None, explanation=f"No module named '{LONG}'"
)
WRONG = check(
    state="FAIL", gradient_error=None, explanation="agg_loss: got a loss of 1, expected 2"
)


def test_a_check_of_a_framework_that_did_not_run_counts_as_neither_pass_nor_failure():
    reader = Reader(page(hosted(check(), NOT_RUN)))
    assert "12 of 12 cases pass:" in reader.text
    assert "verl: 1 of 2 checks of its own code pass, 1 not run." in reader.text
    *_, ran, absent = reader.sequences
    assert ran == ["verl:token-mean", "core_algos.agg_loss", "0", "1.5e-16", "PASS"]
    assert absent[0] == LONG
    assert "NOT RUN" in absent
    assert f"No module named '{LONG}'" in absent


def test_a_failed_check_of_a_framework_is_the_result():
    reader = Reader(page(hosted(check(), WRONG, NOT_RUN)))
    title = "1 of 3 checks of verl fails: its own code does not train the configured loss"
    assert title in reader.text
    wrong = reader.sequences[-2]
    assert "not finite" in wrong
    assert WRONG["explanation"] in wrong
    unfinished = {**hosted(check(), WRONG), "verdicts": []}
    assert "The run did not finish: nothing was measured" in Reader(page(unfinished)).text


@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no browser: chromium is not on PATH")
    return found


@pytest.mark.parametrize(
    "given",
    [report(), MIXED, WIDE, hosted(check(), WRONG, NOT_RUN)],
    ids=["passed", "mixed", "wide", "a framework"],
)
def test_a_browser_shows_every_sequence_and_point_and_nothing_overflows(browser, given, tmp_path):
    shown = tmp_path / "measure.html"
    shown.write_text(MEASURE % html.escape(page(given)), encoding="utf-8")
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,4000"]
    done = subprocess.run(
        [browser, *flags, "--dump-dom", shown.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = re.findall(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    measured = json.loads(html.unescape(found))
    errors = [v["gradient_error"] for v in given["verdicts"]]
    finite = sum(error is not None and math.isfinite(error) for error in errors)
    sequences = len(errors) + len(given.get("framework", {}).get("checks", []))
    assert measured == {
        "sequences": sequences,
        "sequences_seen": sequences,
        "points": finite,
        "width": [1000, 1000],
        "overflowing": [],
        "loaded": 0,
        "columns": 1,
    }
