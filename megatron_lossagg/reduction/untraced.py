"""What a compiled loss_func calls as it is, because it reads counts, masks and where tensors lie.

``torch.compiler.disable`` imports torch's compiler, which takes a second and 50 MB. So
``microbatch.py`` imports this only while torch compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from megatron_lossagg.reduction.microbatch import Microbatch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Let a compiled loss_func call it as it is."""
    return cast(_Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


reduce = untraced(Microbatch.reduce)
outputs = untraced(Microbatch.outputs)
shadow = untraced(Microbatch.shadow)
