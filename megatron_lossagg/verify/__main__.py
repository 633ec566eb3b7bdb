"""A rank of a verification: ``python -m megatron_lossagg.verify JOB EVENTS``, under a launcher.

JOB: a file with ``Job.to_json``. EVENTS: a file that rank 0 appends one JSON line per event to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_lossagg.verify.job import Event, Job, run_job


def main(job: str, events: str) -> None:
    """Run the job and write its events."""
    with Path(events).open("a", buffering=1) as file:

        def report(event: Event) -> None:
            file.write(json.dumps(event) + "\n")

        run_job(Job.from_json(Path(job).read_text()), report)


if __name__ == "__main__":
    main(*sys.argv[1:])
