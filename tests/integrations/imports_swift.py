"""What every run of ms-swift's Megatron trainer imports first; for the fork server.

Megatron-Core must see that Transformer Engine is absent, and mcore-bridge that it is there: the
stand-ins come after Megatron-Core. What mcore-bridge patches of it is a class that nothing makes.
"""

import importlib
import tempfile

import stand_ins

from megatron_lossagg import cpu

# It looks for triton when it is imported, and must see that there is none.
importlib.import_module("torch._inductor.compile_fx")
cpu.install()
for module in ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer"):
    importlib.import_module(module)
engine = importlib.import_module("megatron.core.extensions.transformer_engine")
for name in [name for name, value in vars(engine).items() if value is None and name[:2] == "TE"]:
    setattr(engine, name, type(name, (), {}))
stand_ins.install(stand_ins.DATA, stand_ins.SWIFT)
importlib.import_module("modelscope.hub.utils.utils").get_cache_dir = tempfile.gettempdir

for module in ("trainer", "grpo_trainer", "gkd_trainer"):
    importlib.import_module(f"swift.megatron.trainers.{module}")
