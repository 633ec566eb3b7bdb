"""Listens in an unmodified script of Megatron-LM: ``lossagg weigh``.

``train()`` of ``megatron.training.training`` looks up ``get_forward_backward_func`` and calls what
it returns with keywords. The model returns per-token losses; listening to them, whatever the
script's ``loss_func`` does with them, changes nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.contract.engine import engine_of, unwrapped
from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import HOOK, imported, replaced
from megatron_lossagg.weigh.compare import Weighed
from megatron_lossagg.weigh.listen import are_losses
from megatron_lossagg.weigh.weighing import Weighing

_LOOP = "megatron.training.training"
Report = Callable[[Weighed, int, str], None]
"""Gets a weighed step, its number, and the name of its term."""


class ScriptWeighing:
    """Weighs some steps of a script; one for a run.

    ``report``: called on rank 0. ``stop``: end the process when the last one is weighed.
    ``divisor``: L of ``constant``, to compare with.
    """

    def __init__(
        self, at: int, steps: int, *, stop: bool, report: Report, divisor: float | None = None
    ) -> None:
        self._at, self._last, self._stop, self._report = at, at + steps - 1, stop, report
        self._divisor = divisor
        self.num_steps = 0
        """Training steps that came by."""
        self.weighed: list[Weighed] = []
        """The weighed steps, the same on every rank."""
        self._before: Mapping[str, Weighed] = {}
        """The terms of the step before."""

    def forget(self) -> None:
        """Take the next step for another run's: explain it by itself."""
        self._before = {}

    def wrap(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what ``get_forward_backward_func()`` returned.

        Collectives: in a weighed step, after the schedule, one ``all_gather_object`` over all
        ranks.
        """

        @functools.wraps(schedule)
        def run(*args: Any, **call: Any) -> Any:
            if call.get("forward_only", False):
                return schedule(*args, **call)
            self.num_steps += 1
            if not self._at <= self.num_steps <= self._last:
                return schedule(*args, **call)
            if args:
                raise ContractError(
                    f"got {len(args)} positional arguments for the schedule, expected keywords "
                    "only, as Megatron-LM passes them"
                )
            return self._weigh(schedule, call)

        return run

    def _weigh(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        model = call["model"]
        chunks = [*model] if isinstance(model, (list, tuple)) else [model]
        with self._begun(chunks, call["num_microbatches"]) as weighing:
            out = self._listen(weighing, schedule, call, chunks[-1])
        self._end(weighing)
        return out

    def _end(self, weighing: Weighing) -> None:
        """Report the step, whose gradients are reduced."""
        terms = {
            name: step.after(self._before.get(name))
            for name, step in self._trained(weighing.terms()).items()
        }
        self._before = terms
        self.weighed.append(next(iter(terms.values())))
        if dist.get_rank() == 0:
            for term, step in terms.items():
                self._report(step, self.num_steps, term)
        if self._stop and self.num_steps == self._last:
            raise SystemExit(0)

    def _begun(self, chunks: Sequence[Any], num_microbatches: int) -> Weighing:
        return Weighing(chunks, num_microbatches=num_microbatches, divisor=self._divisor)

    def _listen(
        self, weighing: Weighing, schedule: Callable[..., Any], call: dict[str, Any], chunk: Any
    ) -> Any:
        """Run the schedule while the weighing listens to what the model returns."""
        listening = _Listening(weighing, chunk, call["forward_step_func"])
        with listening:
            return schedule(**{**call, "forward_step_func": listening})

    def _trained(self, terms: dict[str, Weighed]) -> dict[str, Weighed]:
        """Return the terms that are reported."""
        return terms


class _Listening:
    """A script's forward_step_func, while a weighing hears what the model returns in it.

    What the model returns is replaced by what was heard, so that a loss is weighed whether it comes
    from what ``forward_step`` returns or not, and whether the model is called once in it or twice.
    """

    def __init__(self, weighing: Weighing, chunk: Any, forward_step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward_step)
        self._weighing = weighing
        self._forward_step = forward_step
        self._model, self._called = unwrapped(chunk), engine_of(chunk).called
        self._has_losses = LiveGroups.of([chunk]).is_last_stage
        self._packs: dict[str, Any] = {}
        self._logits: tuple[int, ...] = ()
        """Shape of the logits that the model has returned, if it returned no losses."""
        self._microbatch, self._num_heard = -1, 0
        self._is_inside = False

    def __enter__(self) -> None:
        self._handles = [
            self._called.register_forward_pre_hook(self._notes, with_kwargs=True),
            self._called.register_forward_hook(self._hears),
        ]

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _notes(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        packed = [value for value in (*args, *kwargs.values()) if hasattr(value, "cu_seqlens_q")]
        self._packs = {}
        for params in packed:
            padded = getattr(params, "cu_seqlens_q_padded", None)
            offsets = params.cu_seqlens_q if padded is None else padded
            self._packs = {"cu_seqlens": offsets, "cp_group": getattr(params, "cp_group", None)}

    def _hears(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        # Of an interleaved pipeline only the last chunk of the last stage has losses.
        if not (self._has_losses and self._is_inside and are_losses(output)):
            self._logits = tuple(getattr(output, "shape", ()))
            return output
        self._num_heard += 1
        return self._weighing.losses(output, **self._packs, microbatch=self._microbatch)

    def __call__(self, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        is_last = self._has_losses and unwrapped(model) is self._model
        self._microbatch += is_last
        with replaced(self, _is_inside=is_last, _num_heard=0):
            output, loss_func = self._forward_step(data_iterator, model, *args, **kwargs)
            lacks = 0  # losses of a row's last logits, which train_rl.py drops
            if is_last and not self._num_heard:  # the model returns something else
                packs = {**self._packs, "microbatch": self._microbatch}
                if are_losses(output):
                    lacks = int(self._logits[:2] == (*output.shape[:-1], output.shape[-1] + 1))
                heard = self._weighing.losses(pad(output, (0, 1)) if lacks else output, **packs)
                output = heard[:, :-1] if lacks else heard
            mask = _mask_of(loss_func)
            if is_last and mask is not None and self._num_heard < 2:
                self._weighing.has_mask(pad(mask, (0, lacks)))
        return output, loss_func


def _mask_of(loss_func: Any) -> Any:
    """Return the loss mask that a loss_func is bound to, as in Megatron-LM's scripts."""
    if not isinstance(loss_func, functools.partial):
        return None
    try:
        bound = inspect.signature(loss_func.func).bind_partial(
            *loss_func.args, **loss_func.keywords
        )
    except (TypeError, ValueError):
        return None
    mask = bound.arguments.get("loss_mask")
    return mask if isinstance(mask, Tensor) else None


def install(
    at: int, steps: int, *, stop: bool, report: Report, divisor: float | None
) -> ScriptWeighing:
    """Listen in Megatron-LM's schedule in this process; call it before ``pretrain``.

    Raises :class:`ContractError` if ``megatron.training.training`` cannot be imported or does not
    look up the schedule by its name.
    """
    expected = "a Megatron-LM checkout: run in its folder, or put it on PYTHONPATH"
    weighing = ScriptWeighing(at, steps, stop=stop, report=report, divisor=divisor)
    rebind_schedule(_LOOP, weighing, expected=expected)
    return weighing


def rebind_schedule(name: str, weighing: ScriptWeighing, *, expected: str) -> None:
    """Put a weighing around the schedule that a module looks up by its name.

    ``expected``: what the module is of, for the message of the :class:`ContractError` if it cannot
    be imported or does not look up the schedule.
    """
    module = imported(name, expected=expected)
    stock = getattr(module, HOOK, None)
    if stock is None:
        raise ContractError(f"{name} has no {HOOK}, expected {expected}")

    @functools.wraps(stock)
    def get(*args: Any, **kwargs: Any) -> Any:
        return weighing.wrap(stock(*args, **kwargs))

    setattr(module, HOOK, get)
