"""What ``lossagg verify`` reports: one result, and a page that is complete, true and escaped."""

import math
import re
import sys

import jinja2
import pytest
from html_reader import Reader

from megatron_lossagg.cli import html
from megatron_lossagg.cli.extras import MissingPackageError
from megatron_lossagg.cli.verify import _report
from megatron_lossagg.cli.verify_report import finite, page, show
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.verify.cases import MASK_CASES
from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.job import Job
from megatron_lossagg.verify.parallelism import WEIGHT_SUM_TOLERANCE, Parallelism

LAYOUTS = ["DP 4, M 3", "DP 2 x CP 2, M 3, distributed optimizer, overlap grad reduce, bshd"]
CASES = ["token_mean", "sample_mean, count_empty=False", "constant + token_mean"]


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


def report(verdicts=None, *, failure="", **changes):
    if verdicts is None:
        keys = [(a, b, c) for a in LAYOUTS for b in LOSS_SCALINGS for c in CASES]
        verdicts = [verdict(layout=a, loss_scaling=b, case=c) for a, b, c in keys]
    core = {"name": "megatron-core", "state": "found", "version": "0.16.1"}
    passed = not failure and all(v["passed"] for v in verdicts)
    written = {
        "tool": {"name": "megatron_lossagg", "version": "0.1.0"},
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": 41.2,
        "command": "lossagg verify --html page.html",
        "environment": [
            {"name": "torch", "state": "found", "version": "2.13.0", "detail": "CPU and gloo"},
            {"name": "transformer-engine", "state": "missing", "version": "", "detail": "optional"},
            {**core, "path": "/folder/of/megatron", "commit": "0123456789ab, modified"},
        ],
        "layouts": LAYOUTS,
        "num_verdicts": len(verdicts),
        "verdicts": verdicts,
        "framework": None,
        "state": "PASS" if passed else "FAIL",
        "passed": passed,
        "failure": failure,
        **changes,
    }
    return finite(written)


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
    numbers = ["12", "1.000000000", "1.2e-15", "0", "5.6e-08", "PASS"]
    assert Reader(page(report())).lines == [
        [wanted["case"], wanted["formula"], wanted["loss_scaling"], *numbers] for wanted in verdicts
    ]


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


def framework_of(*checks):
    states = [each["state"] for each in checks]
    passed = "FAIL" not in states and "PASS" in states
    return {"name": "verl", "seconds": 6.2, "passed": passed, "checks": list(checks)}


def with_checks(state, *checks, **changes):
    framework = framework_of(*checks)
    return report(framework=framework, state=state, passed=state == "PASS", **changes)


NOT_RUN = check(check="absent", state="NOT RUN", got=None, wanted=None, explanation="No module")
WRONG = check(state="FAIL", gradient_error=None, explanation="got a loss of 1, expected 2")


BROKEN = "A rank failed\n[rank1]: Traceback (most recent call last):\n[rank1]: OSError: no disk"


@pytest.mark.parametrize(
    ("given", "headline"),
    [
        (report(), "12 of 12 cases pass: the trained loss is the configured loss"),
        (MIXED, "4 of 7 cases fail: the trained or the reported loss is not the configured loss"),
        (report([verdict()], layouts=LAYOUTS[:1]), "1 of 1 case passes: the trained loss is"),
        (report([verdict(), failed()]), "1 of 2 cases fails: the trained or the reported"),
        (report([verdict()] * 2, failure=BROKEN), "A rank failed: 2 cases measured, none of them"),
        (report([verdict(), failed()], failure=BROKEN), "1 of 2 cases fails: the trained or"),
        (report([], failure=BROKEN), "A rank failed: nothing was measured"),
        (with_checks("PASS", check(), NOT_RUN), "12 of 12 cases pass: the trained loss is"),
        (with_checks("FAIL", check(), WRONG, NOT_RUN), "1 of 3 checks of verl fails: its own code"),
        (with_checks("NOT RUN", NOT_RUN), "No check of verl ran: nothing is known"),
        (with_checks("FAIL", NOT_RUN, failure=BROKEN), "A rank failed: 12 cases measured"),
    ],
)
def test_the_result_is_at_the_top(given, headline):
    read = Reader(page(given))
    assert read.text.startswith(headline)  # the title
    assert f"lossagg verify {headline}" in read.text.replace(" :", ":")


@pytest.mark.parametrize(
    ("given", "state", "headline"),
    [
        ({}, "PASS", "1 of 1 case passes: the trained loss is"),
        ({"passed": False}, "FAIL", "1 of 1 case fails"),
        ({"failure": BROKEN}, "FAIL", "A rank failed: 1 case measured"),
        ({"ran_on": "0.15.0"}, "FAIL", "The ranks ran megatron-core 0.15.0, expected 0.16.1 as"),
        ({"ends": True}, "FAIL", "The run did not finish: nothing was measured"),
        ({"checks": [check(), NOT_RUN]}, "PASS", "1 of 1 case passes: the trained loss is"),
        ({"checks": [WRONG, NOT_RUN]}, "FAIL", "1 of 2 checks of verl fails"),
        ({"checks": [NOT_RUN]}, "NOT RUN", "No check of verl ran"),
        ({"checks": [NOT_RUN], "passed": False}, "FAIL", "1 of 1 case fails"),
        ({"checks": [NOT_RUN], "failure": BROKEN}, "FAIL", "A rank failed: 1 case"),
        ({"checks": [NOT_RUN], "ran_on": "0.15.0"}, "FAIL", "The ranks ran megatron-core 0.15.0"),
    ],
)
def test_text_json_and_page_have_one_result(capsys, given, state, headline):
    found = reported(**given)
    assert (found["state"], found["passed"]) == (state, state == "PASS")
    show(found)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{state}: ")
    assert found["failure"].replace("\n", "\n  ") in printed
    read = Reader(page(found))
    assert read.text.startswith(headline)
    assert " ".join(found["failure"].split()) in read.text


def reported(*, failure="", ran_on="0.16.1", passed=True, checks=(), ends=False):
    """Make a report as the command does, of a run of one case."""
    job = Job(layouts=[Parallelism()], cases=MASK_CASES[:1], loss_scalings=["average"])
    start = {"event": "start", "megatron": ran_on, "device": "cpu", "backend": "gloo", "hosts": "a"}
    verdicts = [verdict(passed=passed, layout=str(job.layouts[0]))]
    layout = {"event": "layout", "layout": str(job.layouts[0]), "verdicts": verdicts, "groups": {}}
    versions = {"megatron-core": "0.16.1", "torch": "2.13.0"}
    facts = [Fact(name=name, state="found", version=of) for name, of in versions.items()]
    framework = framework_of(*checks) if checks else None
    events = [start] if ends else [start, layout, {"event": "end"}]
    return _report(job, events, facts, framework, failure=failure, seconds=1.0)


def test_the_table_follows_the_result_and_the_causes_follow_the_table():
    text = page(MIXED)
    order = ["<h1>", "<h2>Cases<", "Why</h2>", "<h2>Gradient", "<h2>Run<", "<h2>How to read it<"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_versions_and_layouts_are_listed_with_the_checkout_of_megatron():
    text = Reader(page(report())).text
    core = "0.16.1 /folder/of/megatron, commit 0123456789ab, modified"
    for words in ("0.1.0", "2.13.0", "CPU and gloo", "missing optional", core, *LAYOUTS):
        assert words in text
    assert "lossagg verify --html page.html" in text


def test_a_failed_case_has_its_explanation_and_a_passing_one_none():
    for line, given in zip(Reader(page(MIXED)).lines, MIXED["verdicts"], strict=True):
        assert line[8:] == ["PASS"] if given["passed"] else ["FAIL", given["explanation"]]


def test_causes_are_listed_once_with_a_link_to_their_first_case():
    read = Reader(page(MIXED))
    links = [attrs["href"] for tag, attrs in read.tags if tag == "a"]
    targets = {attrs["id"] for _, attrs in read.tags if "id" in attrs}
    assert {"#why", "#case-2", "#case-5"} <= set(links)
    assert {link.removeprefix("#") for link in links} <= targets
    assert read.text.count("over_m") == 1
    assert "no known cause" in read.text


def test_a_layout_without_cases_is_listed():
    text = Reader(page(report([verdict()], failure=BROKEN))).text
    assert f"The run ended before the cases of {LAYOUTS[1]}" in text
    assert f"{LAYOUTS[1]} not measured" in text


def test_what_is_out_of_tolerance_is_marked():
    over = [
        verdict(weight_sum_error=2 * WEIGHT_SUM_TOLERANCE, passed=False),
        failed(loss_error=math.nan),
    ]
    assert page(report()).count('class="over"') == 0
    assert page(report(over)).count('class="over"') == 3


def test_every_error_is_drawn_and_one_that_is_not_finite_at_the_right():
    text = page(report([verdict(), failed(), verdict(gradient_error=0.0)], layouts=LAYOUTS[:1]))
    (bar,) = (float(x) for x in re.findall(r'class="bar" x1="([\d.]+)', text))
    right, zero = (float(x) for x in re.findall(r'class="pass" cx="([\d.]+)', text))
    (wrong,) = (float(x) for x in re.findall(r'<svg x="([\d.]+)', text))
    assert zero < right < bar < wrong
    assert re.findall(r'<svg x="([\d.]+)', page(MIXED))[1:] == ["98.0"] * 3
    assert "nan" not in page(MIXED).lower()
    assert "inf" not in re.sub("infinities", "", page(MIXED))


def test_text_is_escaped():
    evil = "<script>alert('&\"')</script>"
    fact = {"name": evil, "state": evil, "version": evil, "detail": evil}
    place = {"path": evil, "commit": evil}
    words = dict.fromkeys(("layout", "case", "formula", "loss_scaling", "k", "explanation"), evil)
    given = report(
        [failed(**words, causes=[evil])],
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
    assert not Reader(text).loading()
    assert not [word for word in ("://", "url(", "@import") if word in text]
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    assert f'<header class="{"pass" if given["passed"] else "fail"}">' in text


def test_a_name_that_a_template_lacks_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="is undefined"):
        html.page("verify.html")


def test_jinja2_that_is_missing_is_named_with_the_extra_of_a_report(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=r"needs jinja2.*megatron-lossagg\[report\]"):
        page(report())


def test_a_check_of_a_framework_has_a_line_and_one_that_did_not_run_counts_as_neither():
    reader = Reader(page(with_checks("FAIL", check(), NOT_RUN, WRONG)))
    assert "verl: 1 of 3 checks of its own code pass, 1 fails, 1 not run." in reader.text
    *_, ran, absent, wrong = reader.lines
    assert ran == ["verl:token-mean", "core_algos.agg_loss", "0", "1.5e-16", "PASS"]
    assert absent == ["absent", "core_algos.agg_loss", "NOT RUN", NOT_RUN["explanation"]]
    assert wrong[2:] == ["0", "not finite", "FAIL", WRONG["explanation"]]
