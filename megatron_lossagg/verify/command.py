"""Prove that the unmodified Megatron-Core trains the configured loss.

A small model and uneven sequences with every degenerate case go through
Megatron's own schedules, DistributedDataParallel and finalize_model_grads;
every parameter's gradient and the reported loss are compared with a float64
reference on one process. Without options: a standard set of layouts on 4 CPU
processes of this machine. Under torchrun: the launcher's ranks, with CUDA and
NCCL if available. With --framework, a framework's own functions are compared
with the reference first. Exit status: 0 if all cases pass and no check of a
framework failed, 1 if one failed, 2 for wrong usage and if no check of a
framework could run; which of several could not is named and changes no status.
Progress goes to standard error, the result to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import megatron_lossagg
from megatron_lossagg.aggregation import CUSTOM
from megatron_lossagg.cpu import launch
from megatron_lossagg.errors import ProofError
from megatron_lossagg.extras import needed
from megatron_lossagg.files import check_outputs, write_whole
from megatron_lossagg.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.scaling import LOSS_SCALINGS
from megatron_lossagg.text import number_of
from megatron_lossagg.verify import report as show
from megatron_lossagg.verify.cases import CASES, Case
from megatron_lossagg.verify.environment import Fact, environment
from megatron_lossagg.verify.frameworks import FRAMEWORKS, framework_folder
from megatron_lossagg.verify.frameworks.check import counted, none_ran
from megatron_lossagg.verify.frameworks.launch import TIMEOUT, run_framework
from megatron_lossagg.verify.job import Event, Job, run_job
from megatron_lossagg.verify.page import page
from megatron_lossagg.verify.parallelism import Parallelism, standard

__all__ = ["add_arguments", "run"]

_TIMEOUT = 900.0


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
    run = parser.add_argument_group("run")
    run.add_argument(
        "--framework",
        choices=sorted(FRAMEWORKS),
        help="first run the own functions of this framework, as installed here, on the CPU "
        "against the reference (megatron-lm: "
        "pretrain_gpt.py); megatron-lm and bridge are then verified as with --hooked",
    )
    run.add_argument(
        "--loss-scaling", choices=LOSS_SCALINGS, help="verify one of Megatron's two loss scalings"
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    run.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    run.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"end the ranks launched here after this time (default {_TIMEOUT:.0f}), and the "
        f"checks of --framework (default {TIMEOUT:.0f})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the verification; return the exit status. Raises :class:`ProofError` for wrong usage."""
    if args.framework is not None and _launchers_rank() is not None:
        raise ProofError(
            "got --framework under a launcher, whose other ranks would wait for the checks: run "
            f"lossagg verify --framework {args.framework} without the launcher, and the "
            f"layouts under it"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as for the processes started here, by python -m
    if args.framework is not None:
        framework_folder(args.framework)  # one that is not installed is wrong usage
        args.hooked = FRAMEWORKS[args.framework].is_hooked or args.hooked
    job = _job(args)
    rank = _launchers_rank()
    if rank not in (None, 0):
        return 0 if run_job(job, lambda event: None) else 1
    _check_files(args)
    begun = time.monotonic()
    framework = _framework_report(args)
    found = _Found(job, environment(), framework, begun=begun)
    if found.core.state != "found":
        print(*found.facts, sep="\n")
        raise ProofError(f"nothing to verify: megatron-core is missing: {found.core.detail}")
    with show.progress(job.num_verdicts) as advance:

        def take(event: Event) -> None:
            advance(event)
            found.take(event)
            if event["event"] == "end" and rank is not None:  # the other ranks wait for the report
                _finish(args, found)

        if rank is not None:
            run_job(job, take)
            return found.status
        failure = _launched(job, take, timeout=args.timeout or _TIMEOUT)
    _finish(args, found)
    if not failure:
        return found.status
    lines = [line for line in failure.splitlines() if "<frozen " not in line]
    of_ranks = [line for line in lines if line.startswith("[rank")]
    # The first rank's traceback has the reason.
    print("A rank failed:", *(of_ranks or lines)[:60], sep="\n  ")
    if not found.ran_on:
        raise ProofError(
            "nothing was verified: no rank could import megatron-core and join the others"
        )
    return 1


class _Found:
    """What the ranks reported, with what this machine has and what a framework's checks gave."""

    def __init__(
        self, job: Job, facts: list[Fact], framework: dict[str, Any] | None, *, begun: float
    ) -> None:
        self.facts = facts
        self.core = next(fact for fact in facts if fact.name == "megatron-core")
        self.ran_on = ""
        """The version of Megatron-Core that the ranks imported."""
        self._job, self._framework, self._begun = job, framework, begun
        self._verdicts: list[dict[str, Any]] = []
        self._world: dict[str, Any] = {"device": None, "backend": None, "hosts": [], "groups": {}}

    def take(self, event: Event) -> None:
        """Take an event of rank 0."""
        if event["event"] == "start":
            self.ran_on = event["megatron"]
            self._world.update(device=event["device"], backend=event["backend"])
            self._world["hosts"] = sorted({*event["hosts"]})
        elif event["event"] == "layout":
            self._verdicts.extend(event["verdicts"])
            self._world["groups"][event["layout"]] = event["groups"]

    @property
    def status(self) -> int:
        """The exit status: 0 if all passed, 2 if only the framework's checks did not run."""
        complete = len(self._verdicts) == self._job.num_verdicts
        complete = complete and self.ran_on == self.core.version
        if not (complete and all(verdict["passed"] for verdict in self._verdicts)):
            return 1
        if self._framework is None or self._framework["passed"]:
            return 0
        return 2 if none_ran(self._framework["checks"]) else 1

    def report(self) -> show.Report:
        """Return the report, as JSON has it."""
        seconds = time.monotonic() - self._begun
        started = datetime.now(timezone.utc) - timedelta(seconds=seconds)
        report: show.Report = show.finite(
            {
                "tool": {"name": "megatron_lossagg", "version": megatron_lossagg.__version__},
                "started": started.isoformat(timespec="seconds"),
                "seconds": seconds,
                "command": shlex.join(["lossagg", *sys.argv[1:]]),
                "environment": [asdict(fact) for fact in self.facts],
                "layouts": [str(layout) for layout in self._job.layouts],
                "num_ranks": self._job.world_size,
                **self._world,
                "num_verdicts": self._job.num_verdicts,
                "verdicts": self._verdicts,
                "framework": self._framework,
                "passed": self.status == 0,
            }
        )
        return report


def _finish(args: argparse.Namespace, found: _Found) -> None:
    """Print the report and write its files."""
    report = found.report()
    show.show(report)
    if found.ran_on != found.core.version:
        print(
            f"The ranks ran megatron-core {found.ran_on or 'none'}, expected "
            f"{found.core.version} as found here"
        )
    sys.stdout.flush()
    if args.json is not None:
        write_whole("--json", args.json, json.dumps(report, indent=1, allow_nan=False) + "\n")
    if args.html is not None:
        write_whole("--html", args.html, page(report))


def _framework_report(args: argparse.Namespace) -> dict[str, Any] | None:
    """Run the checks of ``--framework``, in a process of their own."""
    if args.framework is None:
        return None
    timeout = args.timeout or TIMEOUT
    show.say(f"{args.framework}: its own functions first, for at most {timeout:.0f} s")

    def say(outcome: dict[str, Any]) -> None:
        parts = [f"{outcome['state']} {outcome['check']}", outcome["explanation"]]
        show.say(f"{args.framework}: {': '.join(filter(None, parts))}")

    framework = run_framework(
        args.framework, aggregation_from_args(args), timeout=timeout, report=say
    )
    show.say(f"{args.framework}: {counted(framework['checks'])}; now the cases on Megatron-Core")
    return framework


def _launchers_rank() -> int | None:
    """Return this process's rank under torchrun, None without a launcher."""
    ranks = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    if None in ranks:
        return None
    if not all(text and text.isdecimal() for text in ranks):
        raise ProofError(f"RANK and WORLD_SIZE: got {ranks}, expected integers from a launcher")
    return int(ranks[0] or 0)


def _job(args: argparse.Namespace) -> Job:
    per_token = args.loss_scaling == "per_token"
    if args.average_in_collective and per_token:
        raise ProofError(
            "Megatron-Core refuses average_in_collective in the per-token loss scaling: drop one"
        )
    if args.timeout is not None and _launchers_rank() is not None:
        raise ProofError("--timeout is for ranks launched here; a launcher has its own: drop it")
    loss_scalings = [args.loss_scaling] if args.loss_scaling else LOSS_SCALINGS
    return Job(layouts=_layouts(args), cases=_cases(args), loss_scalings=loss_scalings)


def _check_files(args: argparse.Namespace) -> None:
    """Refuse, before the run, a file that could not be written after it."""
    check_outputs({"--json": args.json, "--html": args.html})
    if args.html is not None:
        needed("jinja2", by="--html", extra="report")


def _cases(args: argparse.Namespace) -> Sequence[Case]:
    aggregation = aggregation_from_args(args)
    if aggregation is None:  # a framework has one loss
        return [case for case in CASES if case.second is None] if args.hooked else CASES
    if aggregation.mode == CUSTOM:
        raise ProofError(
            f"{aggregation.reducer_path}: a custom reducer has no formula to compare with. Verify "
            "a mode, and compare your reducer's gradient between layouts in a test of your own"
        )
    return [Case(aggregation=aggregation)]


def _layouts(args: argparse.Namespace) -> list[Parallelism]:
    names = [field.name for field in fields(Parallelism)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    split = given.keys() & {"dp", "tp", "pp", "vpp", "cp", "ep"}
    if _launchers_rank() is None:
        if not split and given.keys() <= {"moe", "hooked"}:
            layouts = standard(moe=bool(args.moe))
            return [replace(layout, hooked=bool(args.hooked)) for layout in layouts]
        if not split:
            raise ProofError(
                f"{', '.join(sorted(given))} without a size: add --dp, --tp, --pp or --cp, or drop "
                "it for the standard set"
            )
    for name in split:
        if given[name] < 1:
            raise ProofError(f"{name}: got {given[name]}, expected at least 1")
    if _launchers_rank() is not None and "dp" not in given:
        world = int(os.environ["WORLD_SIZE"])
        rest = given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
        if world % rest:
            raise ProofError(
                f"got {number_of(world, 'rank')} from the launcher, expected a multiple of tp * pp "
                f"* cp = {rest}"
            )
        given["dp"] = world // rest
    if given.get("vpp", 1) > 1:  # an interleaved pipeline needs a multiple of pp
        given.setdefault("microbatches", 2 * given.get("pp", 1))
    return [Parallelism(**given)]


def _launched(job: Job, take: Callable[[Event], None], *, timeout: float) -> str:
    """Launch the job's ranks on this machine's CPU and follow rank 0's events.

    Returns the ranks' standard error if one failed, else nothing.
    """
    package = str(Path(megatron_lossagg.__file__).resolve().parent.parent)
    # The user's path first: their Megatron-Core, not one that is installed next to this package.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    with tempfile.TemporaryDirectory() as folder:
        job_file, events = Path(folder) / "job", Path(folder) / "events.jsonl"
        job.write(job_file)
        events.touch()
        ended = threading.Event()
        follower = threading.Thread(target=_follow, args=(events, ended, take))
        follower.start()
        try:
            done = launch(
                ["-m", "megatron_lossagg.verify", str(job_file), str(events)],
                processes=job.world_size,
                timeout=timeout,
                env={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            )
        except subprocess.TimeoutExpired as expired:
            return f"{expired.stderr!s}\nended after {timeout:.0f} s (--timeout)"
        finally:
            ended.set()
            follower.join()
    return (done.stderr or f"exit status {done.returncode}") if done.returncode else ""


def _follow(events: Path, ended: threading.Event, take: Callable[[Event], None]) -> None:
    with events.open() as file:
        partial = ""
        while True:
            last_round = ended.is_set()  # before reading, so that all that was written is read
            partial += file.read()
            *complete, partial = partial.split("\n")
            for line in complete:
                take(json.loads(line))
            if last_round:
                return
            time.sleep(0.1)
