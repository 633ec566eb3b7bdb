"""Which weight each of the model's per-token losses was trained with, measured.

If the model returns a loss per token, as with labels, what arrives there in the backward pass is
compared with what a right step gives, for each token t that the mode weighs::

    r_t = gradient / (K * schedule factor * loss scale * w_t * coefficient)

It is 1 if the model's losses are what ``mb.reduce`` gets. Factors of the losses show in r_t:
importance ratios and advantages, and what a ported loss_func divides by or detaches. So a value
is no fault by itself; what no such factor explains is a warning. A division by a count is looked
for in the graph too, of any losses.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.errors import say
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.guards.loss_graph import divisors_of, nodes_of
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import first_time, looks_again, warn_once
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.reducer import Reducer
from megatron_lossagg.weigh.listen import is_in_backward, listen
from megatron_lossagg.weigh.ratios import equal_products

_TOLERANCE = 1e-5
_ENDS = "before mb.reduce; ignore this if that is meant"
_MOST_M = 8
"""Numbers of microbatches for which a first step is weighed."""


class WeighedSteps:
    """Which training steps of a run are weighed.

    Steps 1, 2, 4, ..., 64 and each 64th, the first under an aggregation, and the first with a
    number of microbatches, for eight of these.
    """

    def __init__(self) -> None:
        self._number = 0
        self._aggregations: set[Aggregation] = set()
        self._sizes: set[int] = set()

    def has_next(self, plan: StepPlan | None, num_microbatches: int) -> bool:
        """Whether the next training step is weighed; ``plan``: None if it has no loss here."""
        if plan is None:
            return False
        self._number += 1
        aggregation = plan.aggregation
        is_new = aggregation not in self._aggregations
        self._aggregations.add(aggregation)
        if num_microbatches not in self._sizes and len(self._sizes) < _MOST_M:
            self._sizes.add(num_microbatches)
            is_new = True
        return is_new or looks_again(self._number)


@dataclass(kw_only=True, eq=False)
class _Output:
    """What a model returned for a microbatch, without keeping it."""

    numel: int
    eps: float
    arrived: list[Tensor] = field(default_factory=list)
    """The gradients."""


class _Listener:
    """A forward hook of a chunk: the latest output that can be a loss per token."""

    def __init__(self) -> None:
        self._latest: _Output | None = None
        self._node: Any = None

    def __call__(self, chunk: Any, inputs: Any, output: Any) -> None:
        self.forget()
        if not isinstance(output, Tensor) or output.dim() > 2 or not output.is_floating_point():
            return
        heard = _Output(numel=output.numel(), eps=torch.finfo(output.dtype).eps)
        if listen(output, heard.arrived):
            self._latest, self._node = heard, output.grad_fn

    def taken(self, losses: Tensor) -> _Output | None:
        """Return the latest output, once, if losses follow from it, each times one number."""
        latest, node = self._latest, self._node
        self.forget()
        if latest is None or latest.numel != losses.numel():
            return None
        follows = any(one is node for _, one in nodes_of(losses, by_numbers=True))
        return latest if follows else None

    def forget(self) -> None:
        """Let the output go."""
        self._latest, self._node = None, None


@dataclass(kw_only=True, eq=False)
class _Microbatch:
    output: _Output
    reducer: Reducer
    coefficient: float = 1.0
    is_returned: bool = False
    """Whether loss_func has returned for it."""


class _Found(NamedTuple):
    """The weights of a microbatch, relative to those of the mode."""

    counted: int
    """Active tokens of its sequences."""
    lowest: float
    highest: float
    lowest_kept: float
    """Of those that are not 0."""
    zero: float
    """Tokens with a weight of 0 that the mode weighs."""
    tokens: float
    """Tokens that the mode weighs."""

    def is_all(self, value: float, tolerance: float) -> bool:
        """Whether the weight of each token is a value."""
        return max(abs(self.lowest - value), abs(self.highest - value)) <= tolerance * abs(value)


class Outcome(Guard):
    """Measure which weight each token of the model's output was trained with, in some steps.

    Where the model returns a loss per token, and what is reduced follows from it token by token,
    each times one number, in one term. It warns of a number that is a product of M, DP, CP, N or
    its microbatch's tokens, and if some losses have no gradient while the others are right. Of
    any losses it warns if those of the first microbatch were divided by a count of it.
    """

    catches = (
        "as warnings, in steps 1, 2, 4, ..., 64 and each 64th of a run, and after the mode or the "
        "number of microbatches changed: losses divided by their microbatch's tokens before "
        "mb.reduce; where the model returns a loss per token, those divided by M, DP, CP or N, or "
        "partly detached. Before torch 2.13, of which the graph cannot be read, nothing is said of "
        "losses that were multiplied or divided"
    )
    costs = "in these steps 9 bytes for each token of the step, until it ends, and passes over them"

    def __init__(self, step: StepFacts) -> None:
        self._listener = _Listener()
        handle = step.chunks[-1].register_forward_hook(self._listener)
        self._stop = weakref.finalize(self, handle.remove)
        self._microbatches: dict[object, _Microbatch | None] = {}
        """None: of other losses, or of several terms, which add up at the output."""
        self._has_looked = False
        """Whether the graph of the losses of a microbatch was searched for a division."""
        self._ratios: list[float] = []

    @classmethod
    def of(cls, step: StepFacts) -> Outcome | None:
        """Make it for a training step that is weighed."""
        is_module = isinstance(step.chunks[-1], torch.nn.Module)
        return cls(step) if step.is_weighed and is_module else None

    def on_reduce(
        self, step: StepFacts, reducer: Reducer, losses: Tensor, partial_loss: Tensor
    ) -> None:
        """Take the model's latest output, if it is what is reduced."""
        if not partial_loss.requires_grad or is_in_backward():
            return
        found, key = None, reducer.microbatch.identity
        is_own = reducer.plan.aggregation == step.plan.aggregation
        is_measurable = is_own and reducer.custom is None and not reducer.layout.is_gathered
        if is_measurable and key not in self._microbatches:
            output = self._listener.taken(losses)
            found = None if output is None else _Microbatch(output=output, reducer=reducer)
        self._microbatches[key] = found
        if is_own and reducer.counted_tokens and not self._has_looked:
            self._has_looked = True
            if divisors := divisors_of(losses):
                values = [reducer.microbatch.keep.sum(), *divisors]
                describe = partial(_find_division, reducer.counted_tokens)
                step.plan.state.faults.record(values, describe)

    def on_first_outputs(self, step: StepFacts) -> None:
        """Forget an earlier pass over the step."""
        kept = self._microbatches.items()
        self._microbatches = {k: one for k, one in kept if one is None or not one.is_returned}

    def on_outputs(
        self, step: StepFacts, reducer: Reducer, loss: Tensor, coefficient: float
    ) -> None:
        """Note the declared coefficient; what has arrived before is not trained."""
        if (found := self._microbatches.get(reducer.microbatch.identity)) is not None:
            found.coefficient, found.is_returned = coefficient, True
            found.output.arrived.clear()

    def on_finish(self, step: StepFacts) -> str:
        """Compare; the values are read with the step's faults."""
        unit, scale = step.scaling.k * step.scaling.schedule_factor, step.config.grad_scale_func
        measured = [one for one in self._microbatches.values() if one is not None]
        found = [(one, _ratios(one, unit, scale)) for one in measured]
        read = [(one, values) for one, values in found if values]
        if read:
            counted = [one.reducer.counted_tokens for one, _ in read]
            tolerance = max(_TOLERANCE, *(2 * one.output.eps for one, _ in read))
            describe = partial(self._describe, step, counted, tolerance)
            values = [value for _, values in read for value in values]
            step.plan.state.faults.record(values, describe)
        return ""

    def on_end(self) -> None:
        """Listen no longer."""
        self._stop()
        self._listener.forget()
        self._microbatches = {}

    def recorded(self) -> Mapping[str, Any]:
        """Return the smallest and the largest weight over that of the mode, of this rank."""
        return {"ratios": self._ratios} if self._ratios else {}

    def _describe(
        self, step: StepFacts, counted: list[int], tolerance: float, values: list[float]
    ) -> str:
        read = [_Found(one, *values[5 * i : 5 * i + 5]) for i, one in enumerate(counted)]
        found = [one for one in read if one.tokens and math.isfinite(one.lowest + one.highest)]
        if not found:
            return ""
        mode = step.plan.aggregation.mode
        lowest, highest = min(one.lowest for one in found), max(one.highest for one in found)
        self._ratios = [float(f"{lowest:.6g}"), float(f"{highest:.6g}")]
        if step.groups.is_first and first_time(f"weights of {mode}"):
            tokens = sum(one.tokens for one in found)
            say(
                f"this rank's {tokens:.0f} tokens were trained with the weight of {mode}, times "
                f"{lowest:.6f} to {highest:.6f} at the model's losses"
            )
        _warn_of(step, found, tolerance)
        return ""


def _ratios(
    one: _Microbatch, unit: float, scale: Callable[[Tensor], Tensor] | None
) -> list[Tensor]:
    """Return of a microbatch the values of :class:`_Found`; empty if nothing arrived."""
    if not one.output.arrived:
        return []
    gradient_T = torch.stack(one.output.arrived).sum(dim=0).reshape(-1)
    if scale is not None:
        gradient_T = gradient_T / scale(torch.ones((), device=gradient_T.device))
    dtype = torch.promote_types(gradient_T.dtype, torch.float32)
    weight_T = one.reducer.weights(dtype, gradient_T.device)
    if not len(weight_T):
        return []
    is_weighed_T = weight_T != 0
    ratio_T = gradient_T[: len(weight_T)] / (weight_T * (unit * one.coefficient))
    is_kept_T = is_weighed_T & (ratio_T != 0)
    return [
        torch.where(is_weighed_T, ratio_T, torch.inf).min(),
        torch.where(is_weighed_T, ratio_T, -torch.inf).max(),
        torch.where(is_kept_T, ratio_T, torch.inf).min(),
        (is_weighed_T & ~is_kept_T).sum(),
        is_weighed_T.sum(),
    ]


def _warn_of(step: StepFacts, found: Sequence[_Found], tolerance: float) -> None:
    """Warn, once per process, of numbers that a weight holds already, and of missing tokens."""
    if all(one.is_all(1, tolerance) for one in found):
        return
    counts = [next((c for c in (one.tokens, one.counted) if c and one.is_all(1 / c, tolerance)), 0)
              for one in found]  # fmt: skip
    if all(counts):
        _warn_of_division(counts[0])
        return
    first, mode, n = found[0].lowest, step.plan.aggregation.mode, step.scaling.active_tokens
    if first and all(one.is_all(first, tolerance) for one in found):
        m, groups = step.scaling.num_microbatches, step.groups
        sizes = {"M": m, "DP": groups.dp_size, "CP": groups.cp_size}
        others = {"N": n} if n else {}
        if products := equal_products(first, sizes, others, tolerance=tolerance):
            warn_once(
                "multiplied losses",
                f"each token was trained with {first:.6g} = {products[0]} times its weight of "
                f"{mode}: the model's losses were multiplied by it {_ENDS}",
            )
    elif all(_is_right_but_for_zeros(one, tolerance) for one in found):
        zero, tokens = sum(one.zero for one in found), sum(one.tokens for one in found)
        warn_once(
            "detached losses",
            f"{zero:.0f} of {tokens:.0f} tokens that {mode} counts were not trained, and the "
            "others were with their weight: the losses of these were detached or multiplied by 0 "
            + _ENDS,
        )


def _find_division(counted: int, values: list[float]) -> str:
    kept, *divisors = values
    for count in {counted, kept} & {*divisors} - {0, 1}:
        _warn_of_division(count)
    return ""


def _warn_of_division(count: float) -> None:
    warn_once(
        "divided losses",
        f"losses were divided by {count:g}, the active tokens of their microbatch, {_ENDS}: the "
        "weights hold every denominator",
    )


def _is_right_but_for_zeros(one: _Found, tolerance: float) -> bool:
    if one.zero == one.tokens:
        return True
    return abs(one.lowest_kept - 1) <= tolerance and abs(one.highest - 1) <= tolerance
