"""What is heard while a step runs: gradients at losses, of which calls, and what a step has told.

A step of this package calls :func:`tell` for each microbatch, and nobody may listen; neither is
imported here. An integration that plans steps by itself calls it too, or leaves its aggregation
here and ids in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.integers import IntsLike


def is_in_backward() -> bool:
    """Whether a backward pass runs, so that what is called now is a recomputation."""
    return bool(torch._C._current_graph_task_id() >= 0)


def are_losses(losses: Any) -> bool:
    """Whether something can be the losses of tokens."""
    return (
        isinstance(losses, Tensor) and losses.dim() in (1, 2) and bool(losses.is_floating_point())
    )


def listen(tensor: Tensor, keep: Callable[[Tensor], None]) -> bool:
    """Call ``keep`` with a copy of each gradient that arrives at a tensor with a graph.

    Whatever is done to the tensor in place afterwards, and not what ``torch.autograd.grad`` is
    asked for there, which trains nothing: the hook is the node's that made it. Returns whether it
    has such a node. No host sync.
    """
    node = tensor.grad_fn
    if node is not None:
        node.register_prehook(partial(_keep, keep, tensor.output_nr))
    return node is not None


def _keep(keep: Callable[[Tensor], None], number: int, gradients: Sequence[Tensor | None]) -> None:
    gradient = gradients[number]
    if gradient is not None:
        keep(gradient.detach().clone())


def weights_of(gradients: Sequence[Tensor], scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return g_t, ``[T]``: the sum of what arrived at losses, over the loss scale; no host sync."""
    return torch.stack([one.to(dtype) for one in gradients]).sum(dim=0).reshape(-1) / scale


listening: list[Callable[[Any, Any, Any], None]] = []
"""Called with a plan, a microbatch if there is one, and the positions of its sequences."""
own: list[Any] = []
"""The aggregation of an integration whose plan is not told."""


def tell(plan: Any, microbatch: Any, numbers: Any) -> None:
    """Tell who listens of a microbatch."""
    for one in listening:
        one(plan, microbatch, numbers)


_NAMED = (
    "pass microbatch= to each call, whose sequences are then further ones; the same tokens in a "
    "second term have term= of their own"
)


class Arrived:
    """The gradients that arrived at losses, each with the number of its backward pass."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.passes: list[tuple[int, Tensor]] = []
        self.kept_none: set[int] = set()
        """Those that add nothing to the first leaf below: of ``torch.autograd.grad``, or of a
        ``backward(inputs=)`` without it."""
        self._leaf, self._then = None, then

    def listen(self, losses: Tensor) -> None:
        """Listen at losses with a graph."""
        self._leaf = _leaf_below(losses.grad_fn)
        listen(losses, self._keep)

    def _keep(self, gradient: Tensor) -> None:
        """Keep a gradient of the backward pass that runs."""
        self.passes.append((number_of_pass(), gradient))
        if self._leaf is not None and not _is_executed(self._leaf):
            self.kept_none.add(number_of_pass())
        self._then()


def number_of_pass() -> int:
    """Return the number of the backward pass that runs; a later one has a larger one."""
    return int(torch._C._current_graph_task_id())


def _leaf_below(node: Any) -> Any:
    """Return a node that adds to the gradient of a leaf, the first that is found; None if none."""
    leaves = (one for one in nodes_below(node) if one.name().endswith("AccumulateGrad"))
    return next(leaves, None)


def nodes_below(node: Any, stop: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of a graph from one on, up to ``stop``."""
    seen: set[Any] = {*stop, None}
    todo: list[Any] = [node]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [parent for parent, _ in node.next_functions]


def _is_executed(leaf: Any) -> bool:
    """Whether the backward pass that runs adds to the gradient of a leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad returns it
        return False


@dataclass(kw_only=True, eq=False)
class Call:
    """The losses of a microbatch on this rank, or some of them, and what has arrived at them."""

    term: str
    shape: tuple[int, ...]
    eps: float
    """Of the losses' dtype, in which their gradient arrives."""
    arrived: Arrived
    cu_seqlens: IntsLike | None
    lengths: Sequence[int] | None
    mask: Tensor | None
    names: Sequence[str] | None
    microbatch: int | None
    cp_group: ProcessGroup | None
    ids: Mapping[str, Sequence[Any]]
    """Of samples, prompts and groups, one for each sequence."""
    is_zero: Tensor
    """Whether the losses are 0."""
    token_weights: Tensor | None
    """What a token weighs in the loss, like the losses; None: each weighs 1."""
    scale: Tensor | None
    """What the schedule multiplied the loss by."""
    has_graph: bool
    is_again: bool
    """Whether it was made in a backward pass: a recomputation."""
    again: Call | None = None
    """The same losses, recomputed in the backward pass, at which gradients arrived."""
    heard: Callable[[], Any] = lambda: None
    """What :meth:`Weighing.losses` returned, while it exists."""
    gradients: list[tuple[int, Tensor]] = field(default_factory=list)
    """What arrived in passes that count, with their numbers; :func:`microbatches_of` finds it."""
    is_zeroed: bool = False
    """Whether gradients arrived, and were zeroed, likewise."""

    @property
    def trained(self) -> Call:
        """The call at which gradients arrived."""
        return self.again or self

    @property
    def passed(self) -> list[Any]:
        """What a recomputation passes again; waits for the device."""
        values = (self.shape, self.mask, self.lengths, self.cu_seqlens)
        return [None if one is None else torch.as_tensor(one).tolist() for one in values]


def microbatches_of(
    calls: Sequence[Call], m: int | None, *, gone: int, reaching: Container[int] = ()
) -> list[list[Call]]:
    """Return the calls of one term by microbatch; those that train nothing are left out.

    ``m``: M, if it is known. ``gone``: the last backward pass whose gradients were zeroed.
    ``reaching``: those that reached a parameter. Raises :class:`ContractError` if a call could be
    another microbatch's or more of one.
    """
    heard = _settled(calls)
    for call in heard:
        arrived = call.trained.arrived
        nothing = {number for number in arrived.kept_none if number not in reaching}
        passes = [one for one in arrived.passes if one[0] not in nothing]
        call.gradients = [one for one in passes if one[0] > gone]
        call.is_zeroed = bool(passes) and not call.gradients
    reached = [call for call in heard if call.gradients]
    if any(call.microbatch is not None for call in heard):
        return _by_number(heard, reached, m)
    # An evaluation, or a step that was repeated, trains nothing.
    chosen = heard if len(heard) == m or not reached else reached
    term = repr(heard[0].term) if heard else ""
    if m is not None and len(chosen) % m:
        raise ContractError(
            f"got {len(chosen)} calls of losses for the term {term} in a step of {m} microbatches, "
            "expected as many: call it for each, with tokens or without"
        )
    numbers = [{number for number, _ in call.gradients} for call in chosen]
    is_one_pass = any(one & other for at, one in enumerate(numbers) for other in numbers[:at])
    has_more = is_one_pass if m is None else len(chosen) > m
    if has_more:
        of = "in one backward pass" if m is None else f"in a step of {m} microbatches"
        raise ContractError(
            f"got {len(chosen)} calls of losses for the term {term} {of}, expected one for each "
            f"microbatch: {_NAMED}"
        )
    return [[call] for call in chosen]


def _by_number(heard: Sequence[Call], reached: Sequence[Call], m: int | None) -> list[list[Call]]:
    if any(call.microbatch is None for call in heard):
        raise ContractError(
            f"got microbatch= in some calls of losses for the term {heard[0].term!r} and not in "
            "others, expected it in each"
        )
    numbers = [int(call.microbatch or 0) for call in reached or heard]
    found = []
    for number in range(m or max(numbers) + 1):
        its = [call for call in reached if call.microbatch == number]
        found.append(its or [call for call in heard if call.microbatch == number])
    return found


def _settled(calls: Sequence[Call]) -> list[Call]:
    """Let a recomputed call at which gradients arrived stand for the call that it repeats.

    That one had no graph; of several, it is the first to which the same was passed.
    Where no gradient arrived, the graph of the first call is the one that trains.
    """
    heard = [call for call in calls if not call.is_again]
    recomputed = [call for call in calls if call.is_again]
    trained = [call for call in recomputed if call.arrived.passes]
    if trained and not heard:  # losses were heard with a graph only
        return recomputed
    for call in heard:
        call.again = None
    for call in trained:
        left = [
            one
            for one in heard
            if not (one.has_graph or one.again) and call.microbatch in (None, one.microbatch)
        ]
        if left:
            next((one for one in left if one.passed == call.passed), left[0]).again = call
        else:
            heard.append(call)
    return heard
