"""Run the checks of a framework's functions by themselves: ``run_functions.py NAME_functions``.

A JSON line for each says how it ended. verl's and SkyRL's run in pytest's process too
(``verl_checks.py``, ``skyrl_checks.py``); others import what would be in the way there.
"""

import importlib
import json
import sys
from dataclasses import asdict

from megatron_lossagg.verify.drivers.runs import DEFAULT
from megatron_lossagg.verify.frameworks.check import outcome_of

if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    framework = sys.argv[1].removesuffix("_functions").replace("_", "-")
    for check in module.checks(DEFAULT):
        print("OUTCOME", json.dumps(asdict(outcome_of(check, framework=framework))), flush=True)
