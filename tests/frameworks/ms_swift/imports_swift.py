"""What every run of ms-swift's Megatron trainer imports first; for the fork server.

Megatron-Core must see that Transformer Engine is absent, and mcore-bridge that it is there: the
stand-ins come after Megatron-Core. What mcore-bridge patches of it is a class that nothing makes.
"""

import importlib

import stand_ins

from megatron_lossagg import cpu
from megatron_lossagg.verify.drivers.ms_swift import has_engine

# It looks for triton when it is imported, and must see that there is none.
importlib.import_module("torch._inductor.compile_fx")
cpu.install()
for module in ("models.gpt.gpt_layer_specs", "optimizer", "extensions.transformer_engine"):
    importlib.import_module(f"megatron.core.{module}")
stand_ins.install(stand_ins.of("ms-swift"))
has_engine()

for module in ("trainer", "grpo_trainer", "gkd_trainer"):
    importlib.import_module(f"swift.megatron.trainers.{module}")
