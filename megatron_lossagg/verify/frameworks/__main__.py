"""Run a framework's checks: ``python -m megatron_lossagg.verify.frameworks NAME FILE AGGREGATION``.

FILE gets one JSON line per check as it ends; frameworks print to standard output. AGGREGATION: JSON
of the configured one, for a framework that is run as a whole.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.verify.frameworks import (
    bridge,
    megatron_lm,
    miles,
    nemo_rl,
    skyrl,
    slime,
    verl,
)
from megatron_lossagg.verify.frameworks.check import Check, Outcome, ended_by, outcome_of

CHECKS: Mapping[str, Callable[[Aggregation], list[Check]]] = {
    "verl": lambda _: verl.checks(),
    "skyrl": lambda _: skyrl.checks(),
    "nemo-rl": lambda _: nemo_rl.checks(),
    "megatron-lm": megatron_lm.checks,
    "bridge": bridge.checks,
    "slime": lambda _: slime.checks(),
    "miles": lambda _: miles.checks(),
}


def main(framework: str, file: str, aggregation: str) -> None:
    """Run the checks of a framework and write their outcomes."""
    signal.signal(signal.SIGTERM, _exit)  # so that what was launched is ended

    def write(outcome: Outcome) -> None:
        with Path(file).open("a") as out:
            out.write(json.dumps(asdict(outcome)) + "\n")

    try:
        checks = CHECKS[framework](Aggregation(**json.loads(aggregation)))
    except (Exception, SystemExit) as error:
        write(ended_by(error, f"import of {framework}", framework=framework))
        return
    for check in checks:
        write(outcome_of(check, framework=framework))


def _exit(*_: Any) -> None:
    """Raise what no check catches, once: ending what was launched is not interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(*sys.argv[1:])
