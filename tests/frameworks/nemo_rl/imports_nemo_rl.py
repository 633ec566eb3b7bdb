"""What every run of NeMo-RL's own code imports first: the checkout, and stand-ins for its imports.

The checkout's path is the second argument of the process.
"""

import sys
import typing

import stand_ins
import tiny_gpt  # noqa: F401  before NeMo-RL: it lets Megatron-Core run on a CPU
import typing_extensions
from framework_folders import INSTALLED

sys.path.insert(0, sys.argv[2])
sys.path.append(str(INSTALLED))

stand_ins.install(stand_ins.of("nemo-rl"))
typing.TypedDict = typing_extensions.TypedDict  # pydantic models, before Python 3.12
stand_ins.older_transformers()
