"""A rank of ``megatron_lossagg.verify`` in a copy of the package.

``copy_worker.py COPY JOB EVENTS``, forked from a process that has imported the package.
"""

import importlib
import os
import sys
from pathlib import Path

from fork_server import STAND_INS


def use_copy(copy: Path) -> None:
    """Forget the imported package but for the stand-ins, and import from ``copy`` from now on."""
    for name in list(sys.modules):
        ours = name.partition(".")[0] == "megatron_lossagg"
        if ours and not name.startswith(STAND_INS):
            del sys.modules[name]
    os.chdir(copy)
    sys.path.insert(0, str(copy))


if __name__ == "__main__":
    folder, *job_and_events = sys.argv[1:]
    use_copy(Path(folder))
    rank = importlib.import_module("megatron_lossagg.verify.__main__")
    assert rank.__file__.startswith(folder), rank.__file__
    rank.main(*job_and_events)
