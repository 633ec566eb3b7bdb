"""Start a framework's checks in a process of their own, on the CPU, and collect their outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megatron_lossagg
from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.cpu.launch import tied
from megatron_lossagg.verify.environment import unlaunched
from megatron_lossagg.verify.frameworks.check import FAIL, NOT_RUN, Outcome, none_ran

__all__ = ["DEFAULT", "TIMEOUT", "run_framework"]

DEFAULT = Aggregation("sample_mean")
"""What a framework that is run as a whole trains, where no aggregation is configured."""
TIMEOUT = 600.0
"""Seconds that a framework's checks may take, imports included."""
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.2


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

    def add(outcome: dict[str, Any]) -> None:
        outcomes.append(outcome)
        report(outcome)

    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "outcomes.jsonl", Path(folder) / "log"
        file.touch()

        def read() -> None:
            lines = file.read_text().splitlines(keepends=True)[len(outcomes) :]
            for line in lines:
                if line.endswith("\n"):
                    add(json.loads(line))

        with log.open("w") as out:
            ended = _ended(_command(framework, file, aggregation or DEFAULT), out, timeout, read)
        read()
        printed = log.read_text(errors="replace").strip().splitlines()
    if ended:
        reason = f"the process {ended}"
        if printed and "--timeout" not in ended:
            reason += f"; it printed last: {printed[-1][:300]}. Import {framework} by itself"
        begins = "the checks that follow" if outcomes else f"the checks of {framework}"
        add(asdict(Outcome(check=begins, function="", state=NOT_RUN, explanation=reason)))
    failed = any(outcome["state"] == FAIL for outcome in outcomes)
    return {
        "name": framework,
        "seconds": time.monotonic() - begun,
        "passed": not failed and not none_ran(outcomes),
        "checks": outcomes,
    }


def _command(framework: str, file: Path, aggregation: Aggregation) -> list[str]:
    arguments = [framework, str(file), json.dumps(asdict(aggregation))]
    return [sys.executable, "-m", "megatron_lossagg.verify.frameworks", *arguments]


def _ended(command: list[str], out: Any, timeout: float, meanwhile: Callable[[], None]) -> str:
    """Run a command to its end; return how it ended where that was not with status 0."""
    deadline = time.monotonic() + timeout
    package = str(Path(megatron_lossagg.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    more = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        tied(command),
        stdout=out,
        stderr=subprocess.STDOUT,
        env={**unlaunched(), **more},
        start_new_session=True,  # Ctrl-C reaches it once, through _stop
    )
    try:
        while (status := process.poll()) is None:
            if time.monotonic() > deadline:
                return f"did not end within {timeout:g} s: give it more by --timeout"
            meanwhile()
            time.sleep(_POLL_SECONDS)
        return f"ended with status {status}" if status else ""
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()  # it ends what it launched
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
