"""The function with which Megatron finalizes a step's gradients: watched, or held back.

Megatron's schedule calls ``config.finalize_model_grads_func`` once, after the last backward pass:
it reduces gradients over ranks and, in the per-token loss scaling, divides them by num_tokens.
Called after each of several schedule calls it would do so to earlier gradients once more:
:class:`HeldGradients` holds it back until the last. Symbols: ``config.finalize_model_grads_func``,
``config.no_sync_func``, ``config.grad_sync_func``, the chunks' ``no_sync`` and ``scale_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from megatron_lossagg.contract.engine import Engine, engine_of
from megatron_lossagg.errors import ContractError


class FinalizeHook:
    """Stands in for a config's finalize function while one step runs, and calls it.

    ``on_finalize``: gets num_tokens, which is of this rank still, before the config's own function
    does. ``after``: called when the gradients are finalized, or scaled once more by a deferred
    step; a hook that has it changes nothing, so that a deferred step may begin while it listens.
    No collective, no host sync.
    """

    def __init__(
        self,
        config: Any,
        on_finalize: Callable[[Tensor | None], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._on_finalize = on_finalize
        self.after = after
        self._stock = config.finalize_model_grads_func
        self.is_ended = False
        config.finalize_model_grads_func = self.finalize

    def finalize(
        self, model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Tell ``on_finalize``, finalize as before, and tell ``after``."""
        if not self.is_ended:
            self._on_finalize(num_tokens)
        found = self._stock(model, num_tokens, *args, **kwargs)
        if self.after is not None and not self.is_ended:
            self.after()
        return found

    def end(self) -> None:
        """Put the config's own function back, unless a later step's hook stands before it."""
        self.is_ended = True
        function = self._config.finalize_model_grads_func
        while (hook := hook_of(function)) is not None and hook.is_ended:
            function = hook._stock
        self._config.finalize_model_grads_func = function


def hook_of(function: Any) -> FinalizeHook | None:
    """Return the hook whose function this is, if it is one's."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, FinalizeHook) else None


def without_listeners(function: Any) -> Any:
    """Return a finalize function without those that only listen to it."""
    while (hook := hook_of(function)) is not None and hook.after is not None:
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


class HeldGradients:
    """Holds back reduction and finalize of a model's gradients until :meth:`finalize`.

    Until then, or :meth:`release`, the config's finalize function only keeps num_tokens, and no
    chunk reduces. Raises :class:`ContractError` inside a step of the same model, or while its
    gradients are held already. Making it costs no collective.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._engines = [engine_of(chunk) for chunk in chunks]
        if fault := self._engines[0].cannot_hold():
            raise ContractError(fault)
        self._config = chunks[0].config
        hold = [partial(self._hold, engine) for engine in self._engines]
        self._set = {
            "finalize_model_grads_func": self.keep,
            "no_sync_func": hold if len(chunks) > 1 else hold[0],
            "grad_sync_func": None,
        }
        self._own = {name: getattr(self._config, name) for name in self._set}
        self.num_calls = 0
        """How often the schedule has finalized."""
        self._num_tokens: Tensor | None = None
        self._more: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        hook = hook_of(self.own_finalize)
        self._after = None if hook is None else hook.after
        owner = getattr(self.own_finalize, "__self__", None)
        if isinstance(owner, FinalizeHook | HeldGradients) and self._after is None:
            raise ContractError(
                "got a deferred step inside a step of the same model: begin it before its schedule "
                "calls, and end the one before it"
            )
        self._put(self._set)
        self._no_sync = ExitStack()
        for engine in self._engines:
            self._hold(engine)

    @property
    def own_finalize(self) -> Any:
        """The config's own finalize function."""
        return self._own["finalize_model_grads_func"]

    def _put(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._config, name, value)

    def _hold(self, engine: Engine) -> AbstractContextManager[None]:
        """Stand in for a chunk's ``no_sync``: leaving it lets no last microbatch reduce.

        The schedule enters it in each call, so that zeroing gradients, which lets the chunk reduce
        again, does no harm.
        """
        self._no_sync.enter_context(engine.hold())
        return nullcontext()

    def keep(self, model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Stand in for the finalize function: add up num_tokens, which are of this rank still."""
        self.num_calls += 1
        self._more = args, kwargs
        if num_tokens is not None:
            kept = self._num_tokens
            self._num_tokens = num_tokens.clone() if kept is None else kept + num_tokens

    def changed(self) -> str:
        """Name what was set in the config since; empty if nothing was."""
        found = [name for name, value in self._set.items() if getattr(self._config, name) != value]
        return ", ".join(f"config.{name}" for name in found)

    def release(self) -> None:
        """Put the config's own functions back, and hold nothing any longer."""
        self._put(self._own)
        self._no_sync.close()

    def finalize(self, factor: float) -> None:
        """Reduce and finalize all gradients once, and multiply them by ``factor``.

        Collectives: those of Megatron's own finalize.
        """
        self.release()
        for engine in self._engines:
            engine.reduce_held()
        args, kwargs = self._more
        self.own_finalize(list(self._chunks), self._num_tokens, *args, **kwargs)
        for chunk in self._chunks:
            if factor != 1:
                chunk.scale_gradients(factor)
        if self._after is not None:
            self._after()
