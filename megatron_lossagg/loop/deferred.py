"""An optimizer step of several schedule calls whose denominator is known after the last of them.

Each call trains the mode's sums with 1 in place of its total: w_s = 1/n_b under ``sample_mean``,
whose total is B. Gradients stay in their buffers until :meth:`Deferred.finish` lets Megatron
finalize them once and multiplies them by what :func:`deferred_factor` returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from numbers import Real
from types import TracebackType
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_lossagg.contract.finalize import HeldGradients
from megatron_lossagg.contract.scaling import MOST_TOKENS_PER_TOKEN, deferred_factor
from megatron_lossagg.contract.side_losses import side_losses_of
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.before import RunFacts
from megatron_lossagg.guards.guard import ScheduleCalls
from megatron_lossagg.loop.step import Step, say_counted
from megatron_lossagg.record.writer import StepRecorder
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.exchange import together
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.modes import MODES, OWN_WEIGHTS
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.sequences import ID_KINDS
from megatron_lossagg.reduction.table import Counted

_SUMS = ("sample_sum", "constant")
"""Modes whose weights do not depend on which sequences are one sample, but for B."""


class Deferred:
    """One optimizer step of any number of schedule calls, made by :meth:`LossAggregator.deferred`.

    For denominators that are known only after the last of them, and data that arrives while earlier
    data trains::

        with aggregator.deferred() as deferred:
            for part in parts:  # as they arrive
                with aggregator.step(active_tokens, num_microbatches=M) as step:
                    ...  # the schedule call
            deferred.finish()  # or finish(total=...); before clipping

    Inside, each training step of the aggregator is one of its calls, and evaluations are as ever.
    Zero the gradients before it, not between calls. Leaving it without :meth:`finish` raises
    :class:`ContractError`. An exception goes through unchanged; then zero the gradients, as after
    a step that failed.
    """

    def __init__(self, run: RunFacts, *, follows: bool) -> None:
        self.follows = follows
        """Whether side losses follow the mode."""
        self._run = run
        self._steps: list[Step] = []
        self._plans: list[StepPlan] = []
        """Of the calls; none on a pipeline stage that computes no loss."""
        self._held: HeldGradients | None = None
        self.is_finished = False
        self.calls = ScheduleCalls()
        """Its training calls, for the guard that looks at the gradients between them."""
        self.recorder: StepRecorder | None = None
        """Of the record's line; None if none is written."""

    def __enter__(self) -> Deferred:
        """Hold back the gradients' reduction; :class:`ContractError` inside a step of the model."""
        self._held = HeldGradients(self._run.chunks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Refuse a step that was not finished, unless an exception ends it."""
        held, self._held = self._held, None
        if held is None or self.is_finished:
            return
        held.release()
        if kind is None:
            raise ContractError(
                "the deferred step was left without its division, with gradients that are not "
                "reduced: call its finish() after the last schedule call, inside the with block"
            )

    @property
    def is_open(self) -> bool:
        """Whether the schedule calls that begin now are its own."""
        return self._held is not None and not self.is_finished

    @property
    def own_finalize(self) -> Any:
        """The config's own finalize function."""
        return self._open.own_finalize

    @property
    def _open(self) -> HeldGradients:
        if self._held is None or self.is_finished:
            raise ContractError(
                "got a deferred step that is not open: write `with aggregator.deferred() as "
                "deferred:` around its schedule calls, and call deferred.finish() once, inside it"
            )
        return self._held

    @property
    def aggregation(self) -> Aggregation | None:
        """Of its earlier calls; None before the first, and without counts."""
        return self._plans[0].aggregation if self._plans else None

    def add(self, step: Step, plan: StepPlan | None) -> None:
        """Note a schedule call that begins."""
        self._steps.append(step)
        self._plans += [] if plan is None else [plan]

    def fault(self) -> str:
        """Say what is wrong with the calls until now, empty if nothing is."""
        held = self._open
        if not all(step.has_passed for step in self._steps):
            return (
                "a schedule call of the deferred step failed or was not finished, so that its "
                "gradients may be incomplete: let the error end the with block of "
                "aggregator.deferred(), zero the gradients, and begin anew"
            )
        if changed := held.changed():
            return (
                f"{changed} was set inside the deferred step, which holds back the reduction by "
                "it: set it before aggregator.deferred()"
            )
        if held.num_calls != len(self._steps):
            return (
                f"the schedule finalized {held.num_calls} times in {len(self._steps)} steps "
                "of the deferred step: run Megatron's schedule once in each aggregator.step(...), "
                "and nowhere else"
            )
        return ""

    def finish(self, total: float | None = None) -> float:
        """Reduce the gradients, once, and divide them; after the last call, before clipping.

        The gradient is that of one step over all sequences of the calls: with N the mode's total,
        ``sum over calls of sum_s w_s sum_t m_t dx_t / total``, where w_s has 1 in place of N.

        Args:
            total: What the mode's total becomes, the same on every rank: N of ``token_mean``, B of
                ``sample_mean``, ``sample_sum``, ``constant``, ``row_mean`` and ``balanced``, P of
                ``prompt_mean``, Z of ``length_power``, C of ``token_sum``. None: what the calls
                counted (of ``token_sum`` its divisor).

        Returns:
            1 / total: multiply by it what the calls reported of their losses.

        Raises:
            ContractError: On every rank, if one rank has a call that failed, if nothing was
                trained, for a total that is no number above 0 or differs between ranks, if a
                sample, prompt or group that the mode, a term or a shadow weighs by has sequences
                in two calls, for a total in place of a C next to which there is another, and if
                side losses would be divided by another number than N. On this rank only if it is
                called twice.

        One all-gather over the world, and the collectives of Megatron's finalize. With
        ``Options.record`` one all-gather over data- and context-parallel ranks.
        """
        held = self._open
        with together(dist.group.WORLD, "divide the deferred step, by its finish()") as ranks:
            ranks.own = self._sent(total)
        found = _Found.of(ranks.of_ranks, total)
        if fault := self._fault_of(found):
            raise ContractError(fault)
        held.finalize(deferred_factor(self._run.loss_scaling, found.total, found.active_tokens))
        self.is_finished = True
        self._record(found)
        return 1 / found.total

    def _fault_of(self, found: _Found) -> str:
        """Say what Megatron would not divide as it should, the same on every rank."""
        n, names = found.active_tokens, side_losses_of(self._run.config)
        if names and found.total != max(n, 1):
            return (
                f"got the total {found.total:g} for {n} active tokens with side losses "
                f"({', '.join(names)}), which would be divided by it too: leave total= out, or "
                "set their coefficients to 0"
            )
        if self._run.loss_scaling == "per_token" and n > MOST_TOKENS_PER_TOKEN:
            return (
                f"the calls have {n} active tokens, Megatron-Core counts them in int32: take fewer "
                "per step, or train without --calculate-per-token-loss"
            )
        return ""

    def _sent(self, total: float | None) -> _Sent:
        """Return what every rank is told of this one; raises :class:`ContractError`."""
        if fault := self.fault() or _fault_of(total, len(self._steps)):
            raise ContractError(fault)
        sent, plans = _Sent(total=total), self._plans
        if not plans:
            return sent
        planned = [one.aggregation for plan in plans for one in plan.planned]
        sent.modes = {one.mode for one in planned}
        sent.divisors = {one.divisor or 1.0 for one in planned if MODES[one.mode].total == "L"}
        sent.mode, of_calls = plans[0].aggregation.mode, [plan.counted_total for plan in plans]
        sent.counted = of_calls[0] if sent.mode == "token_sum" else math.fsum(of_calls)
        sent.active_tokens = sum(plan.totals.active_tokens or 0 for plan in plans)
        groups = self._run.groups
        if groups.cp_rank == 0 and dist.get_rank(groups.tp_group) == 0:
            for kind in ID_KINDS:
                ids = [getattr(plan.counted_sequences, kind) for plan in plans]
                sent.ids[kind] = [np.unique(one_S) for one_S in ids if one_S is not None]
        return sent

    def _record(self, found: _Found) -> None:
        if not self._plans:
            return
        counted = Counted.of_all([plan.counted for plan in self._plans], found.shared)
        plans = [replace(plan, total=found.total) for plan in self._plans]
        say_counted(plans[0], is_first=self._run.groups.is_first, counted=counted)
        if self.recorder is not None:
            first = self._steps[0]
            m = sum(step.num_microbatches for step in self._steps)
            warned = {guard for step in self._steps for guard in step.recorded.get("warned", ())}
            self.recorder.finish(
                plans,
                replace(first.scaling, num_microbatches=m),
                self._run.groups,
                {**first.recorded, "warned": sorted(warned)},
                counted=counted,
                total=found.total,
            )


@dataclass(kw_only=True)
class _Sent:
    """What a rank tells the others at the end."""

    total: float | None
    """As passed."""
    mode: str = ""
    """Empty on a rank without plans."""
    modes: set[str] = field(default_factory=set)
    """This one, and those of terms and shadows."""
    divisors: set[float] = field(default_factory=set)
    """The C of those that have one."""
    counted: float = 0.0
    """The mode's total, of all calls."""
    active_tokens: int = 0
    """N of all calls, what is left out included; 0 if not known, in the average loss scaling."""
    ids: dict[str, list[Ints]] = field(default_factory=dict)
    """Of each kind, those of each call."""


@dataclass(kw_only=True)
class _Found:
    """What the ranks settle together."""

    total: float
    active_tokens: int
    shared: tuple[str, ...]
    """The kinds of ids of which two calls have the same."""

    @staticmethod
    def of(sent: list[_Sent], total: float | None) -> _Found:
        """Settle it, or raise :class:`ContractError`, the same on every rank."""
        for rank, one in enumerate(sent):
            if one.total != sent[0].total:
                raise ContractError(
                    f"got the total {sent[0].total}, on rank {rank} {one.total}, expected "
                    "one number: pass the same total to finish() on every rank"
                )
        known = next(one for one in sent if one.mode)
        shared = tuple(kind for kind in ID_KINDS if _is_shared(kind, sent))
        for mode in (known.mode, *sorted(set[str]().union(*(one.modes for one in sent)))):
            # A term is divided by the step's total, so that its own matters to no weight.
            matter = _kinds_of(mode, is_given=total is not None or mode != known.mode)
            if wrong := [kind for kind in shared if kind in matter]:
                raise ContractError(
                    f"the same {wrong[0]} has sequences in two schedule calls of the "
                    f"deferred step, which reduces under {mode}, whose weights need all of them in "
                    f"one call: train a {wrong[0]} in one call, and pass ids of the whole step"
                )
        divisors = sorted(set[float]().union(*(one.divisors for one in sent)))
        if total is not None and len(divisors) > 1:
            raise ContractError(
                f"got the total {total:g} in place of C in a deferred step that reduces with "
                f"C = {' and '.join(f'{c:g}' for c in divisors)}: leave total= out, or multiply "
                "what one of them returns"
            )
        total = known.counted if total is None else float(total)
        return _Found(total=total or 1.0, active_tokens=known.active_tokens, shared=shared)


def _is_shared(kind: str, sent: list[_Sent]) -> bool:
    """Whether two calls have an id of a kind in common, on any ranks."""
    of_ranks = [one.ids[kind] for one in sent if one.ids.get(kind)]
    of_calls = [np.unique(np.concatenate(of_call)) for of_call in zip(*of_ranks, strict=True)]
    ids = np.concatenate(of_calls) if of_calls else np.zeros(0)
    return len(np.unique(ids)) < len(ids)


def _kinds_of(mode: str, *, is_given: bool) -> tuple[str, ...]:
    """Return the kinds of ids that must lie in one call; ``is_given``: whether the total is."""
    if mode == OWN_WEIGHTS:
        return ID_KINDS
    if is_given and mode in _SUMS:
        return ()
    is_of_samples = MODES[mode].total in ("B", "Z")
    return (*(("sample",) if is_of_samples else ()), *MODES[mode].needs)


def _fault_of(total: object, num_calls: int) -> str:
    """Say what is wrong with what ``finish`` got."""
    is_number = isinstance(total, Real) and not isinstance(total, bool)
    if total is not None and not (is_number and 0 < float(total) < math.inf):  # type: ignore[arg-type]
        return f"got total={total!r}, expected a finite number above 0: pass what is divided by"
    if not num_calls:
        return (
            "got a deferred step without schedule calls, expected one or more: call "
            "aggregator.step(...) inside it"
        )
    return ""
