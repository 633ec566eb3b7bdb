"""Check a framework's functions by themselves: ``run_functions.py NAME_functions``.

Each that passes is printed. Those of some run in pytest's process too, in ``NAME_checks.py``;
others import what would be in the way there.
"""

import importlib
import sys

if __name__ == "__main__":
    for check in importlib.import_module(sys.argv[1]).checks():
        check.passes()
        print(f"PASSED {check.name}", flush=True)
