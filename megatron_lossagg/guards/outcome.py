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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lossagg.errors import say
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import first_time, looks_again, warn_once
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.step_state import Line, StepLog, Term
from megatron_lossagg.weigh.causes import LEAST, constant, equal_to, is_near, written
from megatron_lossagg.weigh.listen import are_losses, listen, weights_of

_FOLLOWED = {
    *("Alias", "Clone", "Div", "Expand", "Mul", "Neg", "ReshapeAlias", "Slice", "Squeeze"),
    *("ToCopy", "Unsqueeze", "UnsafeView", "View", "Where"),
}
"""Operations that keep a loss per token, by their names in the graph, unless they broadcast."""
_MOST_NODES = 16
_UNREAD = object()
"""Stands for what was saved and is not read."""


def nodes_of(made: Any, num_losses: int, *, by_numbers: bool) -> Iterator[tuple[str, Any]]:
    """Yield the nodes from which losses follow token by token, and the name of each.

    ``made``: the node that made them. ``by_numbers``: each of their factors is one number; one that
    is not read is taken for others. No host sync.
    """
    nodes, looked_at = [made], 0
    while nodes and looked_at < _MOST_NODES:
        node, looked_at = nodes.pop(0), looked_at + 1
        if node is None:
            continue
        if math.prod(node._input_metadata[0].shape) < num_losses:  # it is broadcast later
            continue
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        yield kind, node
        if kind not in _FOLLOWED or (by_numbers and _has_a_factor_per_token(node)):
            continue
        nodes += [one for one, _ in node.next_functions]


def divisors_of(losses: Tensor) -> list[Tensor]:
    """Return what losses were divided by, if it is one number: 0-dim. No host sync."""
    found = nodes_of(losses.grad_fn, losses.numel(), by_numbers=False)
    nodes = [node for kind, node in found if kind == "Div"]
    saved = [_saved(node, "other") for node in nodes]
    return [
        one.detach().reshape(()) for one in saved if isinstance(one, Tensor) and one.numel() == 1
    ]


def _has_a_factor_per_token(node: Any) -> bool:
    saved = [_saved(node, name) for name in ("self", "other")]
    return any(one is _UNREAD or (isinstance(one, Tensor) and one.numel() > 1) for one in saved)


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved for its backward pass under a name; None if nothing.

    Or ``_UNREAD``: what a hook has packed (of a checkpoint or an offload), for to unpack it may run
    the model or free it; what was freed; and all that is saved if torch does not say whether it was
    packed. Only ``_raw_saved_*`` says it, from torch 2.13 on; a public name does not exist. Without
    it less is looked at, and nothing else is concluded.
    """
    if not hasattr(type(node), f"_saved_{name}"):
        return None
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)
        packed = getattr(raw, "unpack_hook", _UNREAD)
        return _UNREAD if packed is not None else getattr(node, f"_saved_{name}")
    except RuntimeError:
        return _UNREAD


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
        self.latest: _Output | None = None
        self.node: Any = None

    def __call__(self, chunk: Any, inputs: Any, output: Any) -> None:
        self.forget()
        if are_losses(output):
            heard = _Output(numel=output.numel(), eps=torch.finfo(output.dtype).eps)
            if listen(output, heard.arrived.append):
                self.latest, self.node = heard, output.grad_fn

    def forget(self) -> None:
        """Let the output go."""
        self.latest, self.node = None, None


class _Measured(NamedTuple):
    """A term of losses that may follow from the model's output."""

    line: Line
    term: Term
    microbatch: Microbatch
    output: _Output
    follows: list[bool]
    """Whether they do, by the graph, once a gradient has arrived."""


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
        return all(is_near(one, value, tolerance) for one in (self.lowest, self.highest))


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
        "partly detached. Before torch 2.13 the graph cannot be read, so nothing is said of "
        "losses that were multiplied or divided"
    )
    costs = "in these steps 9 bytes for each token of the step, until it ends, and passes over them"

    def __init__(self, step: StepFacts) -> None:
        self._listener = _Listener()
        handle = step.chunks[-1].register_forward_hook(self._listener)
        self._stop = weakref.finalize(self, handle.remove)
        self._measured: list[_Measured] = []
        self._has_looked = False
        """Whether the graph of the losses of a microbatch was searched for a division."""
        self._ratios: list[float] = []

    @classmethod
    def of(cls, step: StepFacts) -> Outcome | None:
        """Make it for a training step that is weighed."""
        is_module = isinstance(step.chunks[-1], torch.nn.Module)
        return cls(step) if step.is_weighed and is_module else None

    def on_term(
        self, step: StepFacts, line: Line, term: Term, losses: Tensor, microbatch: Microbatch
    ) -> None:
        """Take the model's latest output, if it may be what is reduced."""
        output, node = self._listener.latest, self._listener.node
        is_own = term.aggregation == step.plan.aggregation
        if not (is_own and term.can_be_trained) or term.is_recomputed:
            return
        if output is not None and microbatch.custom is None and not line.layout.is_gathered:
            self._listener.forget()
            if output.numel == losses.numel():
                follows: list[bool] = []
                line.heard = output.arrived
                term.on_arrival = partial(_follows, follows, node, losses.numel())
                self._measured.append(_Measured(line, term, microbatch, output, follows))
        if line.known.counted_tokens and not self._has_looked:
            self._has_looked = True
            if divisors := divisors_of(losses):
                values = [microbatch.keep.sum(), *divisors]
                describe = partial(_find_division, line.known.counted_tokens)
                step.plan.state.faults.record(values, describe)

    def on_finish(self, step: StepFacts) -> str:
        """Compare; the values are read with the step's faults."""
        unit, scale = step.scaling.k * step.scaling.schedule_factor, step.config.grad_scale_func
        found = [
            (one, _ratios(one, unit, scale))
            for one in self._measured
            if one.follows == [True] and _is_alone(one) and not _is_of_earlier_pass(one, step.log)
        ]
        read = [(one, values) for one, values in found if values]
        if read:
            counted = [one.line.known.counted_tokens for one, _ in read]
            tolerance = max(LEAST, *(2 * one.output.eps for one, _ in read))
            describe = partial(self._describe, step, counted, tolerance)
            values = [value for _, values in read for value in values]
            step.plan.state.faults.record(values, describe)
        return ""

    def on_end(self) -> None:
        """Listen no longer."""
        self._stop()
        self._listener.forget()
        for one in self._measured:
            one.term.on_arrival = None
        self._measured = []

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


def _follows(found: list[bool], node: Any, num_losses: int, made: Any) -> None:
    """Note whether losses follow from what a node made, each times one number."""
    each = nodes_of(made, num_losses, by_numbers=True)
    found.append(any(one is node for _, one in each))


def _is_alone(one: _Measured) -> bool:
    """Whether it is the microbatch's only trained term: several add up at the output."""
    terms = (t for t in one.line.terms if t.can_be_trained and not t.is_recomputed)
    return all(term is one.term for term in terms)


def _is_of_earlier_pass(one: _Measured, log: StepLog) -> bool:
    return one.line.number is not None and one.line.number < log.pass_began


def _ratios(one: _Measured, unit: float, scale: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
    """Return of a microbatch the values of :class:`_Found`; empty if nothing arrived."""
    arrived = one.line.heard[one.line.num_early :]
    if not arrived:
        return []
    dtype, device = torch.promote_types(arrived[0].dtype, torch.float32), arrived[0].device
    loss_scale = 1.0 if scale is None else scale(torch.ones((), device=device))
    gradient_T = weights_of(arrived, loss_scale, dtype)
    weight_T = one.microbatch.weights(dtype, device)
    if not len(weight_T):
        return []
    is_weighed_T = weight_T != 0
    ratio_T = gradient_T[: len(weight_T)] / (weight_T * (unit * one.line.coefficient))
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
    lowest, highest = min(one.lowest for one in found), max(one.highest for one in found)
    factor, mode, n = (
        constant(lowest, highest, tolerance),
        step.plan.aggregation.mode,
        step.scaling.active_tokens,
    )
    if factor is not None:
        m, groups = step.scaling.num_microbatches, step.groups
        sizes = {"M": m, "DP": groups.dp_size, "CP": groups.cp_size}
        others = {"N": n} if n else {}
        products = equal_to(factor, sizes, others, tolerance=tolerance, only_products=True)
        if products:
            warn_once(
                "multiplied losses",
                f"each token was trained with {written(factor, products)} times its "
                f"weight of {mode}: the model's losses were multiplied by it {_ENDS}",
            )
    elif all(_is_right_but_for_zeros(one, tolerance) for one in found):
        zero, tokens = sum(one.zero for one in found), sum(one.tokens for one in found)
        warn_once(
            "detached losses",
            f"{zero:.0f} of {tokens:.0f} tokens that {mode} counts were not trained"
            + ", and the others were with their weight" * (zero < tokens)
            + f": the losses of these were detached or multiplied by 0 {_ENDS}",
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
    kept = one.lowest_kept, one.highest
    return one.zero == one.tokens or all(is_near(value, 1, tolerance) for value in kept)
