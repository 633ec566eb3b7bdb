"""What ``lossagg verify`` reports: one result, and Markdown that is complete, true and escaped."""

import math
import re
import sys

import pytest
from html_reader import Reader
from markdown_it import MarkdownIt

from megatron_lossagg.cli.verify import _report
from megatron_lossagg.cli.verify_report import markdown, show
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.verify.cases import CASES as VERIFIED
from megatron_lossagg.verify.cases import MASK_CASES
from megatron_lossagg.verify.environment import Fact
from megatron_lossagg.verify.job import Job
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.weigh.report import finite

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
        "weights_error": 2e-16,
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
        "command": "lossagg verify --markdown summary.md",
        "environment": [
            {"name": "torch", "state": "found", "version": "2.13.0", "detail": "CPU | gloo"},
            {"name": "transformer-engine", "state": "missing", "version": "", "detail": "optional"},
            {**core, "path": "/folder/of/megatron", "commit": "0123456789ab, modified"},
        ],
        "layouts": LAYOUTS,
        "num_ranks": 4,
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


def read(report):
    """Read what GitHub shows: CommonMark with tables, and HTML between its paragraphs."""
    return Reader(MarkdownIt("commonmark").enable("table").render(markdown(report)))


def test_every_verdict_has_a_line_with_its_numbers_which_do_not_wrap():
    numbers = ["12", "1.000000000", "1.2e\u201115", "0", "2.0e\u201116", "5.6e\u201108"]
    assert read(report()).lines[len(LAYOUTS) : -6] == [
        ["PASS", wanted["case"], wanted["loss_scaling"], *numbers]
        for wanted in report()["verdicts"]
    ]


def test_an_error_that_is_not_defined_is_a_dash_and_not_called_infinite():
    own = {"formula": MODES["custom"].formula, "weight_sum_error": None}
    hooked = verdict(weights_error=None)
    cases = [verdict(**own), failed(**own), failed(loss_error=None), hooked]
    ends = [line[-3:] for line in read(report(cases)).lines[len(LAYOUTS) : -6]]
    weights, sums = "2.0e\u201116", "5.6e\u201108"
    assert ends == [
        ["0", weights, "-"],
        ["0", weights, "-"],
        ["not finite", weights, sums],
        ["0", "-", sums],
    ]


def check(**changes):
    return {
        "check": "mine:token-mean",
        "function": "mine.losses.core_algos.agg_loss",
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
    return {"name": "mine", "seconds": 6.2, "passed": passed, "checks": list(checks)}


def with_checks(state, *checks, verdicts=None, **changes):
    framework = framework_of(*checks)
    return report(verdicts, framework=framework, state=state, passed=state == "PASS", **changes)


NOT_RUN = check(check="absent", state="NOT RUN", got=None, wanted=None, explanation="No module")
WRONG = check(state="FAIL", gradient_error=None, explanation="got a loss of 1, expected 2")


BROKEN = "A rank failed\n[rank1]: Traceback (most recent call last):\n[rank1]: OSError: no disk"


@pytest.mark.parametrize(
    ("given", "state", "result"),
    [
        ({}, "PASS", "1 of 1 case passes on 1 layout of 1 rank, megatron-core 0.16.1"),
        ({"passed": False}, "FAIL", "0 of 1 case passes on"),
        ({"failure": BROKEN}, "FAIL", "1 of 1 case passes on"),
        ({"ran_on": "0.15.0"}, "FAIL", "1 of 1 case passes on"),
        ({"ends": True}, "FAIL", "0 of 1 case passes on"),
        ({"checks": [check(), NOT_RUN]}, "PASS", "1 of 1 case passes on"),
        ({"checks": [WRONG, NOT_RUN]}, "FAIL", "1 of 1 case passes on"),
        (
            {"checks": [NOT_RUN]},
            "NOT RUN",
            "mine: 0 of 1 check of its own code passes, 1 not run",
        ),
        ({"checks": [NOT_RUN], "passed": False}, "FAIL", "0 of 1 case passes on"),
        ({"checks": [NOT_RUN], "failure": BROKEN}, "FAIL", "1 of 1 case passes on"),
        ({"checks": [NOT_RUN], "ran_on": "0.15.0"}, "FAIL", "1 of 1 case passes on"),
    ],
)
def test_text_json_and_markdown_begin_with_one_result(capsys, given, state, result):
    found = reported(**given)
    assert (found["state"], found["passed"]) == (state, state == "PASS")
    show(found)
    printed = capsys.readouterr().out
    text = read(found).text
    assert printed.startswith(f"{state}: {result}")
    assert text.startswith(f"lossagg verify: {state}. {result}")
    assert found["failure"].replace("\n", "\n  ") in printed
    assert " ".join(found["failure"].split()) in text
    for written in (printed, text):
        assert given.get("failure", "")[:13] in written.partition(LAYOUTS[0][:4])[0]
        assert ("mine: " in written) == ("checks" in given)


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ({"ran_on": "0.15.0"}, "The ranks ran megatron-core 0.15.0, expected 0.16.1 as found here"),
        ({"ends": True}, "The run did not finish"),
        ({"failure": BROKEN, "ends": True}, "A rank failed"),
    ],
)
def test_what_ended_a_run_early_is_a_part_of_the_result(capsys, given, failure):
    found = reported(**given)
    show(found)
    second = capsys.readouterr().out.splitlines()[1]
    assert second == failure
    assert failure in read(found).text.partition("layout cases that pass")[0]


def reported(*, failure="", ran_on="0.16.1", passed=True, checks=(), ends=False, cards=("",)):
    """Make a report as the command does, of a run of one case."""
    job = Job(layouts=[Parallelism()], cases=MASK_CASES[:1], loss_scalings=["average"])
    start = {"event": "start", "megatron": ran_on, "device": "cpu", "backend": "gloo", "hosts": "a"}
    start["cards"] = list(cards)
    verdicts = [verdict(passed=passed, layout=str(job.layouts[0]))]
    layout = {"event": "layout", "layout": str(job.layouts[0]), "verdicts": verdicts, "groups": {}}
    versions = {"megatron-core": "0.16.1", "torch": "2.13.0"}
    facts = [Fact(name=name, state="found", version=of) for name, of in versions.items()]
    framework = framework_of(*checks) if checks else None
    events = [start] if ends else [start, layout, {"event": "end"}]
    return _report(job, events, facts, framework, failure=failure, seconds=1.0)


@pytest.mark.parametrize(
    ("cards", "num_gpus", "ranks_per_gpu"),
    [([""] * 4, 0, 0), (list("abcd"), 4, 1), (list("aaaa"), 1, 4), (list("abca"), 3, 2)],
)
def test_how_many_ranks_shared_a_gpu_is_a_part_of_the_result(
    capsys, cards, num_gpus, ranks_per_gpu
):
    found = reported(cards=cards)
    assert (found["num_gpus"], found["ranks_per_gpu"]) == (num_gpus, ranks_per_gpu)
    show(found)
    wanted = f"1 rank, up to {ranks_per_gpu} on one GPU, megatron-core"
    for text in (capsys.readouterr().out, read(found).text):
        assert (wanted in text) == (ranks_per_gpu > 1)
        assert ("on one GPU" in text) == (ranks_per_gpu > 1)


def test_each_layout_has_a_line_and_one_without_cases_is_listed():
    *lines, _ = read(MIXED).lines[:3]
    assert lines == [
        ["FAIL", LAYOUTS[0], "1 of 4", "not finite"],
        ["FAIL", LAYOUTS[1], "2 of 3", "4.5e+30"],
    ]
    found = read(report([verdict()], failure=BROKEN))
    assert found.lines[:2] == [
        ["PASS", LAYOUTS[0], "1 of 1", "1.2e-15"],
        ["FAIL", LAYOUTS[1], "not measured"],
    ]
    assert f"not measured : {LAYOUTS[1]}" in found.text


def test_only_what_did_not_pass_is_unfolded():
    for given, is_open in [(report(), []), (MIXED, ["What did not pass, and why"])]:
        text = markdown(given)
        folds = [part.partition("</summary>")[0] for part in text.split("<summary>")[1:]]
        assert folds == [
            *is_open,
            *(f"{name}: {read(given).lines[n][2]} cases pass" for n, name in enumerate(LAYOUTS)),
            "Run and environment",
        ]
        assert text.count("<details open>") == len(is_open)
        assert text.count("<details") == len(folds)


def test_each_explanation_is_listed_once_with_its_first_case_and_a_passing_case_has_none():
    text = read(MIXED).text
    explanation = MIXED["verdicts"][1]["explanation"]
    assert text.count(explanation) == 1
    assert f"FAIL {LAYOUTS[0]}; {CASES[0]}; average and 3 more: {explanation}" in text
    assert "did not pass" not in read(report()).text


def test_the_text_has_each_failed_case_with_its_reason_and_ends_with_the_result(capsys):
    show(MIXED)
    out = capsys.readouterr().out
    for verdict in MIXED["verdicts"]:
        lines = f"FAIL {verdict['layout']}; {CASES[0]}; average\n     {verdict['explanation']}\n"
        assert (lines in out) != verdict["passed"]
    assert out.count("\n     gradient: measured factor") == 4
    first = out.splitlines()[0]
    assert first.startswith("FAIL: 3 of 7 cases pass on 2 layouts of 4 ranks")
    assert out.splitlines()[-1] == first


def test_versions_and_the_command_are_listed_with_the_checkout_of_megatron():
    text = read(report()).text
    core = "0.16.1 /folder/of/megatron, commit 0123456789ab, modified"
    for words in ("0.1.0", "2.13.0", "CPU | gloo", "missing optional", core, *LAYOUTS):
        assert words in text
    assert "lossagg verify --markdown summary.md" in text
    assert "2026-01-02T03:04:05+00:00 took 41 s" in text


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert('&\"')</script> <!-- </details>",
        "| a | `code` *strong* __init__ ~~gone~~ $x$ # one \\",
        "[link](https://example.com) ![image](https://example.com/a.png) <https://example.com>",
    ],
)
def test_text_is_shown_as_it_is_and_loads_nothing(evil):
    fact = {"name": evil, "state": evil, "version": evil, "detail": evil}
    place = {"path": evil, "commit": evil, "state": "found"}
    core = {"name": "megatron-core", "state": "found", "version": evil}
    torch = {"name": "torch", "state": "found", "version": evil}
    words = dict.fromkeys(("layout", "case", "formula", "loss_scaling", "k", "explanation"), evil)
    checked = framework_of(
        check(check=evil, function=evil.replace(".", ""), state="NOT RUN", explanation=evil)
    )
    given = report(
        [failed(**words, causes=[evil])],
        layouts=[evil, f"{evil} without cases"],
        failure=f"{evil}\n\n{evil}</pre>",
        command=evil,
        started=evil,
        framework={**checked, "name": evil},
        environment=[core, torch, fact, {**fact, **place}],
        tool={"name": evil, "version": evil},
    )
    found = read(given)
    assert found.text.count(evil) >= 28
    assert not found.loading()
    shapes, harmless = ({(tag, *attrs) for tag, attrs in r.tags} for r in (found, read(MIXED)))
    assert shapes <= harmless | {("pre",)}


def test_a_check_of_a_framework_has_a_line_and_one_that_did_not_run_counts_as_neither():
    found = read(with_checks("FAIL", check(), NOT_RUN, WRONG))
    assert "mine: 1 of 3 checks of its own code pass, 1 fails, 1 not run" in found.text
    ran, absent, wrong = found.lines[-9:-6]
    assert ran == ["PASS", "mine:token-mean", "core_algos.agg_loss", "0", "1.5e-16"]
    assert absent == ["NOT RUN", "absent", "core_algos.agg_loss"]
    assert wrong == ["FAIL", "mine:token-mean", "core_algos.agg_loss", "0", "not finite"]
    assert f"NOT RUN mine; absent: {NOT_RUN['explanation']}" in found.text
    assert f"FAIL mine; mine:token-mean: {WRONG['explanation']}" in found.text


def test_a_check_that_did_not_run_is_explained_in_a_report_that_passes():
    text = markdown(with_checks("PASS", check(), NOT_RUN))
    assert text.startswith("**lossagg verify: PASS.** 12 of 12 cases pass on 2 layouts of 4 ranks")
    assert f"- **NOT RUN** mine; absent: {NOT_RUN['explanation']}" in text


@pytest.mark.parametrize("columns", [40, 80, 119, 120, 150, 300])
def test_in_a_terminal_of_any_width_no_word_is_cut(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    own = verdict(case="package.losses.reducers:focal", formula="known to the reducer", k=12345)
    verdicts = [verdict(case=str(case), formula=case.formula) for case in VERIFIED]
    long = check(check="mine:seq-mean-token-sum-norm")
    show(with_checks("PASS", long, verdicts=[*verdicts, own]))
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = [line.split() for line in out.splitlines()]
    words = [word for line in lines for word in line]
    for each in (*verdicts, own):
        names = [*each["case"].split(), *each["formula"].split()]
        assert {*names, "12345", "core_algos.agg_loss", "mine:seq-mean-token-sum-norm"} <= {*words}
    errors = ["1.2e-15", "PASS"] if columns < 120 else ["1.2e-15", "0", "2.0e-16", "PASS"]
    row = [LOSS_SCALINGS[0], "12", "1.000000000", *errors]
    assert len([line for line in lines if line[-len(row) :] == row]) == len(VERIFIED)


def test_the_table_of_every_mode_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(report([verdict(case=str(case), formula=case.formula) for case in VERIFIED]))
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    _, _, table = out.partition(LAYOUTS[0])
    assert max(map(len, table.partition("\n\n")[0].splitlines())) <= 80
