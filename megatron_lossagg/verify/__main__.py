"""A process of a verification: ``python -m megatron_lossagg.verify JOB EVENTS``.

JOB: a file of ``write_job``. EVENTS: a file to which the first process appends a JSON line per
event.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from megatron_lossagg.verify.job import read_job


def main(job: str, events: str) -> None:
    """Run the job and write its events."""
    with Path(events).open("a", buffering=1) as file:
        for event in read_job(Path(job)).run():
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps(event), file=file)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        # One write of lines that name their rank: the ranks share this stream.
        rank = os.environ.get("RANK", "0")
        lines = traceback.format_exc().splitlines(keepends=True)
        sys.stderr.write("".join(f"[rank{rank}]: {line}" for line in lines))
        sys.exit(1)
