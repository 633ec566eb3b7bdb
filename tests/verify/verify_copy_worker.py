"""A rank of ``lossagg verify`` in a copy of the package, which may have a fault.

``verify_copy_worker.py COPY OPTION ...``, forked from a process that has imported the package.
Prints the command's status, and ends with 0 where a case failed: rank 0 has written its report.
"""

import importlib
import sys
from pathlib import Path

from copy_worker import use_copy

if __name__ == "__main__":
    folder, *options = sys.argv[1:]
    use_copy(Path(folder))
    command = importlib.import_module("megatron_lossagg.cli.main")
    assert command.__file__.startswith(folder), command.__file__
    sys.argv = ["lossagg", "verify", *options]
    status = command.main(sys.argv[1:])
    print(f"ended with {status}")
    assert status in (0, 1)  # a case failed, or none
