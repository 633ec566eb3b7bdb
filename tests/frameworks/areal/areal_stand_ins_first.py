"""As ``stand_ins_first``, for AReaL, which imports other servers and compilers."""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler

import stand_ins

stand_ins.install(stand_ins.of("areal"))
