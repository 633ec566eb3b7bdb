"""Prove that the installed, unmodified Megatron-Core trains the configured loss.

A small model and uneven sequences with every degenerate case go through Megatron's
own schedules, DistributedDataParallel and finalize_model_grads; every
parameter's gradient and the reported loss are compared with a float64 reference
on one process. Without options: a standard set of layouts on 4 CPU processes
of this machine. Under torchrun: the launcher's ranks, with CUDA and NCCL where
available. With --framework, a training system's own functions are compared with the
reference first. Exit status: 0 if all cases pass and no check of a framework failed, 1
if one failed, 2 for wrong usage and where no check of a framework could run; which
of several could not is named and changes no status. Progress goes to standard
error, the result to standard output.
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
from datetime import datetime, timezone
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
from megatron_lossagg.verify.environment import environment
from megatron_lossagg.verify.framework_facts import FRAMEWORKS, framework_fact
from megatron_lossagg.verify.frameworks.launch import TIMEOUT, run_framework
from megatron_lossagg.verify.frameworks.outcome import counted, none_ran
from megatron_lossagg.verify.job import Event, Job, run_job
from megatron_lossagg.verify.parallelism import Parallelism, standard

__all__ = ["add_arguments", "run"]

_TIMEOUT = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lossagg verify``; with no layout option, the standard set is run."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "example: lossagg verify --dp 2 --cp 2 --loss-aggregation sample_mean"
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
        help="first look whether this framework is installed here and has what its integration "
        "uses, and run its own functions on the CPU against the reference (megatron-lm: "
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
    framework_facts = [] if args.framework is None else [framework_fact(args.framework)]
    if args.framework is not None and FRAMEWORKS[args.framework].is_hooked:
        args.hooked = True
    job = _job(args)
    rank = _launchers_rank()
    if rank not in (None, 0):
        return 0 if run_job(job, lambda event: None) else 1
    _check_files(args)
    begun, started = time.monotonic(), datetime.now(timezone.utc)
    framework = _framework_report(args)
    facts = [*environment(), *framework_facts]
    core = next(fact for fact in facts if fact.name == "megatron-core")
    if core.state != "found":
        print(*facts, sep="\n")
        raise ProofError(f"nothing to verify: megatron-core is missing: {core.detail}")
    verdicts: list[dict[str, Any]] = []
    ran_on: list[str] = []
    world: dict[str, Any] = {"device": None, "backend": None, "hosts": [], "groups": {}}
    status = 1

    def finish() -> None:
        nonlocal status
        complete = len(verdicts) == job.num_verdicts and ran_on == [core.version]
        passed = complete and all(verdict["passed"] for verdict in verdicts)
        passed = passed and (framework is None or framework["passed"])
        report = show.finite(
            {
                "tool": {"name": "megatron_lossagg", "version": megatron_lossagg.__version__},
                "started": started.isoformat(timespec="seconds"),
                "seconds": time.monotonic() - begun,
                "command": shlex.join(["lossagg", *sys.argv[1:]]),
                "environment": [asdict(fact) for fact in facts],
                "layouts": [str(layout) for layout in job.layouts],
                "num_ranks": job.world_size,
                **world,
                "num_verdicts": job.num_verdicts,
                "verdicts": verdicts,
                "framework": framework,
                "passed": passed,
            }
        )
        show.show(report)
        if ran_on != [core.version]:
            versions = ", ".join(ran_on) or "none"
            print(f"The ranks ran megatron-core {versions}, expected {core.version} as found here")
        sys.stdout.flush()
        _write(args, report)
        status = 0 if passed else 1
        if complete and all(verdict["passed"] for verdict in verdicts) and framework is not None:
            status = 2 if none_ran(framework["checks"]) else status

    with show.progress(job.num_verdicts) as advance:

        def take(event: Event) -> None:
            advance(event)
            if event["event"] == "start":
                ran_on.append(event["megatron"])
                world.update(device=event["device"], backend=event["backend"])
                world["hosts"] = sorted({*event["hosts"]})
            elif event["event"] == "layout":
                verdicts.extend(event["verdicts"])
                world["groups"][event["layout"]] = event["groups"]
            elif rank is not None:  # the launcher's other ranks wait for the report
                finish()

        if rank is not None:
            run_job(job, take)
            return status
        failure = _launched(job, take, timeout=args.timeout or _TIMEOUT)
    finish()
    if failure:
        lines = [line for line in failure.splitlines() if "<frozen " not in line]
        of_ranks = [line for line in lines if line.startswith("[rank")]
        # The first rank's traceback has the reason.
        print("A rank failed:", *(of_ranks or lines)[:60], sep="\n  ")
        if not ran_on:
            raise ProofError(
                "nothing was verified: no rank could import megatron-core and join the others"
            )
    return 1 if failure else status


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


def _write(args: argparse.Namespace, report: show.Report) -> None:
    if args.json is not None:
        write_whole("--json", args.json, json.dumps(report, indent=1, allow_nan=False) + "\n")
    if args.html is not None:
        from megatron_lossagg.verify.page import page

        write_whole("--html", args.html, page(report))
