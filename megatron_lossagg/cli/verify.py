"""Prove on the installed, unmodified Megatron-Core that the loss trained is the loss named.

A small model and uneven rows with every degenerate case go through Megatron's own schedules,
DistributedDataParallel and finalize_model_grads; every parameter's gradient and the reported
loss are compared with a float64 oracle on one process. Without options: a standard set of
layouts on 4 CPU processes of this machine. Under torchrun: the launcher's ranks, with CUDA
and NCCL where they are. Exit status: 0 all rows pass, 1 a row failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import megatron_lossagg
from megatron_lossagg.aggregation import CUSTOM
from megatron_lossagg.cli import report as show
from megatron_lossagg.cli.environment import environment
from megatron_lossagg.cpu import launch
from megatron_lossagg.errors import ProofError
from megatron_lossagg.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.proof.cases import CASES, Case
from megatron_lossagg.proof.job import REGIMES, Event, Job, run_job
from megatron_lossagg.proof.parallelism import Parallelism, standard

_SIZES = {
    "dp": "data-parallel size, without context parallelism",
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size",
    "vpp": "model chunks a pipeline stage; above 1 the pipeline is interleaved",
    "cp": "context-parallel size",
    "ep": "expert-parallel size, with --moe",
    "microbatches": "M, microbatches of the step on each data-parallel rank (default 3)",
    "optimizer-instances": "distributed optimizer instances",
}
_SWITCHES = {
    "moe": "experts, with router and z losses beside the main loss",
    "mtp": "a multi-token-prediction layer; with --float32",
    "float32": "weights in float32 and Megatron's own cross entropy",
    "sequence-parallel": "sequence parallelism, with --tp",
    "distributed-optimizer": "shard the gradients as the distributed optimizer does",
    "average-in-collective": "average in the collective, in the average regime",
    "overlap-grad-reduce": "overlap the reduction with the backward pass",
    "recompute": "recompute all activations",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lossagg verify``; none of the layout's means the standard set."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    layout = parser.add_argument_group("layout", "one layout instead of the standard set")
    for name, text in _SIZES.items():
        layout.add_argument(f"--{name}", type=int, metavar="N", help=text)
    for name, text in _SWITCHES.items():
        layout.add_argument(f"--{name}", action="store_true", default=None, help=text)
    layout.add_argument(
        "--packing", choices=("thd", "bshd", "local"), help="how rows are laid out (default thd)"
    )
    add_loss_aggregation_args(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--regime", choices=REGIMES, help="one of Megatron's regimes, not both")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    run.add_argument("--html", type=Path, metavar="FILE", help="write it as one page")
    run.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="end a launch after this"
    )


def run(args: argparse.Namespace) -> int:
    """Run the verification; returns the exit status. Raises :class:`ProofError` for wrong usage."""
    cases, layouts = _cases(args), _layouts(args)
    job = Job(layouts=layouts, cases=cases, regimes=[args.regime] if args.regime else REGIMES)
    for path in (args.json, args.html):
        if path is not None and not path.resolve().parent.is_dir():
            raise ProofError(f"{path}: its folder does not exist: make it first")
    under_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    first = not under_launcher or os.environ["RANK"] == "0"
    facts = environment() if first else []
    broken = [f for f in facts if f.name == "megatron-core" and f.state != "found"]
    if broken:
        print(*facts, sep="\n")
        raise ProofError(f"nothing to verify: megatron-core is {broken[0].state}")
    begun, started = time.monotonic(), datetime.now(timezone.utc)
    verdicts: list[dict[str, Any]] = []
    if under_launcher:
        passed = _as_a_rank(job, verdicts)
        if not first:
            return 0 if passed else 1
    else:
        _launched(job, verdicts, timeout=args.timeout)
    report = show.finite(
        {
            "tool": {"name": "megatron_lossagg", "version": megatron_lossagg.__version__},
            "started": started.isoformat(timespec="seconds"),
            "seconds": time.monotonic() - begun,
            "command": " ".join(["lossagg", *sys.argv[1:]]),
            "environment": [asdict(fact) for fact in facts],
            "layouts": [str(layout) for layout in layouts],
            "verdicts": verdicts,
            "passed": all(v["passed"] for v in verdicts) and len(verdicts) == job.num_rows,
        }
    )
    show.show(report)
    _write(args, report)
    return 0 if report["passed"] else 1


def _cases(args: argparse.Namespace) -> Sequence[Case]:
    aggregation = aggregation_from_args(args)
    if aggregation is None:
        return CASES
    if aggregation.mode == CUSTOM:
        raise ProofError(
            f"{aggregation.reducer_path}: a custom reducer has no formula to compare with; verify "
            "a mode, and compare your reducer's gradient between layouts in a test of your own"
        )
    return [Case(aggregation=aggregation)]


def _layouts(args: argparse.Namespace) -> list[Parallelism]:
    names = [field.name for field in fields(Parallelism)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    world = int(os.environ.get("WORLD_SIZE", 0))
    if not world and not given.keys() - {"moe"}:
        return standard(moe=bool(args.moe))
    if world and "dp" not in given:
        rest = given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
        if world % rest:
            raise ProofError(f"{world} ranks are no multiple of tp * pp * cp = {rest}")
        given["dp"] = world // rest
    if given.get("vpp", 1) > 1:  # an interleaved pipeline wants a multiple of pp
        given.setdefault("microbatches", 2 * given.get("pp", 1))
    return [Parallelism(**given)]


def _as_a_rank(job: Job, verdicts: list[dict[str, Any]]) -> bool:
    """Run as one of a launcher's ranks; fills ``verdicts`` on rank 0; the same answer on all."""
    if os.environ["RANK"] != "0":
        return run_job(job, lambda event: None)
    with show.progress(job.num_rows) as advance:
        return run_job(job, lambda event: _take(event, verdicts, advance))


def _launched(job: Job, verdicts: list[dict[str, Any]], *, timeout: float) -> None:
    """Launch the job's ranks on this machine and follow rank 0's events; fills ``verdicts``."""
    package = str(Path(megatron_lossagg.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder, show.progress(job.num_rows) as advance:
        job_file, events = Path(folder) / "job.json", Path(folder) / "events.jsonl"
        job_file.write_text(job.to_json())
        events.touch()
        ended = threading.Event()
        follower = threading.Thread(
            target=_follow, args=(events, ended, lambda e: _take(e, verdicts, advance))
        )
        follower.start()
        try:
            done = launch(
                ["-m", "megatron_lossagg.proof", str(job_file), str(events)],
                processes=job.world_size,
                timeout=timeout,
                env={"PYTHONPATH": path},
            )
            failure = done.stderr if done.returncode else ""
        except subprocess.TimeoutExpired as expired:
            failure = f"{expired.stderr!s}\nended after {timeout:.0f} s (--timeout)"
        finally:
            ended.set()
            follower.join()
    if failure:
        print("A rank ended before the last row:", *failure.splitlines()[-60:], sep="\n  ")


def _follow(events: Path, ended: threading.Event, take: Callable[[Event], None]) -> None:
    with events.open() as file:
        partial = ""
        while True:
            last_round = ended.is_set()  # before reading: what is written until then is read
            partial += file.read()
            *whole, partial = partial.split("\n")
            for line in whole:
                take(json.loads(line))
            if last_round:
                return
            time.sleep(0.1)


def _take(event: Event, verdicts: list[dict[str, Any]], advance: Callable[[], None]) -> None:
    if event["event"] == "row":
        advance()
    else:
        verdicts.extend(event["verdicts"])


def _write(args: argparse.Namespace, report: show.Report) -> None:
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    if args.html is not None:
        from megatron_lossagg.cli.page import page

        args.html.write_text(page(report), encoding="utf-8")
