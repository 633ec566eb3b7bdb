"""As ``stand_ins_first``, for NeMo-RL, which imports more and asserts an older transformers."""

import stand_ins
import stand_ins_first  # noqa: F401

needed = stand_ins.of("nemo-rl", but=("scipy",))
stand_ins.install(name for name in needed if "megatron" not in name)
stand_ins.older_transformers()
