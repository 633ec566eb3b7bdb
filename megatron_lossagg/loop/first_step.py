"""Tell a launcher that the run has finished a step: a failure before it would be repeated."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["FIRST_STEP_FILE", "record_first_step"]

FIRST_STEP_FILE = "LOSSAGG_FIRST_STEP_FILE"
"""The environment variable in which a launcher names a file."""


def record_first_step() -> None:
    """Write the launcher's file, if it named one, after the first step of this process."""
    if path := os.environ.pop(FIRST_STEP_FILE, None):
        with suppress(OSError):  # the launcher's loss, not the run's
            Path(path).touch()
