"""Run a framework's checks in a process of their own, on the CPU, and collect their outcomes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from signal import Signals
from typing import Any

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.frameworks import FRAMEWORKS
from megatron_lossagg.verify.frameworks.check import (
    FAIL,
    NOT_RUN,
    Check,
    Outcome,
    ended_by,
    none_ran,
    outcome_of,
)
from megatron_lossagg.verify.job import Event, ended_by_signal, launched

DEFAULT = Aggregation("sample_mean")
"""What a framework that is run as a whole trains, if no aggregation is configured."""
TIMEOUT = 600.0
"""Seconds that a framework's checks may take, imports included."""


def checks_of(framework: str, aggregation: Aggregation = DEFAULT) -> list[Check]:
    """List a framework's checks, by its file of this folder; imports the framework."""
    module = import_module(f"{__package__}.{framework.replace('-', '_')}")
    checks: list[Check] = module.checks(aggregation)
    return checks


@dataclass(frozen=True)
class FrameworkJob:
    """The checks of a framework: what :func:`~megatron_lossagg.verify.job.launched` runs."""

    framework: str
    aggregation: Aggregation

    def run(self) -> Iterator[Event]:
        """Run the checks in this process; yield each outcome as it is known."""
        listing = f"import of {self.framework}"
        needs = FRAMEWORKS[self.framework].needs_transformer_engine
        if needs and find_spec("transformer_engine") is None:
            reason = (
                f"{self.framework} imports Transformer Engine, which is not here and needs CUDA: "
                f"run where {self.framework} trains"
            )
            yield asdict(Outcome(check=listing, function="", state=NOT_RUN, explanation=reason))
            return
        try:
            checks = checks_of(self.framework, self.aggregation)
        except (Exception, SystemExit) as error:
            yield asdict(ended_by(error, listing, framework=self.framework))
            return
        for check in checks:
            yield asdict(outcome_of(check, framework=self.framework))


def run_framework(
    framework: str,
    aggregation: Aggregation | None = None,
    *,
    timeout: float = TIMEOUT,
    report: Callable[[dict[str, Any]], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Run a framework's checks; return the report's part about them.

    ::

        {"name", "seconds", "passed": no check failed and one ran, "checks": [Outcome, ...]}

    ``report`` gets each outcome as it is known. A process that ends early or is ended after
    ``timeout`` seconds leaves one more outcome, not run, with the reason.
    """
    begun = time.monotonic()
    outcomes: list[dict[str, Any]] = []

    def take(outcome: dict[str, Any]) -> None:
        outcomes.append(outcome)
        report(outcome)

    reason = ""
    try:
        job = FrameworkJob(framework, aggregation or DEFAULT)
        done = launched(job, take, processes=None, timeout=timeout)
    except subprocess.TimeoutExpired:
        reason = f"the process did not end within {timeout:g} s: give it more by --timeout"
    else:
        if done.returncode:
            _, number = ended_by_signal(done)
            reason = f"the process ended with status {done.returncode}"
            if number:
                reason = f"the process was ended by {Signals(number).name}"
            if printed := (done.stderr or done.stdout).strip().splitlines():
                reason += f"; it printed last: {printed[-1][:300]}"
            reason += f". Import {framework} by itself"
    if reason:
        begins = "the checks that follow" if outcomes else f"the checks of {framework}"
        take(asdict(Outcome(check=begins, function="", state=NOT_RUN, explanation=reason)))
    failed = any(outcome["state"] == FAIL for outcome in outcomes)
    return {
        "name": framework,
        "seconds": time.monotonic() - begun,
        "passed": not failed and not none_ran(outcomes),
        "checks": outcomes,
    }
