"""A rank of a verification: ``python -m megatron_lossagg.verify JOB EVENTS``, under a launcher.

JOB: a file of ``Job.write``. EVENTS: a file to which rank 0 appends a JSON line per event.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_lossagg.verify.job import Job, run_job


def main(job: str, events: str) -> None:
    """Run the job and write its events."""
    with Path(events).open("a", buffering=1) as file:
        run_job(Job.read(Path(job)), lambda event: print(json.dumps(event), file=file))


if __name__ == "__main__":
    main(*sys.argv[1:])
