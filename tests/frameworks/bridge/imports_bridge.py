"""What every run of Megatron-Bridge imports first; for the fork server.

Megatron-Core must see that Transformer Engine is absent, and Bridge's models that it is there: the
stand-ins come after Megatron-Core. Nothing of theirs is called but ModelOpt's function for
distillation, which returns None where a model is not distilled.
"""

import importlib
import typing

import stand_ins
import typing_extensions

from megatron_lossagg.cpu.training import install_training

typing.override = typing_extensions.override  # Megatron-LM's, before Python 3.12
# It looks for triton when it is imported, and must see that there is none.
importlib.import_module("torch._inductor.compile_fx")
install_training()
stand_ins.install(stand_ins.of("bridge"))

from megatron.bridge.training import eval as evaluation  # noqa: E402
from megatron.bridge.training import gpt_step, pretrain, setup, train  # noqa: E402, F401


def not_distilled(*args: object, **kwargs: object) -> None:
    """Return no shapes, as ModelOpt does."""


for module in (train, evaluation):
    module.get_tensor_shapes_adjust_fn_for_distillation = not_distilled
