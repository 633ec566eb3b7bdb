"""As ``stand_ins_first``, for NeMo-RL, which imports more and asserts an older transformers."""

import stand_ins
import stand_ins_first  # noqa: F401

stand_ins.install(stand_ins.NEMO)
stand_ins.older_transformers()
