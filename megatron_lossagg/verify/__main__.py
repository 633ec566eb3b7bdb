"""A process of a verification: ``python -m megatron_lossagg.verify JOB EVENTS``.

JOB: a file of ``write_job``. EVENTS: a file to which the first process appends a JSON line per
event. Next to it each process writes what it did last, ``RANK.progress``, and shortly before
``LOSSAGG_DEADLINE`` (seconds since the epoch), if it is set, where it is: ``RANK.stack``.
With ``LOSSAGG_GPUS`` the ranks take that many GPUs, in a circle.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lossagg.verify.environment import gpu_variables
from megatron_lossagg.verify.job import Event, read_job

_EARLIER = 0.5
"""Seconds before the deadline, of which a short time has less."""


def main(job: str, events: str) -> None:
    """Run the job and write its events."""
    rank = os.environ.get("RANK", "0")
    if gpus := os.environ.get("LOSSAGG_GPUS"):
        shared = gpu_variables(int(rank), int(os.environ["WORLD_SIZE"]), int(gpus))
        os.environ["LOCAL_RANK"] = shared.pop("LOCAL_RANK")
        for name, value in shared.items():
            os.environ.setdefault(name, value)
    begun = time.monotonic()
    progress = Path(events).with_name(f"{rank}.progress")
    with (
        Path(events).open("a", buffering=1) as file,
        progress.open("w", buffering=1) as did,
        _stack_at_deadline(Path(events).with_name(f"{rank}.stack")),
    ):
        print("began to import and to join the others", file=did)
        for event in read_job(Path(job)).run():
            print(f"{_did(event)}, {time.monotonic() - begun:.0f} s after it began", file=did)
            if rank == "0":
                print(json.dumps(event), file=file)


def _did(event: Event) -> str:
    """Say what a rank has done when it has this event."""
    did = {"begin": "began", "layout": "finished"}
    if event.get("event") in did:
        return f"{did[event['event']]} {event['layout']}"
    return {"start": "joined the others", "end": "finished"}.get(event.get("event", ""), "went on")


@contextmanager
def _stack_at_deadline(file: Path) -> Iterator[None]:
    """Write, shortly before the deadline, in which call the main thread is."""
    left = float(os.environ.get("LOSSAGG_DEADLINE", "inf")) - time.time()
    if not 0 < left < float("inf"):
        yield
        return
    timer = threading.Timer(max(left - _EARLIER, left / 2), _write_stack, [file])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_stack(file: Path) -> None:
    """Write the main thread's calls, the innermost first.

    A thread of Python's, which waits until that one lets others run, as collectives do:
    ``faulthandler`` does not wait, and next to running code ends the process.
    """
    main_thread = sys._current_frames()[threading.main_thread().ident or 0]
    calls = [(frame.f_code, line) for frame, line in traceback.walk_stack(main_thread)]
    file.write_text(
        "".join(f'  File "{c.co_filename}", line {line} in {c.co_name}\n' for c, line in calls)
    )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        # One write of lines that name their rank: the ranks share this stream.
        rank = os.environ.get("RANK", "0")
        lines = traceback.format_exc().splitlines(keepends=True)
        sys.stderr.write("".join(f"[rank{rank}]: {line}" for line in lines))
        sys.exit(1)
    # A thread of gloo that drops a tensor while the interpreter ends aborts the process, and groups
    # that somebody keeps, as a framework does, have such threads.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
