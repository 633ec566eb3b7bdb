"""``lossagg weigh --framework``: what a framework's own step trains, without GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from megatron_lossagg.cli.arguments import import_from_here, seconds
from megatron_lossagg.cli.files import check_outputs, write_json
from megatron_lossagg.errors import LossAggregationError, say
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.reduction.modes import CUSTOM, OWN_WEIGHTS
from megatron_lossagg.verify.drivers.runs import (
    FAIL,
    TIMEOUT,
    DriverJob,
    Outcome,
    layout_of,
    run_job,
)
from megatron_lossagg.verify.drivers.table import FRAMEWORKS, check_installed
from megatron_lossagg.verify.job import Event

_OF_A_SCRIPT = ("at", "steps", "stop", "picture", "expect", "divisor", "cpu")
"""Options that a framework's step does not take."""
_UNHEARD = (
    "got no term of which a token has a weight, expected some: its step did not call Megatron's "
    "schedule or the functions of the loss that weighing listens at, or trained nothing"
)


class _Chosen(argparse.Action):
    """Takes the framework; then there is no script to require."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any
    ) -> None:
        setattr(namespace, self.dest, values)
        for action in parser._actions:
            action.required &= bool(action.option_strings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lossagg weigh --framework``."""
    options = parser.add_argument_group(
        "a framework", "in place of a script: its own step on a drawn batch, on the CPU"
    )
    options.add_argument("--framework", action=_Chosen, choices=sorted(FRAMEWORKS))
    options.add_argument(
        "--setting",
        default="",
        metavar="NAME",
        help="a setting of its own instead of its default, or all",
    )
    options.add_argument(
        "--edges",
        action="store_true",
        help="draw fully masked samples too, and samples of several sequences",
    )
    options.add_argument("--dp", type=int, default=2, metavar="N", help="data-parallel ranks")
    options.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel ranks")
    options.add_argument(
        "--timeout", type=seconds, default=TIMEOUT, metavar="SECONDS", help=argparse.SUPPRESS
    )


def run(args: argparse.Namespace, given: Collection[str]) -> int:
    """Print what a framework trains, stock and under a mode if one is asked for.

    ``given``: the options in use. Returns 1 if its step failed, and 2 if it could not run.
    """
    wrong = [name for name in _OF_A_SCRIPT if name in given]
    if args.script is not None or wrong:
        what = [f"--{name}" for name in wrong] or [f"the script {args.script}"]
        raise LossAggregationError(
            f"got --framework with {what[0]}, which is for a script: drop one of them"
        )
    aggregation = aggregation_from_args(args)
    if aggregation is not None and aggregation.mode in (CUSTOM, OWN_WEIGHTS):
        raise LossAggregationError(
            f"got {aggregation.mode} with --framework, expected a mode with a formula: choose one"
        )
    layout = layout_of(args.dp, args.cp)
    import_from_here()  # as the processes that are started do
    check_installed(args.framework)
    check_outputs({"--json": args.json})
    steps: list[Event] = []

    def take(event: Event) -> None:
        steps.append(event)
        print(_text(event), flush=True)

    say(f"{args.framework}: its own step at DP {args.dp} x CP {args.cp}, on the CPU")
    job = DriverJob(
        framework=args.framework,
        parallelism=layout,
        setting=args.setting,
        aggregations=[aggregation] if aggregation is not None else [],
        edges=args.edges,
    )
    last: list[Outcome] = []
    run_job(job, timeout=args.timeout, take=take, report=last.append)
    made = {"framework": args.framework, "dp": args.dp, "cp": args.cp, "steps": steps}
    write_json(args.json, made)
    last += [
        Outcome(check=event["trained"], function="", state=FAIL, explanation=_UNHEARD)
        for event in steps
        if not _trained_terms(event)
    ]
    for outcome in last:
        say(f"{args.framework}: {outcome.state} {outcome.check}: {outcome.explanation}")
    return min((1 if outcome.state == FAIL else 2 for outcome in last), default=0)


def _text(event: Mapping[str, Any]) -> str:
    """Return the reports of a step's terms."""
    begins = f"under {event['trained']} of ours"
    if not event["is_ours"]:
        begins = f"setting {event['trained']}, to be compared with {event['wanted']}"
    lines = [f"--- {begins} ---"]
    for name, term in _trained_terms(event).items():
        factor = term["coefficient"]
        times = "" if factor in (None, 1.0) else f", times its coefficient {factor:g}"
        lines += [f"term {name}{times}", term["report"], ""]
    return "\n".join(lines)


def _trained_terms(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of which tokens have a weight; a metric has none."""
    return {name: term for name, term in event["terms"].items() if term["weighed"]["tokens"]}
