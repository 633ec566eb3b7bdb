"""Prove that the unmodified Megatron-Core trains the configured loss.

A small model and uneven sequences with every degenerate case go through
Megatron's own schedules, DistributedDataParallel and finalize_model_grads;
every parameter's gradient and the reported loss are compared with a float64
reference on one process. Without options: a standard set of layouts on 4 CPU
processes of this machine; with --gpu on its GPUs and NCCL, several ranks on one if
there are fewer. Under torchrun: the launcher's ranks, with CUDA and NCCL if
available. With --framework, a framework's own step is compared with the
reference first; if it cannot run, no case does. With --loss-func,
only a loss function of one's own is checked, against itself on one process.
Exit status: 0 if all cases pass and no check of a framework failed, 1 if one
failed, 2 for wrong usage and if no check of a framework could run; which of
several could not is named and changes no status.
Progress goes to standard error, the result to standard output.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import megatron_lossagg
from megatron_lossagg.cli import arguments, files, verify_loss
from megatron_lossagg.cli.verify_report import Report, markdown, show
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.errors import ProofError, say
from megatron_lossagg.loop.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.verify.cases import CASES, Case
from megatron_lossagg.verify.drivers.runs import (
    FAIL,
    NOT_RUN,
    PASS,
    TIMEOUT,
    counted,
    layout_of,
    none_ran,
    run_framework,
)
from megatron_lossagg.verify.drivers.table import FRAMEWORKS, check_installed
from megatron_lossagg.verify.environment import Fact, environment, megatron_core, num_gpus
from megatron_lossagg.verify.job import (
    Event,
    Job,
    RanksTimedOut,
    ended_by_signal,
    failure_of,
    first_failure,
    launched,
)
from megatron_lossagg.verify.parallelism import Parallelism, standard
from megatron_lossagg.verify.text import number_of
from megatron_lossagg.weigh.report import finite

_TIMEOUT = 900.0
_OF_A_RUN = ("loss_aggregation_record", "loss_aggregation_shadow")
_STATUS = {PASS: 0, FAIL: 1, NOT_RUN: 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lossagg verify``; with no layout option, the standard set is run."""
    layout = parser.add_argument_group("layout", "one layout instead of the standard set")
    for option in fields(Parallelism):
        kind: dict[str, Any] = {"type": int, "metavar": "N"}
        if option.default is False:
            kind = {"action": "store_true", "default": None}
        elif "choices" in option.metadata:
            kind = {"choices": option.metadata["choices"]}
        flag = "--" + option.name.replace("_", "-")
        layout.add_argument(flag, help=option.metadata["help"], **kind)
    add_loss_aggregation_args(parser)
    for action in parser._actions:
        if action.dest in _OF_A_RUN:  # refused with a reason, and not offered
            action.help = argparse.SUPPRESS
    verify_loss.add_arguments(parser)
    run = parser.add_argument_group("run")
    hooked = ", ".join(name for name, framework in FRAMEWORKS.items() if framework.is_hooked)
    run.add_argument(
        "--framework",
        choices=sorted(FRAMEWORKS),
        help="first run this framework's own step, as installed here, on the CPU under each mode "
        f"(at --dp and --cp); then the cases, as with --hooked for {hooked}",
    )
    run.add_argument(
        "--loss-scaling", choices=LOSS_SCALINGS, help="verify one of Megatron's two loss scalings"
    )
    run.add_argument(
        "--gpu",
        action="store_true",
        help="start the ranks on this machine's GPUs and NCCL instead of the CPU, several on one "
        "GPU if there are fewer GPUs than ranks",
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    run.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write a summary for CI, as GitHub shows it in a step's summary",
    )
    run.add_argument(
        "--timeout",
        type=arguments.seconds,
        metavar="SECONDS",
        help=f"end the ranks launched here after this time (default {_TIMEOUT:.0f}), and the "
        f"checks of --framework (default {TIMEOUT:.0f})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the verification; return the exit status. Raises :class:`ProofError` for wrong usage."""
    launcher = _launcher()
    arguments.import_from_here()  # as the processes that are started do
    if args.loss_func is not None:
        given = arguments.given(args, add_arguments)
        return verify_loss.run(args, given | ({"launcher": ""} if launcher else {}))
    if args.batch is not None:
        raise ProofError(
            "got --batch without --loss-func, which it is for: add it, or drop --batch"
        )
    if args.framework is not None:
        if launcher is not None:
            raise ProofError(
                "got --framework under a launcher, whose other ranks would wait for the checks: "
                f"run lossagg verify --framework {args.framework} without the launcher, and the "
                "layouts under it"
            )
        layout_of(args.dp or 2, args.cp or 1)
        check_installed(args.framework)
        args.hooked = FRAMEWORKS[args.framework].is_hooked or args.hooked
    job = _job(args, launcher)
    if launcher is not None and launcher.rank:
        # To its end: rank 0 waits there.
        verdicts = [verdict for event in job.run() for verdict in event.get("verdicts", ())]
        return int(not all(verdict["passed"] for verdict in verdicts))
    files.check_outputs({"--json": args.json, "--markdown": args.markdown})  # before the run
    begun = time.monotonic()
    framework = _framework_report(args)
    if framework is not None and none_ran(framework["checks"]):
        job = replace(job, layouts=())  # the cases would say nothing about the framework
    facts = environment()
    core = megatron_core(facts)
    if core.state != "found":
        print(*facts, sep="\n")
        raise ProofError(f"nothing to verify: megatron-core is missing: {core.detail}")
    events: list[Event] = []
    rest: Iterator[Event] = iter(())
    failure, is_killed = "", False

    def take(event: Event) -> None:
        events.append(event)
        if event["event"] == "begin":
            number = sum(event["event"] == "begin" for event in events)
            say(f"{event['layout']}: layout {number} of {len(job.layouts)} runs")
        elif event["event"] == "layout":
            passed = [verdict["passed"] for verdict in event["verdicts"]]
            cases = f"{sum(passed)} of {number_of(len(passed), 'case')} passed"
            say(f"{event['layout']}: {cases}, {time.monotonic() - begun:.0f} s")

    if launcher is None and job.layouts:
        gpus = min(num_gpus(), job.world_size) if args.gpu else 0
        failure, is_killed = _launched(job, take, timeout=args.timeout or _TIMEOUT, gpus=gpus)
    elif launcher is not None:
        rest = job.run()
        for event in rest:
            take(event)
            if event["event"] == "end":
                break
    seconds = time.monotonic() - begun
    report = _report(job, events, facts, framework, failure=failure, seconds=seconds)
    _write(args, report)
    if failure and not events and not is_killed:
        raise ProofError(
            "nothing was verified: no rank imported megatron-core and joined the others"
        )
    for _ in rest:  # the other ranks wait for the report
        pass
    return _STATUS[report["state"]]


def _report(
    job: Job,
    events: Sequence[Event],
    facts: Sequence[Fact],
    framework: dict[str, Any] | None,
    *,
    failure: str,
    seconds: float,
) -> Report:
    """Return the report, as JSON has it, of what rank 0 reported so far.

    ``failure``: why the ranks ended, if they ended with an error.
    """
    start = next((event for event in events if event["event"] == "start"), None)
    layouts = [event for event in events if event["event"] == "layout"]
    verdicts = [verdict for event in layouts for verdict in event["verdicts"]]
    cards = Counter(filter(None, start["cards"])) if start else Counter[str]()
    ran_on, found = start["megatron"] if start else None, megatron_core(facts).version
    if not failure and len(verdicts) != job.num_verdicts:
        failure = "The run did not finish"
    if not failure and job.layouts and ran_on != found:
        failure = f"The ranks ran megatron-core {ran_on}, expected {found} as found here"
    state = PASS
    if failure or not all(verdict["passed"] for verdict in verdicts):
        state = FAIL
    elif framework is not None and not framework["passed"]:
        state = NOT_RUN if none_ran(framework["checks"]) else FAIL
    started = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    report: Report = finite(
        {
            "tool": {"name": "megatron_lossagg", "version": megatron_lossagg.__version__},
            "started": started.isoformat(timespec="seconds"),
            "seconds": seconds,
            "command": shlex.join(["lossagg", *sys.argv[1:]]),
            "state": state,
            "passed": state == PASS,
            "failure": failure,
            "environment": [asdict(fact) for fact in facts],
            "layouts": [str(layout) for layout in job.layouts],
            "num_ranks": job.world_size if job.layouts else 0,
            "megatron_core": ran_on,
            "device": start["device"] if start else None,
            "backend": start["backend"] if start else None,
            "hosts": sorted({*start["hosts"]}) if start else [],
            "num_gpus": len(cards),
            "ranks_per_gpu": max(cards.values(), default=0),
            "groups": {event["layout"]: event["groups"] for event in layouts},
            "num_verdicts": job.num_verdicts,
            "verdicts": verdicts,
            "framework": framework,
        }
    )
    return report


def _write(args: argparse.Namespace, report: Report) -> None:
    """Print the report and write its files."""
    show(report)
    sys.stdout.flush()
    files.write_json(args.json, report)
    if args.markdown is not None:
        files.write_whole("--markdown", args.markdown, markdown(report))


def _framework_report(args: argparse.Namespace) -> dict[str, Any] | None:
    """Run the checks of ``--framework``, in a process of their own."""
    if args.framework is None:
        return None
    timeout = args.timeout or TIMEOUT
    say(f"{args.framework}: its own functions first, for at most {timeout:.0f} s")

    def report(outcome: dict[str, Any]) -> None:
        parts = [f"{outcome['state']} {outcome['check']}", outcome["explanation"]]
        say(f"{args.framework}: {': '.join(filter(None, parts))}")

    framework = run_framework(
        args.framework,
        aggregation_from_args(args),
        layout=layout_of(args.dp or 2, args.cp or 1),
        timeout=timeout,
        report=report,
    )
    then = "no cases either" if none_ran(framework["checks"]) else "now the cases on Megatron-Core"
    say(f"{args.framework}: {counted(framework['checks'])}; {then}")
    return framework


class _Launcher(NamedTuple):
    """This process as a rank of torchrun."""

    rank: int
    world_size: int


def _launcher() -> _Launcher | None:
    """Read this process's rank from torchrun's environment; None without a launcher."""
    ranks = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    if None in ranks:
        return None
    if not all(text and text.isdecimal() for text in ranks):
        raise ProofError(f"RANK and WORLD_SIZE: got {ranks}, expected integers from a launcher")
    return _Launcher(*(int(text or 0) for text in ranks))


def _job(args: argparse.Namespace, launcher: _Launcher | None) -> Job:
    if args.average_in_collective and args.loss_scaling == "per_token":
        raise ProofError(
            "Megatron-Core refuses average_in_collective in the per-token loss scaling: drop one"
        )
    if args.timeout is not None and launcher is not None:
        raise ProofError("--timeout is for ranks launched here; a launcher has its own: drop it")
    if args.gpu and not num_gpus():
        raise ProofError(
            "got --gpu, and torch sees no CUDA device here: drop it to verify on the CPU, or "
            "repair the driver or torch's build"
        )
    return Job(
        layouts=_layouts(args, launcher),
        cases=_cases(args),
        loss_scalings=[args.loss_scaling] if args.loss_scaling else LOSS_SCALINGS,
    )


def _cases(args: argparse.Namespace) -> Sequence[Case]:
    options = Options.from_args(args)
    if options.record is not None or options.shadow:
        raise ProofError(
            "got --loss-aggregation-record or --loss-aggregation-shadow, expected options of a "
            "verification, which trains no run: drop it"
        )
    aggregation = aggregation_from_args(args)
    if aggregation is None:  # a framework has one loss
        return [case for case in CASES if case.second is None] if args.hooked else CASES
    if aggregation.mode == CUSTOM and args.framework is not None:
        raise ProofError(
            f"got {aggregation.reducer_path} with --framework {args.framework}, whose functions "
            "are compared with a mode's formula: drop --framework"
        )
    return [Case(aggregation=aggregation)]


def _layouts(args: argparse.Namespace, launcher: _Launcher | None) -> list[Parallelism]:
    names = [field.name for field in fields(Parallelism)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if launcher is not None:
        rest = math.prod(max(given.get(name, 1), 1) for name in ("tp", "pp", "cp"))
        if "dp" not in given and launcher.world_size % rest:
            raise ProofError(
                f"got {number_of(launcher.world_size, 'rank')} from the launcher, expected a "
                f"multiple of tp * pp * cp = {rest}"
            )
        given.setdefault("dp", launcher.world_size // rest)
    elif not given.keys() & {"dp", "tp", "pp", "vpp", "cp", "ep"}:
        if not given.keys() <= {"moe", "hooked"}:
            raise ProofError(
                f"{', '.join(sorted(given))} without a size: add --dp, --tp, --pp or --cp, or drop "
                "it for the standard set"
            )
        return [
            replace(layout, hooked=bool(args.hooked)) for layout in standard(moe=bool(args.moe))
        ]
    if given.get("vpp", 1) > 1:  # an interleaved pipeline needs a multiple of pp
        given.setdefault("microbatches", 2 * given.get("pp", 1))
    return [Parallelism(**given)]


def _launched(
    job: Job, take: Callable[[Event], None], *, timeout: float, gpus: int
) -> tuple[str, bool]:
    """Launch the job's ranks; return why they ended if one failed, and if a signal ended one."""
    try:
        done = launched(job, take, processes=job.world_size, timeout=timeout, gpus=gpus)
    except RanksTimedOut as expired:
        what = "\n".join([f"The run did not finish in {timeout:g} s (--timeout)", *expired.last])
        return first_failure(what, str(expired.stderr)), False
    return failure_of(done), bool(ended_by_signal(done)[1])
