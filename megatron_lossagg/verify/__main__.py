"""A process of a verification: ``python -m megatron_lossagg.verify JOB EVENTS``.

JOB: a file of ``write_job``. EVENTS: a file to which the first process appends a JSON line per
event.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from megatron_lossagg.verify.job import read_job


def main(job: str, events: str) -> None:
    """Run the job and write its events."""
    with Path(events).open("a", buffering=1) as file:
        for event in read_job(Path(job)).run():
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps(event), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
