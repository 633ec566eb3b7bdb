"""Import it first: it lets AReaL's code be imported on a CPU, from the checkout ``sys.argv[1]``."""

import sys

from framework_folders import INSTALLED

CHECKOUT = sys.argv[1]
sys.path.insert(0, CHECKOUT)
sys.path.append(str(INSTALLED))

import tiny_gpt  # noqa: E402, F401, I001  before the frameworks: it lets Megatron-Core run on a CPU
import areal_stand_ins_first  # noqa: E402, F401
