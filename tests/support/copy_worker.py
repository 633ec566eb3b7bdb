"""Import another copy of the package, which may have a fault, in a forked process."""

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
