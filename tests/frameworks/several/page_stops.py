"""How a framework that was started by its page's line stops, and writes what it has by then.

In each of its processes. What the frameworks import and do not call on the way has stand-ins; what
has to be right is written to the file ``REACHED``.
"""

import importlib.machinery
import json
import os
import sys
from pathlib import Path


class ReachedError(Exception):
    """The process came to where it would need a GPU."""


def reached(**found):
    """Write what was found, and end the process."""
    Path(os.environ["REACHED"]).write_text(json.dumps(found))
    raise ReachedError(f"reached {found}")


def hooks_of(function):
    """Return the hooks that ``_shared.py`` put around a framework's schedule."""
    from megatron_lossagg.loop.schedule_hook import ScheduleHook

    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return [one for one in held if isinstance(one, ScheduleHook)]


def once_imported(name, change):
    """Call ``change(module)`` as soon as a module is imported."""
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder:
    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = changed
        return spec


def is_rays_own():
    """Whether this is one of Ray's own processes, which runs nothing of a user's."""
    words = [word for word in sys.orig_argv if word.endswith(".py") and "/ray/" in word]
    return any("/workers/" not in word for word in words)


def is_torchs_launcher():
    """Whether this process only starts the ranks."""
    return any(word.endswith("torchrun") for word in sys.orig_argv[:2])
