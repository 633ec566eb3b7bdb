"""Megatron-Bridge: its training modules are imported, and the hook is bound in each.

Its loop builds models for CUDA through Transformer Engine, which a check on the CPU cannot run.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.check import Check, FrameworkError, NotRunError

__all__ = ["checks"]

_MODULES = ("megatron.bridge.training.train", "megatron.bridge.training.eval")
_HOOK = "get_forward_backward_func"


def checks(aggregation: Aggregation) -> list[Check]:
    """List the checks, one per module and one for the loop; imports both modules."""
    modules = {name: import_module(name) for name in _MODULES}
    listed = [
        Check(
            name=f"{name.rpartition('.')[2]} is hooked, {aggregation.mode}",
            function=f"{name}.{_HOOK}",
            compare=partial(_bound, module, aggregation),
        )
        for name, module in modules.items()
    ]
    loop = Check(name="the training loop", function=f"{_MODULES[0]}.train", compare=_loop)
    return [*listed, loop]


def _bound(module: ModuleType, aggregation: Aggregation) -> None:
    """Install the integration, and look at the name that a module's loop calls."""
    from megatron_lossagg.integrations.bridge import install

    stock = getattr(module, _HOOK, None)
    install(aggregation)
    bound = getattr(module, _HOOK)
    if getattr(bound, "__wrapped__", None) is not stock:
        raise FrameworkError(
            f"got {bound!r} as {module.__name__}.{_HOOK} after install, expected the hooked "
            f"{stock!r}: use a release that the integration was written for (docs/integrations)"
        )


def _loop() -> None:
    raise NotRunError(
        "Bridge builds its models for CUDA through Transformer Engine, expected a loop that runs "
        "on the CPU: train a few steps at two layouts on your GPUs and compare loss and grad norm"
    )
