"""The gradients of several schedule calls, held back until Megatron finalizes them once.

Finalize reduces what lies in the buffers and, in the per-token loss scaling, divides it by
num_tokens. Called after each of several schedule calls it would do so to earlier gradients once
more. Symbols: ``config.finalize_model_grads_func``, ``config.no_sync_func``,
``config.grad_sync_func``, the chunks' ``no_sync`` and ``scale_gradients``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from megatron_lossagg.contract.engine import Engine, engine_of
from megatron_lossagg.contract.finalize import FinalizeHook, ListeningHook
from megatron_lossagg.errors import ContractError


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
        owner = getattr(self.own_finalize, "__self__", None)
        self._listens = owner if isinstance(owner, ListeningHook) else None
        if isinstance(owner, FinalizeHook | HeldGradients) and self._listens is None:
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
        if self._listens is not None:
            self._listens.after()
