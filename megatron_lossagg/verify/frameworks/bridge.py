"""Megatron-Bridge: its training modules are imported, and the hook is bound in each.

Its loop builds models for CUDA through Transformer Engine, which a check on the CPU cannot run.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.check import HOOK, Check, check_hooked, loop_not_run

_MODULES = ("megatron.bridge.training.train", "megatron.bridge.training.eval")


def checks(aggregation: Aggregation) -> list[Check]:
    """List the checks, one per module and one for the loop; imports both modules."""
    modules = {name: import_module(name) for name in _MODULES}
    listed = [
        Check(
            f"{name.rpartition('.')[2]} is hooked, {aggregation.mode}",
            f"{name}.{HOOK}",
            partial(_bound, module, aggregation),
        )
        for name, module in modules.items()
    ]
    return [*listed, loop_not_run("Bridge", f"{_MODULES[0]}.train")]


def _bound(module: ModuleType, aggregation: Aggregation) -> None:
    from megatron_lossagg.integrations.bridge import install

    check_hooked(module, partial(install, aggregation))
