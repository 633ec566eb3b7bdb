"""Print the names that ``megatron_lossagg.cpu.install`` replaces, and who needs them."""

from __future__ import annotations

from megatron_lossagg.cpu import STAND_INS

for stand_in in STAND_INS:
    print(f"{stand_in.name}\n    is      {stand_in.replacement}\n    needed  {stand_in.needed_by}")
