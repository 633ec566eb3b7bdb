"""``LOSSAGG_WEIGH=1``: weigh the first step of a framework, from a command's environment.

A trainer without Megatron imports this, so that what listens is imported where it is asked for.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

WEIGH = "LOSSAGG_WEIGH"
"""The environment variable that weighs the first step, of a framework's own reduction too."""


def is_asked() -> bool:
    """Whether this process was asked to weigh."""
    return os.environ.get(WEIGH, "0") not in ("", "0")


def variables() -> dict[str, str]:
    """Return what a process that this one starts has to find in its environment."""
    return {WEIGH: os.environ[WEIGH]} if is_asked() else {}


def weigh_if_asked(framework: str) -> None:
    """Listen in the training of this process if it was asked to; a second call does nothing.

    Raises :class:`ContractError` where ``weigh_rl.install`` does.
    """
    if is_asked():
        _weigh(framework)


@cache
def _weigh(framework: str) -> None:
    from megatron_lossagg.integrations import weigh_rl

    weigh_rl.install(framework)


class PassedLoss:
    """A loss function that NeMo-RL's trainer passes to its workers, as it is.

    A worker is asked to weigh by its environment, and listens before the loss function is called:
    where it is unpickled.
    """

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        weigh_if_asked("nemo-rl")

    def __getattr__(self, name: str) -> Any:
        """Return what NeMo-RL asks of a loss before it calls it: the wrapped loss's."""
        if name == "loss_fn" or name.startswith("__"):  # not set yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.loss_fn, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss function's value and metrics."""
        return self.loss_fn(*args, **kwargs)
