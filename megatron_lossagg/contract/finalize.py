"""The function with which Megatron finalizes a step's gradients, watched while one step runs.

Megatron's schedule calls ``config.finalize_model_grads_func`` once, after the last backward pass:
it reduces gradients over ranks and, in the per-token loss scaling, divides them by num_tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


class FinalizeHook:
    """Stands in for a config's finalize function while one step runs, and calls it.

    ``on_finalize``: gets num_tokens, which is of this rank still, before the config's own function
    does. No collective, no host sync.
    """

    def __init__(self, config: Any, on_finalize: Callable[[Tensor | None], None]) -> None:
        self._config = config
        self._on_finalize = on_finalize
        self._stock = config.finalize_model_grads_func
        self.is_ended = False
        config.finalize_model_grads_func = self.finalize

    def finalize(
        self, model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Tell ``on_finalize``, and finalize as before."""
        if not self.is_ended:
            self._on_finalize(num_tokens)
        return self._stock(model, num_tokens, *args, **kwargs)

    def end(self) -> None:
        """Put the config's own function back, unless a later step's hook stands before it."""
        self.is_ended = True
        function = self._config.finalize_model_grads_func
        while (hook := hook_of(function)) is not None and hook.is_ended:
            function = hook._stock
        self._config.finalize_model_grads_func = function


class ListeningHook(FinalizeHook):
    """A hook that changes nothing, so that a deferred step may begin while it listens.

    ``after``: called when the gradients are finalized, or scaled once more by a deferred step.
    """

    def __init__(
        self,
        config: Any,
        on_finalize: Callable[[Tensor | None], None],
        after: Callable[[], None],
    ) -> None:
        super().__init__(config, on_finalize)
        self.after = after

    def finalize(
        self, model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Finalize as before, and tell ``after``."""
        found = super().finalize(model, num_tokens, *args, **kwargs)
        if not self.is_ended:
            self.after()
        return found


def hook_of(function: Any) -> FinalizeHook | None:
    """Return the hook whose function this is, if it is one's."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, FinalizeHook) else None


def without_listeners(function: Any) -> Any:
    """Return a finalize function without those that only listen to it."""
    while isinstance(hook := getattr(function, "__self__", None), ListeningHook):
        function = hook._stock
    return function


def own_finalize(config: Any) -> Any:
    """Return a config's finalize function, also while steps run."""
    function = config.finalize_model_grads_func
    while (hook := hook_of(function)) is not None:
        function = hook._stock
    return function


def is_megatrons_finalize(function: Any) -> bool:
    """Whether a finalize function is Megatron-Core's own, or a partial of it."""
    from megatron.core.distributed import finalize_model_grads

    while isinstance(function, partial):
        function = function.func
    return function is finalize_model_grads


def is_same_function(one: Any, other: Any) -> bool:
    """Whether two callables are one, or partials of one with the same arguments."""
    if isinstance(one, partial) and isinstance(other, partial):
        same = one.args == other.args and one.keywords == other.keywords
        return same and is_same_function(one.func, other.func)
    return bool(one == other)
