"""Compare a report of ``lossagg verify --json`` with a golden one.

    python launch/ci/golden.py write REPORT GOLDEN [--expect NAME=VALUE ...]
    python launch/ci/golden.py options GOLDEN        # the number of ranks, then one option per line
    python launch/ci/golden.py compare GOLDEN REPORT [--allow NAME=VALUE ...] [--fault NAME]
                                                     [--status N] [--log FILE]

A golden file has the options, the number of ranks, the device, the backend, the number of distinct
hosts, the groups with how many of them span several hosts, and for each layout, case and loss
scaling
the weight's formula, K, the gradient's factor and that it passes. What a machine may change in its
last digits, the errors, has a bound. Versions are shown and not compared. ``write`` refuses a
report that did not pass; ``--expect`` writes another device, backend or number of hosts than the
report's, which the machines of the golden file have to show.

``compare`` fails where the run had another device, backend or number of hosts: ``--allow`` names
each that may differ, and the value that it then has to have. With ``--fault`` the report is of a
package with that fault of ``tests/wrong_factors`` in it: it has to fail with only that cause.
Without it, a run whose exit status is not 0 (``--status``) fails too.

``compare`` prints a summary in Markdown, and appends it to the file that ``GITHUB_STEP_SUMMARY``
names, if it names one. Exit status: 0 as it should be, 1 not or no report, 2 wrong usage. It needs
Python and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]

EXACT = ("formula", "k", "passed")
ERRORS = ("gradient_error", "loss_error", "weight_sum_error")
WEIGHT_SUM_TOLERANCE = 1e-6
"""The weight sum is reported in float32."""
FACTOR_TOLERANCES, FACTOR_TOLERANCE = 100, 0.1
"""A factor is a projection over all parameters: as many tolerances may it be off, and never more
than this."""
OUTPUTS = ("--json", "--markdown")
FACTS = ("device", "backend", "hosts")
"""What the run was on. ``hosts`` is the number of distinct ones."""
RUN = "the run"
"""Where what differs is of no one case."""
LOG_LINES, LOG_ERRORS = 30, 10
ERROR = re.compile(r"lossagg: |[Ee]rror: ")


class Difference(NamedTuple):
    """One line of the table."""

    where: str
    what: str
    golden: object
    got: object


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="make a golden file of a report that passed")
    write.add_argument("report", type=Path)
    write.add_argument("golden", type=Path)
    write.add_argument("--expect", type=fact, action="append", default=[], metavar="NAME=VALUE")
    options = commands.add_parser("options", help="print its ranks and the options of verify")
    options.add_argument("golden", type=Path)
    compare = commands.add_parser("compare", help="compare a report with a golden file")
    compare.add_argument("golden", type=Path)
    compare.add_argument("report", type=Path)
    compare.add_argument("--allow", type=fact, action="append", default=[], metavar="NAME=VALUE")
    compare.add_argument("--fault", help="fault of tests/wrong_factors that the run had in it")
    compare.add_argument("--status", type=int, default=0, help="exit status of the run")
    compare.add_argument("--log", type=Path, help="log to quote if the report is missing")
    args = parser.parse_args()
    if args.command == "write":
        return write_golden(read(args.report), args.golden, dict(args.expect))
    golden = read(args.golden)
    if args.command == "options":
        print(golden["num_ranks"], *golden["options"], sep="\n")
        return 0
    try:
        report: Json = json.loads(args.report.read_text())
    except FileNotFoundError:
        return finish(False, no_report("was not written", args.report, args.log))
    except json.JSONDecodeError:
        return finish(False, no_report("is incomplete", args.report, args.log))
    differences = list(compared(golden, report, dict(args.allow)))
    if args.fault is not None:
        return finish(*control(golden, report, differences, args.fault))
    if args.status:  # a rank may fail after it has reported
        differences.append(Difference(RUN, "exit status", 0, args.status))
    return finish(not differences, summary(golden, report, differences))


def fact(text: str) -> tuple[str, str | int]:
    """Read ``NAME=VALUE`` of one of the facts."""
    name, _, value = text.partition("=")
    if name not in FACTS or not value or (name == "hosts" and not value.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"got {text}, expected device=, backend= or hosts= with a value: correct it"
        )
    return name, int(value) if name == "hosts" else value


def read(path: Path) -> Json:
    """Read a JSON file; wrong usage where it is none."""
    try:
        found: Json = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        print(f"{path}: got {error}, expected a JSON file of this tool", file=sys.stderr)
        raise SystemExit(2) from None
    return found


def facts_of(report: Json) -> Json:
    """Return what a report was run on; None what it does not say."""
    hosts = report.get("hosts")
    return {
        "device": report.get("device"),
        "backend": report.get("backend"),
        "hosts": None if hosts is None else len(hosts),
    }


def write_golden(report: Json, path: Path, expected: Json) -> int:
    """Write what of a report has to come out again."""
    if not report["passed"]:
        print("the report did not pass: a golden file is of one that did", file=sys.stderr)
        return 2
    golden = {
        "options": options_of(report["command"]),
        "num_ranks": report["num_ranks"],
        **facts_of(report),
        **expected,
        "layouts": report["layouts"],
        "groups": report["groups"],
        "cases": [
            {
                **{name: verdict[name] for name in ("layout", "case", "loss_scaling", *EXACT)},
                "factor": round(
                    verdict["measured_factor"], 6 if verdict["tolerance"] < 1e-3 else 1
                ),
                "tolerance": verdict["tolerance"],
            }
            for verdict in report["verdicts"]
        ],
    }
    if states := framework_states(report):
        golden["framework"] = states
    path.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{path}: {len(golden['cases'])} cases, {shlex.join(golden['options'])}")
    return 0


def options_of(command: str) -> list[str]:
    """Return the options of ``lossagg verify``, without the files that it wrote."""
    words = shlex.split(command)
    words = words[words.index("verify") + 1 :]
    for name in OUTPUTS:
        while name in words:
            del words[words.index(name) : words.index(name) + 2]
    return [word for word in words if word.partition("=")[0] not in OUTPUTS]


def compared(golden: Json, report: Json, allowed: Json) -> Iterator[Difference]:
    """Find what differs."""
    for name in ("num_ranks", "layouts"):
        if golden[name] != report[name]:
            yield Difference(RUN, name, golden[name], report[name])
    for name, value in facts_of(report).items():
        if value != allowed.get(name, golden[name]):
            yield Difference(RUN, name, allowed.get(name, golden[name]), value)
    # On another number of hosts other groups span them.
    if golden["hosts"] == facts_of(report)["hosts"] and golden["groups"] != report["groups"]:
        yield Difference(RUN, "groups", golden["groups"], report["groups"])
    if not report["passed"]:
        yield Difference(RUN, "passed", True, report.get("failure") or False)
    wanted, got = golden.get("framework", {}), framework_states(report)
    for check in wanted | got:
        if wanted.get(check) != got.get(check):
            yield Difference(RUN, check, wanted.get(check, "none"), got.get(check, "missing"))
    found = {name_of(verdict): verdict for verdict in report["verdicts"]}
    for case in golden["cases"]:
        where = name_of(case)
        verdict = found.pop(where, None)
        if verdict is None:
            yield Difference(where, "case", "measured", "missing")
        else:
            yield from of_case(where, case, verdict)
    for where in found:
        yield Difference(where, "case", "none", "measured")


def framework_states(report: Json) -> dict[str, str]:
    """Return the state of each check of ``--framework``; empty without."""
    framework = report.get("framework")
    return {check["check"]: check["state"] for check in framework["checks"]} if framework else {}


def of_case(where: str, case: Json, verdict: Json) -> Iterator[Difference]:
    """Compare one case: what is exact, the factor, and the errors with their bounds."""
    for name in EXACT:
        if verdict[name] != case[name]:
            yield Difference(where, name, case[name], verdict[name])
    factor = verdict["measured_factor"]
    allowed = min(FACTOR_TOLERANCES * case["tolerance"], FACTOR_TOLERANCE)
    if factor is None or not abs(factor - case["factor"]) <= allowed:
        yield Difference(where, "factor", f"{case['factor']:g}", number(factor))
    for name in ERRORS:
        bound = WEIGHT_SUM_TOLERANCE if name == "weight_sum_error" else case["tolerance"]
        error = verdict[name]
        undefined = error is None and name != "gradient_error" and verdict["passed"]
        if not undefined and (error is None or not error < bound):
            yield Difference(where, name, f"below {bound:g}", number(error))


def name_of(case: Json) -> str:
    """Name a case of a golden file or a report."""
    return f"{case['layout']}; {case['case']}; {case['loss_scaling']}"


def number(value: float | None) -> str:
    """Write a measured number; None stands for one that is not finite."""
    return "not finite" if value is None else f"{value:.12g}"


def summary(golden: Json, report: Json, differences: list[Difference]) -> str:
    """Write the result, what differs, the causes, and where it was run."""
    cases = {name_of(case) for case in golden["cases"]}
    of = f"of {len(cases)} cases"
    if not differences:
        result = f"PASS: {len(cases)} {of} as in the golden file, on {report['num_ranks']} ranks"
        facts = facts_of(report).items()
        other = [
            f"{name} {value}, not {golden[name]}" for name, value in facts if value != golden[name]
        ]
        if other:
            result += f"; as allowed, {'; '.join(other)}"
    else:
        wrong = {difference.where for difference in differences}
        result = f"FAIL: {len(wrong & cases)} {of} differ from the golden file"
        if more := len(wrong - cases - {RUN}):
            result += f"; {more} more measured"
        if RUN in wrong:
            result += "; the run differs"
    return page(result, report, differences)


def control(
    golden: Json, report: Json, differences: list[Difference], fault: str
) -> tuple[bool, str]:
    """Judge a run with a fault in it: noticed where nothing but cases differ, and identified."""
    cases = {name_of(case) for case in golden["cases"]}
    of_run = [d for d in differences if d.where == RUN and d.what != "passed"]
    noticed = len(cases & {d.where for d in differences})
    causes = {tuple(verdict["causes"]) for verdict in report["verdicts"] if not verdict["passed"]}
    passed = bool(noticed) and not of_run and causes == {(fault,)}
    if not noticed:
        result = f"FAIL: the fault {fault} is not noticed in any of {len(cases)} cases"
    elif passed:
        result = f"PASS: the fault {fault} is noticed in {noticed} of {len(cases)} cases and named"
    else:
        result = f"FAIL: the fault {fault} is noticed in {noticed} of {len(cases)} cases, and not "
        result += "it alone" if not of_run else "in the run of the golden file"
    return passed, page(result, report, differences)


def page(result: str, report: Json, differences: list[Difference]) -> str:
    """Write the result, the causes, what differs, and what was run where."""
    lines = [f"## {result}", ""]
    if causes := causes_of(report):
        lines += ["**Cause**", "", *causes, ""]
    if differences:
        rows = [[cell(value) for value in difference] for difference in differences]
        lines += table(["case", "what", "golden", "got"], rows)
    facts = facts_of(report)
    lines += [
        f"On {facts['hosts']} hosts, device {facts['device']}, backend {facts['backend']}:",
        "",
    ]
    rows = [
        [layout, kind, cell(of["groups"]), cell(of["ranks"]), cell(of["over_hosts"])]
        for layout, kinds in report.get("groups", {}).items()
        for kind, of in kinds.items()
    ]
    lines += table(["layout", "groups of", "number", "ranks each", "over several hosts"], rows)
    environment = [
        [fact["name"], fact["version"] or fact["state"], fact["detail"]]
        for fact in report["environment"]
    ]
    rows = [[cell(value) for value in row] for row in environment]
    lines += table(["environment", "version", ""], rows)
    return "\n".join([*lines, f"`{report['command']}`, {report['started']}", ""])


def causes_of(report: Json) -> list[str]:
    """List each explanation of the cases that failed once, with the first case that has it."""
    first: dict[str, str] = {}
    for verdict in report["verdicts"]:
        if not verdict["passed"]:
            name = ", ".join(verdict["causes"]) or "no known cause"
            text = f"**{name}**: {verdict['explanation']}"
            first.setdefault(text, name_of(verdict))
    for check in (report.get("framework") or {"checks": ()})["checks"]:
        if check["explanation"]:
            first.setdefault(f"**{check['state']}**: {check['explanation']}", check["check"])
    return [f"- {text} ({where})" for text, where in first.items()]


def no_report(what: str, path: Path, log: Path | None) -> str:
    """Say that the run wrote no whole report; quote its log's first errors, and its end."""
    lines = [f"## FAIL: {path.name} {what}: the run did not reach its end", ""]
    if log is not None and log.exists():
        printed = log.read_text(errors="replace").splitlines()
        # A launcher ends with a page of its own, so the cause is rarely among the last lines.
        errors = dict.fromkeys(line for line in printed if ERROR.search(line))
        first = list(errors)[:LOG_ERRORS]
        lines += ["```", *first, "...", *printed[-LOG_LINES:], "```"]
    return "\n".join([*lines, ""])


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Write a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def cell(value: object) -> str:
    """Write a value so that it stays in its cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def finish(passed: bool, text: str) -> int:
    """Print a summary, hand it to GitHub where it asks for one; return the exit status."""
    print(text)
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(file).open("a") as target:
            target.write(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
