"""Reports against a golden file: the same passes, a real wrong factor fails with its cause.

The reports are of ``lossagg verify`` on four ranks, of this package and of a copy with a fault of
``tests/wrong_factors``. ``launch/ci/golden.py`` runs as its own process, as in a workflow.
"""

import json
import os
import shlex
import subprocess
import sys

import pytest
from conftest import TESTS, early
from launching import report_of

pytestmark = pytest.mark.launches

ROOT = TESTS.parent
SCRIPT = ROOT / "launch" / "ci" / "golden.py"
GOLDEN = ROOT / "launch" / "ci" / "golden" / "4_ranks.json"
NUM_CASES = len(json.loads(GOLDEN.read_text())["cases"])
FAULT = "over_m"
FACTS = {"device": "cpu", "backend": "gloo", "hosts": "1"}
ALLOW = [word for name, value in FACTS.items() for word in ("--allow", f"{name}={value}")]
"""What a report of this machine may have, other than the golden file's."""


def golden_command(*arguments, summary=None):
    """Run golden.py; returns its status and what it printed, and appends to ``summary``."""
    environment = {k: v for k, v in os.environ.items() if k != "GITHUB_STEP_SUMMARY"}
    if summary is not None:
        environment["GITHUB_STEP_SUMMARY"] = str(summary)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def golden_report(fault):
    golden = json.loads(GOLDEN.read_text())
    return report_of(fault, *golden["options"], processes=golden["num_ranks"])


@early
def right_report():
    return golden_report(None)


@early
def wrong_report():
    return golden_report(FAULT)


@pytest.fixture
def report(right_report):
    """Return the report of this package, for a test to change."""
    return json.loads(right_report.read_text())


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a report and returns its file."""

    def write(report, name="report.json"):
        (tmp_path / name).write_text(json.dumps(report))
        return tmp_path / name

    return write


def test_the_report_of_this_package_is_as_in_the_golden_file(right_report, tmp_path):
    summary = tmp_path / "summary.md"
    status, printed = golden_command("compare", GOLDEN, right_report, *ALLOW, summary=summary)
    assert status == 0, printed
    assert (
        f"## PASS: {NUM_CASES} of {NUM_CASES} cases as in the golden file, on 4 ranks; as allowed, "
        "device cpu, not cuda; backend gloo, not nccl; hosts 1, not 2\n"
    ) in printed
    assert "| DP 2 x CP 2, M 3, distributed optimizer | DP x CP | 1 | 4 | 0 |" in printed
    assert summary.read_text() == printed


def test_a_run_on_another_device_or_on_fewer_hosts_differs_unless_it_is_allowed(right_report):
    """A node whose driver is broken, or a job of one node, is no proof of what it is to prove."""
    status, printed = golden_command("compare", GOLDEN, right_report)
    assert status == 1
    assert "| the run | device | cuda | cpu |" in printed
    assert "| the run | backend | nccl | gloo |" in printed
    assert "| the run | hosts | 2 | 1 |" in printed
    status, printed = golden_command("compare", GOLDEN, right_report, *ALLOW[:4])
    assert status == 1
    assert "| the run | hosts | 2 | 1 |" in printed
    assert "| the run | device" not in printed


def test_what_is_allowed_has_to_come_out(right_report):
    status, printed = golden_command("compare", GOLDEN, right_report, *ALLOW, "--allow", "hosts=3")
    assert status == 1
    assert "| the run | hosts | 3 | 1 |" in printed
    status, printed = golden_command("compare", GOLDEN, right_report, "--allow", "ranks=3")
    assert status == 2
    assert "got ranks=3, expected device=, backend= or hosts= with a value" in printed


def test_on_the_golden_number_of_hosts_other_groups_over_them_differ(report, written):
    """Ranks 0 and 2 on one host and 1 and 3 on the other: CP groups cross, DP groups do not."""
    report["hosts"] = ["host0", "host1"]
    (groups,) = report["groups"].values()
    groups["DP x CP"]["over_hosts"], groups["CP"]["over_hosts"] = 1, 2
    status, printed = golden_command("compare", GOLDEN, written(report), *ALLOW[:4])
    assert status == 1
    assert "| the run | groups | " in printed
    groups["DP"]["over_hosts"], groups["CP"]["over_hosts"] = 2, 0
    status, printed = golden_command("compare", GOLDEN, written(report), *ALLOW[:4])
    assert status == 0, printed


def test_a_report_that_does_not_say_where_it_ran_differs(report, written):
    for name in (*FACTS, "groups"):
        del report[name]
    status, printed = golden_command("compare", GOLDEN, written(report), *ALLOW)
    assert status == 1
    assert "| the run | device | cpu | None |" in printed


def test_as_a_control_a_run_has_to_fail_with_its_fault_alone(right_report, wrong_report):
    status, printed = golden_command("compare", GOLDEN, wrong_report, *ALLOW, "--fault", FAULT)
    assert status == 0, printed
    assert f"PASS: the fault {FAULT} is noticed in " in printed
    status, printed = golden_command("compare", GOLDEN, wrong_report, *ALLOW, "--fault", "times_cp")
    assert status == 1
    assert "FAIL: the fault times_cp is noticed in " in printed
    status, printed = golden_command("compare", GOLDEN, right_report, *ALLOW, "--fault", FAULT)
    assert status == 1
    assert f"FAIL: the fault {FAULT} is not noticed in any of {NUM_CASES} cases" in printed
    status, printed = golden_command("compare", GOLDEN, wrong_report, "--fault", FAULT)
    assert status == 1
    assert "not in the run of the golden file" in printed


def test_writing_the_golden_file_again_changes_nothing(right_report, tmp_path):
    expect = ["--expect", "device=cuda", "--expect", "backend=nccl", "--expect", "hosts=2"]
    status, printed = golden_command("write", right_report, tmp_path / "again.json", *expect)
    assert status == 0, printed
    again, golden = (
        json.loads((tmp_path / "again.json").read_text()),
        json.loads(GOLDEN.read_text()),
    )
    for found in (again, golden):  # on one host no group spans two
        for kinds in found["groups"].values():
            for counted in kinds.values():
                del counted["over_hosts"]
    assert again == golden


@pytest.mark.parametrize("form", [["--json", "{}"], ["--json={}"]], ids=len)
def test_a_golden_file_names_no_file_of_the_machine(report, written, form, tmp_path):
    named = [word.format(tmp_path / "report.json") for word in form]
    report["command"] = shlex.join(["lossagg", "verify", *named, "--cp", "2"])
    status, printed = golden_command("write", written(report), tmp_path / "golden.json")
    assert status == 0, printed
    assert json.loads((tmp_path / "golden.json").read_text())["options"] == ["--cp", "2"]


def test_a_wrong_factor_fails_with_its_cause_in_the_summary(wrong_report, tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    status, printed = golden_command("compare", GOLDEN, wrong_report, *ALLOW, summary=summary)
    assert status == 1
    failing = [v for v in json.loads(wrong_report.read_text())["verdicts"] if v["causes"]]
    assert f"FAIL: {len(failing)} of {NUM_CASES} cases differ from the golden file" in printed
    assert FAULT in printed
    assert "measured factor" in printed
    assert failing[0]["explanation"] in printed
    assert summary.read_text() == "before\n" + printed


def test_a_report_that_did_not_pass_is_refused_as_a_golden_file(wrong_report, tmp_path):
    golden = tmp_path / "golden.json"
    status, printed = golden_command("write", wrong_report, golden)
    assert status == 2
    assert "did not pass" in printed
    assert not golden.exists()


def test_a_frameworks_check_that_no_longer_runs_differs_with_its_reason(report, written, tmp_path):
    check = {"check": "mine:token-mean", "state": "PASS", "explanation": ""}
    report["framework"] = {"name": "mine", "checks": [check]}
    before, golden = written(report, "before.json"), tmp_path / "golden.json"
    assert golden_command("write", before, golden)[0] == 0
    assert golden_command("compare", golden, before)[0] == 0
    check.update(state="NOT RUN", explanation="No module named 'ray'")
    status, printed = golden_command("compare", golden, written(report))
    assert status == 1
    assert "| mine:token-mean | PASS | NOT RUN |" in printed
    assert "No module named 'ray'" in printed


CHANGES = {
    "K": (lambda r: r["verdicts"][0].update(k=7), "| k | 12 | 7 |"),
    "formula": (lambda r: r["verdicts"][0].update(formula="2/N"), "| formula | 1/N | 2/N |"),
    "factor": (
        lambda r: r["verdicts"][0].update(measured_factor=1 + 1e-9),
        "| factor | 1 | 1.000000001 |",
    ),
    "no factor": (
        lambda r: r["verdicts"][0].update(measured_factor=None),
        "| factor | 1 | not finite |",
    ),
    "error beyond the golden tolerance": (
        lambda r: r["verdicts"][0].update(gradient_error=2e-12, tolerance=1),
        "| gradient_error | below 1e-12 | 2e-12 |",
    ),
    "weight sum": (
        lambda r: r["verdicts"][0].update(weight_sum_error=1e-5),
        "| weight_sum_error | below 1e-06 | 1e-05 |",
    ),
    "a case is missing": (lambda r: r["verdicts"].pop(), "| case | measured | missing |"),
    "a case more": (
        lambda r: r["verdicts"].append({**r["verdicts"][0], "case": "another"}),
        "another; average | case | none | measured |",
    ),
    "ranks": (lambda r: r.update(num_ranks=8), "| the run | num_ranks | 4 | 8 |"),
    "the run": (lambda r: r.update(passed=False), "| the run | passed | True | False |"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_depend_on_the_machine_must_be_equal(report, written, name):
    change, expected = CHANGES[name]
    change(report)
    status, printed = golden_command("compare", GOLDEN, written(report), *ALLOW)
    assert status == 1
    assert expected in printed


def test_the_cases_the_run_and_what_is_not_in_the_golden_file_are_counted_apart(report, written):
    for verdict in report["verdicts"]:
        verdict.update(k=7)
    report["verdicts"].append({**report["verdicts"][0], "case": "another"})
    report.update(num_ranks=8, passed=False)
    _, printed = golden_command("compare", GOLDEN, written(report), *ALLOW)
    assert (
        f"## FAIL: {NUM_CASES} of {NUM_CASES} cases differ from the golden file; 1 more measured; "
        "the run differs\n"
    ) in printed


def test_errors_below_their_bound_times_and_versions_may_differ(report, written):
    for verdict in report["verdicts"]:
        verdict.update(gradient_error=9e-13, loss_error=9e-13, measured_factor=1 - 9e-13)
    report["environment"][1]["version"] = "9.9"
    report.update(seconds=1e6, started="another day")
    status, printed = golden_command("compare", GOLDEN, written(report), *ALLOW)
    assert status == 0, printed
    assert "9.9" in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "report.json was not written: "), ('{"passed": tr', "report.json is incomplete: ")],
)
def test_a_run_without_a_whole_report_fails_and_quotes_the_end_of_its_log(text, message, tmp_path):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    log = tmp_path / "log.txt"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    arguments = ("compare", GOLDEN, tmp_path / "report.json", "--log", log)
    status, printed = golden_command(*arguments)
    assert status == 1
    assert message in printed
    assert "line 99" in printed
    assert "line 9\n" not in printed


def test_a_file_that_is_no_json_is_wrong_usage(tmp_path):
    (tmp_path / "golden.json").write_text("{")
    status, printed = golden_command("options", tmp_path / "golden.json")
    assert status == 2
    assert "expected a JSON file" in printed


@pytest.mark.parametrize("file", sorted(GOLDEN.parent.glob("*.json")), ids=lambda file: file.stem)
def test_a_golden_file_names_its_ranks_and_its_options(file):
    status, printed = golden_command("options", file)
    ranks, *options = printed.splitlines()
    assert status == 0
    assert int(ranks) == int(file.stem.partition("_")[0])
    assert options[0].startswith("--")
    golden = json.loads(file.read_text())
    assert options == golden["options"]
    assert all(case["passed"] and case["factor"] == 1 for case in golden["cases"])
