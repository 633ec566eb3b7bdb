"""One microbatch on this rank: from its mask to weights, from per-token losses to a partial loss.

A partial loss is the sum over the tokens that this rank holds of this microbatch::

    partial_loss = sum_t w_{s(t)} * m_t * v_t * x_t

where v_t is 1 unless the aggregation counts token weights.

Partial losses add up: over microbatches, context-parallel ranks and data-parallel ranks their sum
is the step's loss, for any parallelism. Nothing here knows a mode, a rank or a denominator: weights
come from the plan, tokens from the mask. The code is the same for a mask on any device.

What is usual is tested in one expression. Only if that fails a function of ``checks`` runs, which
knows what is wrong and says it, or finds that nothing is.

Shape suffixes: P = positions of the whole mask; T = tokens that this rank holds of the microbatch;
G = its segments; S = sequences of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation, ReducerContext, load_reducer_factory
from megatron_lossagg.reduction.checks import (
    MASK_DTYPES,
    check_finite,
    check_mask,
    check_token_weights,
    checked_losses,
    checked_mask,
    checked_partial_loss,
    checked_sequences,
    checked_weights,
)
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.integers import Ints, IntsLike
from megatron_lossagg.reduction.layout import PADDING, Layout, SegmentSums, held
from megatron_lossagg.reduction.step_state import Known, Line, StepLog, Term

if TYPE_CHECKING:
    from megatron_lossagg.reduction.plan import StepPlan

Means = Mapping[str, "tuple[Tensor, Tensor | float]"]
"""Local sums with their counts, by name."""
Outputs = tuple[Tensor, Tensor, dict[str, Tensor]]
"""What loss_func returns: loss, num_tokens, report."""

_SUMMED = {
    torch.float16: (torch.int16, torch.float32),
    torch.bfloat16: (torch.int16, torch.float32),
    torch.float32: (torch.int32, torch.float32),
    torch.float64: (torch.int64, torch.float64),
}
"""Of losses in a dtype: the integer of as many bytes, and the dtype in which they are summed."""
_in_backward = torch._C._current_graph_task_id
"""Of the backward pass that runs, whose checkpoints call loss_func again; below 0 if none does."""


class RunningStep(Protocol):
    """The step that made a microbatch with ``step.microbatch``, as far as the microbatch knows."""

    shadows: Mapping[str, Aggregation]
    evaluates: bool

    def _outputs(
        self,
        microbatch: Microbatch,
        loss: Tensor,
        report: Mapping[str, Tensor],
        means: Means,
        coefficient: float,
    ) -> Outputs: ...

    def _only_shadowed(self, microbatch: Microbatch) -> None: ...

    def _shadow_reports(self, shadows: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class _MaskedSum(torch.autograd.Function):
    """sum_t w_t x_t over the kept tokens: ``kept_T`` is x with 0 where the mask is.

    The gradient is w itself, which is 0 where a token is not kept: the backward pass is one
    product. It notes in ``log`` what arrives at ``term``.
    """

    @staticmethod
    def forward(
        ctx: Any, x_T: Tensor, kept_T: Tensor, weight_T: Tensor, log: StepLog | None, term: Any
    ) -> Tensor:
        ctx.save_for_backward(weight_T)
        ctx.log, ctx.term = log, term
        return (kept_T * weight_T).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight_T,) = ctx.saved_tensors
        if ctx.log is not None:
            ctx.log.arrived(ctx.term, gradient, ctx.next_functions[0][0])
        # autograd casts it to the dtype of x
        return gradient * weight_T, None, None, None, None


@dataclass(kw_only=True, eq=False)
class Microbatch:
    """One microbatch on this rank, which turns its per-token losses into a partial loss.

    ``step.microbatch`` makes it; without a step, and for frameworks that scale a loss themselves,
    ``StepPlan.reducer``. Reducing costs the same number of operations for 1 and for 1,000
    sequences, and no collective.
    """

    plan: StepPlan
    line: Line
    """What the step's guards read of it."""
    keep: Tensor
    """bool ``[T]``, on the mask's device: the loss mask of the tokens this rank holds."""
    num_past_end: int
    """Mask positions past the last segment: as many losses may follow this rank's."""
    token_weights: Tensor | None = None
    """v_t of the same tokens, on the mask's device; None if the plan has none."""
    custom: Callable[[Tensor], Tensor] | None = None
    step: RunningStep | None = None
    """Whose ``microbatch`` made it; None: the plan did."""
    _keep_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    _weights: dict[tuple[Aggregation, torch.dtype, torch.device], Tensor] = field(
        default_factory=dict, repr=False
    )
    _shadows: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """What shadows give for the losses that were reduced first."""
    _others: list[Tensor] = field(default_factory=list, repr=False)
    """In an evaluation, partial losses under another aggregation than the step's."""

    @staticmethod
    def of(
        plan: StepPlan,
        sequences: IntsLike,
        mask: Tensor,
        layout: Layout,
        token_weights: Tensor | None = None,
        step: RunningStep | None = None,
    ) -> Microbatch:
        """Check sequences and mask and slice the mask; see ``StepPlan.reducer``.

        Raises :class:`ReducerError`. No collective. No host sync, unless ``sequences`` is a CUDA
        tensor.
        """
        planned, state = plan.sequences, plan.state
        if (token_weights is None) != (planned.token_weight_sums is None):
            raise ReducerError(
                f"got {'no ' if token_weights is None else ''}token_weights= in a plan with "
                f"{'no ' if token_weights is not None else ''}token_weight_sums: pass both, or "
                "neither and count the mask"
            )
        known = state.known.get(sequences) if type(sequences) is range else None
        if known is None or len(known.sequences) != layout.num_segments:
            known = _known(plan, sequences, layout)
        is_usual_mask = (
            type(mask) is Tensor
            and mask.dtype in MASK_DTYPES
            and mask.dim() == 1
            and not mask.requires_grad
            and mask.shape[0] == layout.num_tokens
        )
        mask_P = mask if is_usual_mask else checked_mask(mask, layout)
        keep_P = mask_P == 1  # of a bool mask a copy, for the caller may use its memory again
        nonzero = None if mask_P.dtype is torch.bool else mask_P.count_nonzero()
        trained = SegmentSums.of(keep_P, layout, torch.int32)
        line = Line(
            known=known,
            layout=layout,
            planned=planned,
            rejects_tokens=state.rejects_tokens,
            is_of_step=step is not None,
            trained=trained,
        )
        # A place of 0, whose sum may be anything, is the first, and others of empty first segments.
        # Last positions are those of sequences.
        end = 2 * layout.num_segments + 2 if layout.is_whole else layout.num_segments + 2
        if (
            keep_P.device.type != "cpu"
            or trained.place_N[1] == 0
            or trained.at_N.numpy()[1:end].tobytes() != known.expected[: 4 * end - 4]
            or (nonzero is not None and nonzero.numpy() != known.counted_tokens)
        ):
            check_mask(mask_P, keep_P, nonzero, line, state.faults)
        microbatch = Microbatch(
            plan=plan,
            line=line,
            keep=held(keep_P, layout),
            num_past_end=mask_P.shape[0] - layout.num_tokens,
            step=step,
        )
        if token_weights is not None:
            weight_P = checked_weights(token_weights, mask)
            microbatch.token_weights, line.trained_weights = check_token_weights(
                weight_P, mask_P, microbatch.keep, line, state.faults
            )
        if plan.aggregation.reducer_path is not None:
            microbatch.custom = microbatch._custom(plan.aggregation.reducer_path)
        return microbatch

    def _custom(self, path: str) -> Callable[[Tensor], Tensor]:
        """Make the reducer that a path leads to."""
        custom = load_reducer_factory(path)(
            ReducerContext(
                plan=self.plan, sequences=self.sequences, mask=self.keep, layout=self.layout
            )
        )
        if not callable(custom):
            raise ReducerError(
                f"the reducer factory returned {custom!r}: return a callable that takes this "
                "rank's per-token losses and returns a 0-dim partial loss"
            )
        return custom

    @property
    def sequences(self) -> Ints:
        """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
        return self.line.known.sequences

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self.line.layout

    @property
    def counted_tokens(self) -> int:
        """Active tokens of this microbatch by the plan's count, complete over CP."""
        return self.line.known.counted_tokens

    def reduce(self, losses: Tensor, aggregation: Aggregation | str | None = None) -> Tensor:
        """Sum w m v x over the tokens this rank holds: a 0-dim partial loss.

        ``losses``: this rank's per-token losses x in the layout's order, any floating dtype, with
        as many elements as the layout has local tokens, or as the mask if they are gathered (tokens
        past the last segment weigh 0); if two-dimensional, each row begins with a segment. Returns
        a 0-dim partial loss in float32, or float64 if x is float64, connected to the graph of x
        even if no token is active. Masked positions of x may hold inf or NaN: neither the partial
        loss nor its gradient with respect to x sees them. ``aggregation``: another mode over the
        same tokens, without a collective; its weights are computed once per step. A microbatch is
        called like this too: ``mb(losses)``.

        A loss that the mask keeps and that is not finite raises :class:`ReducerError`, which
        names its sequence and token: immediately on the CPU, when the step finishes on a device.

        While a step runs, its guards read of the call when the step ends. A partial loss that can
        be trained raises if its plan is not the step's. The first call under the step's own
        aggregation is what ``Options.shadow`` reports.
        """
        if torch.compiler.is_compiling():
            from megatron_lossagg.reduction import untraced

            return untraced.reduce(self, losses, aggregation)
        own = self if aggregation is None else self.under(aggregation)
        plan, line = own.plan, own.line
        state, layout = plan.state, line.layout
        is_usual = (
            type(losses) is Tensor
            and losses.dtype in _SUMMED
            and losses.dim() == 1
            and losses.shape[0] == layout.num_local_tokens
            and not layout.is_gathered
        )
        x_T = losses if is_usual else own._local_losses(losses)
        log = state.log
        term = Term(
            aggregation=plan.aggregation,
            is_recomputed=_in_backward() >= 0,
            num_returned=0 if log is None else len(log.returned),
            has_gradient=losses.requires_grad,
        )
        custom = own.custom
        if custom is None:
            partial_loss, kept_T = own._masked_sum(x_T, log, term)
        else:
            partial_loss, kept_T = own._custom_sum(custom, x_T, log, term)
        if custom or kept_T.device.type != "cpu" or not math.isfinite(partial_loss.item()):
            is_custom = custom is not None
            check_finite(partial_loss, kept_T, line, state.faults, is_custom=is_custom)
        if log is None:
            state.check_running(partial_loss)
            return partial_loss
        term.can_be_trained = partial_loss.requires_grad
        if term.can_be_trained and log.trains:
            term.value = partial_loss.detach()
            term.version = term.value._version
            # Freed addresses come back, a weak reference does not.
            storage = StorageWeakRef(losses.untyped_storage())  # type: ignore[no-untyped-call]
            place = losses.storage_offset(), losses.shape, losses.stride()
            term.losses = storage, *place, losses._version
        log.add(line, term, plan)
        if log.on_term is not None:
            log.on_term(line, term, losses, own)
        step = self.step
        if step is not None and (step.shadows or step.evaluates):
            if plan.aggregation != log.aggregation:
                self._others += [partial_loss] if step.evaluates else []
            elif not self._shadows:
                self._shadows.update(self._shadowed(losses))
        return partial_loss

    __call__ = reduce

    def outputs(
        self,
        loss: Tensor,
        report: Mapping[str, Tensor] | None = None,
        means: Means | None = None,
        *,
        coefficient: float = 1.0,
    ) -> Outputs:
        """Make what loss_func returns: ``(loss, num_tokens, report)``.

        ``loss``: 0-dim, the sum of all terms' partial losses. ``report``: partial losses by name.
        ``means``: local sums with their counts by name, of what is a mean already (clip fraction,
        reward): Megatron adds both over the step and divides, so one mean over the step is logged.
        ``coefficient``: what multiplies the partial loss under the step's own aggregation in
        ``loss``, such as 0.5 for ``0.5 * mb.reduce(value_losses)``. It changes no number: the step
        refuses a partial loss that arrives in the backward pass with another one. Do not divide by
        M, DP, CP or a number of tokens: K compensates what Megatron does.

        The loss is ``loss * K`` in fp32 or better with storage of its own (the schedule scales it
        in place); num_tokens an int32 0-dim tensor on its device, in the average loss scaling one
        for the whole step; each report a detached ``[partial loss, 1 / (M DP CP)]``; each mean a
        detached ``[sum, count]``. Adds ``lossagg/weight_sum`` and ``lossagg/weight_expected``. The
        weight-sum check sees the weights as sliced and masked, not what is done to a partial loss
        afterwards. No collective, no host sync.

        In a ``forward_only`` step both entries of a report are times D, the total of the step's
        mode (N, B, P or Z): added over evaluation steps they divide to the mode's loss over all
        that was evaluated. D is 1 for a mode without a total, and for what :meth:`reduce` returned
        under another aggregation: that is a mean over the steps, as under ``token_sum``. It is told
        by its memory: ``2 * it``, its clone, or a sum with it is a mean weighted by D.

        Raises :class:`ContractError` if :meth:`reduce` was not called under the step's aggregation
        for a microbatch with tokens, if this is of another step or of :meth:`under`, and if the
        loss needs no gradient in a training step. In a ``forward_only`` step it is detached. Raises
        :class:`ReducerError` if the plan made it, and no step did.
        """
        if torch.compiler.is_compiling():
            from megatron_lossagg.reduction import untraced

            return untraced.outputs(self, loss, report, means, coefficient=coefficient)
        step = self.step or self._no_step()
        made = step._outputs(self, loss, report or {}, means or {}, coefficient)
        if self._shadows:
            made[2].update(step._shadow_reports(self._shadows))
        return made

    def shadow(self, losses: Tensor) -> dict[str, Tensor]:
        """Report what each mode of ``Options.shadow`` would give for losses that others train.

        In place of :meth:`outputs`: the step checks at its end what it checks of a trained one.
        """
        if torch.compiler.is_compiling():
            from megatron_lossagg.reduction import untraced

            return untraced.shadow(self, losses)
        step = self.step or self._no_step()
        shadows = self._shadowed(losses)
        step._only_shadowed(self)
        return step._shadow_reports(shadows)

    def under(self, aggregation: Aggregation | str) -> Microbatch:
        """Return the same tokens under another aggregation, without a collective.

        The weights are computed once per step and aggregation.
        """
        return replace(self, plan=self.plan.under(aggregation), custom=None)

    def weights(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return w m v of each token this rank holds, ``[T]``; made once for a dtype and device.

        ``dtype``: float32 or float64. Of a mode, not of a custom reducer. No host sync.
        """
        plan = self.plan
        key = plan.aggregation, dtype, device
        weight_T = self._weights.get(key)
        if weight_T is not None:
            return weight_T
        known, layout = self.line.known, self.line.layout
        keep_T = self.keep if device == self.keep.device else self.keep_on(device)
        weight_S1, single = plan.weights_in(dtype)
        if single is not None and len(known.own) == len(known.sequences):
            # Sequences without tokens train nothing, so one weight serves for all that is kept.
            weight_T = torch.mul(keep_T, single)
        else:
            weight_G = weight_S1[known.sequences]
            weight_T = from_numpy(np.repeat(weight_G[layout.segment_R], layout.length_R), device)
            weight_T = weight_T.mul_(keep_T)
        if plan.aggregation.count == "weights":
            assert self.token_weights is not None
            weight_T = weight_T.mul_(moved(self.token_weights, device).to(dtype))
        self._weights[key] = weight_T
        return weight_T

    def keep_on(self, device: torch.device) -> Tensor:
        """Return ``keep`` on a device; copied there once."""
        if device == self.keep.device:
            return self.keep
        if device not in self._keep_on:
            self._keep_on[device] = moved(self.keep, device)
        return self._keep_on[device]

    def weight_sum(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Sum w m v over the tokens this rank holds, 0-dim: for the weight-sum check.

        ``dtype``: of the weights that are summed; None for those that losses were reduced with,
        whose sum is in float32. None for a custom reducer, whose weights are its own.
        """
        if self.custom is not None:
            return None
        weight_T = None
        if dtype is None:
            for (aggregation, _, _), made_T in self._weights.items():
                if aggregation == self.plan.aggregation:
                    weight_T = made_T
                    break
        if weight_T is None:
            weight_T = self.weights(dtype or torch.float32, self.keep.device)
        weight_sum = weight_T.sum()
        return weight_sum if weight_sum.dtype is dtype else weight_sum.to(dtype or torch.float32)

    def _masked_sum(
        self, x_T: Tensor, log: StepLog | None = None, term: Term | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the partial loss, and the losses with 0 where none is kept.

        A masked token may hold inf or NaN, and inf * 0 is NaN. So the bits of a loss, as an
        integer, are multiplied by 0 or 1: on a CPU several times as fast as ``torch.where``, and on
        a device one kernel instead of two.
        """
        bits, dtype = _SUMMED[x_T.dtype]
        keep_T = self.keep if x_T.device == self.keep.device else self.keep_on(x_T.device)
        kept_T = (x_T.detach().view(bits) * keep_T).view(x_T.dtype)
        if x_T.dtype is not dtype:
            kept_T = kept_T.to(dtype)
        weight_T = self.weights(dtype, x_T.device)
        partial_loss: Tensor = _MaskedSum.apply(x_T, kept_T, weight_T, log, term)  # type: ignore[no-untyped-call]
        return partial_loss, kept_T

    def _custom_sum(
        self, custom: Callable[[Tensor], Tensor], x_T: Tensor, log: StepLog | None, term: Term
    ) -> tuple[Tensor, Tensor]:
        """Return likewise what a custom reducer makes of them."""
        kept_T = torch.where(self.keep_on(x_T.device), x_T, 0).to(_SUMMED[x_T.dtype][1])
        path = self.plan.aggregation.reducer_path
        partial_loss = checked_partial_loss(custom(kept_T), path)
        if log is not None and partial_loss.requires_grad:
            partial_loss.register_hook(partial(log.arrived, term))  # type: ignore[no-untyped-call]
        return partial_loss, kept_T

    def _local_losses(self, x: Tensor) -> Tensor:
        layout = self.line.layout
        x_T = checked_losses(x, layout, self.num_past_end)
        return held(x_T, layout) if layout.is_gathered else x_T

    def others_in(self, report: Mapping[str, Tensor]) -> list[str]:
        """Name the partial losses of a report under another aggregation, detached or not."""
        others = {other.untyped_storage().data_ptr() for other in self._others}
        each = report.items() if others else ()
        return [name for name, value in each if value.untyped_storage().data_ptr() in others]

    def shadow_of(self, losses: Tensor, aggregation: Aggregation) -> Tensor:
        """Sum what another aggregation would train: no gradient, not checked, not noted.

        ``losses``: as in :meth:`reduce`. Returns a 0-dim partial loss. No collective, no host sync.
        """
        return self.under(aggregation)._masked_sum(self._local_losses(losses.detach()))[0]

    def _shadowed(self, losses: Tensor) -> dict[str, Tensor]:
        """Sum the losses under each shadow's mode."""
        shadows = {} if self.step is None else self.step.shadows
        return {name: self.shadow_of(losses, mode) for name, mode in shadows.items()}

    @staticmethod
    def _no_step() -> NoReturn:
        raise ReducerError(
            "got a microbatch that StepPlan.reducer made, which belongs to no step: make it with "
            "step.microbatch(...), or return its partial loss as your framework does"
        )


def _known(plan: StepPlan, sequences: IntsLike, layout: Layout) -> Known:
    """Return what is known of a microbatch's sequences; check them if they were not planned so."""
    known, planned = plan.state.known, plan.sequences
    if not known:
        for own in planned.in_order:
            sequence_G = np.frombuffer(own, dtype=np.int64)
            known[own] = found = _counted(plan, sequence_G)
            if sequence_G[-1] - sequence_G[0] + 1 == len(sequence_G):
                known[range(sequence_G[0], sequence_G[-1] + 1)] = found
    if type(sequences) is list:
        with suppress(ValueError):  # of a ragged list, which is said below
            given = np.array(sequences)
            planned_so = known.get(given.tobytes()) if given.dtype == np.int64 else None
            if planned_so is not None and given.shape == (layout.num_segments,):
                return planned_so
    sequence_G = checked_sequences(sequences, layout, planned)
    return known.get(sequence_G.tobytes()) or _counted(plan, sequence_G)


def _counted(plan: StepPlan, sequence_G: Ints) -> Known:
    """Look up the counts of a microbatch's sequences, which are of the step or -1."""
    counted_G = plan.active_tokens_S1[sequence_G]
    up_to_G = np.add.accumulate(counted_G)
    return Known(
        sequences=sequence_G,
        own=sequence_G if PADDING not in sequence_G else sequence_G[sequence_G != PADDING],
        counted=counted_G,
        counted_tokens=int(up_to_G[-1]) if len(up_to_G) else 0,
        expected=np.concatenate([up_to_G, up_to_G[-1:], up_to_G]).astype(np.int32).tobytes(),
    )
