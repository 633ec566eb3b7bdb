"""As ``stand_ins_first``, for LLaMA-Factory, which imports other trainers and media."""

import stand_ins
import stand_ins_first  # noqa: F401

stand_ins.install(stand_ins.of("llama-factory"), stand_ins.ENGINES)

import peft  # noqa: E402  a stand-in

peft.PeftModel = type("PeftModel", (), {})  # its collator asks whether there is one
