"""Import it first: it lets AReaL's code be imported on a CPU, from the checkout ``sys.argv[1]``."""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
CHECKOUT = sys.argv[1]
sys.path.insert(0, CHECKOUT)
sys.path.append(str(Path(__file__).resolve().parents[2] / ".venv-frameworks"))

import stand_ins  # noqa: E402
import tiny_gpt  # noqa: E402, F401  before the frameworks: it lets Megatron-Core run on a CPU

stand_ins.install(stand_ins.RAY, stand_ins.HYDRA, stand_ins.DATA, stand_ins.AREAL)
