"""Print the names that are replaced on a CPU, and who needs them."""

from __future__ import annotations

from megatron_lossagg.cpu import STAND_INS
from megatron_lossagg.cpu.training import TRAINING_STAND_INS

TABLES = {
    "Megatron-Core: megatron_lossagg.cpu.install()": STAND_INS,
    "Megatron-LM's training loop, beside those: lossagg run --cpu": TRAINING_STAND_INS,
}

for title, table in TABLES.items():
    print(f"{title}\n")
    for stand_in in table:
        print(f"{stand_in.name}\n    is      {stand_in.replacement}")
        print(f"    needed  {stand_in.needed_by}")
    print()
