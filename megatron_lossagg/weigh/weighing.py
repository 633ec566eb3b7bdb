"""Weigh one step: what arrives at the per-token losses, times what follows.

For a token t with loss x_t, ``a_t = g_t f``: ``g_t`` arrives at ``x_t`` in the backward pass and
holds what the script and the schedule do (mask, sum, means, ``/ num_tokens``, ``/ M``), once the
loss scale is taken out; ``f`` is what happens to every gradient afterwards (``measured.py``). The
gradient of the step is ``sum_t a_t d x_t / d theta`` over the tokens of all data- and
context-parallel ranks.

Source of what is in g_t: ``schedules.forward_step_calc_loss``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError, LossAggregationError, message_of
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.weigh.compare import TOLERANCE, Part, RankWeights, Weighed, compare
from megatron_lossagg.weigh.factors import Place, run_of
from megatron_lossagg.weigh.listen import is_in_backward, listen
from megatron_lossagg.weigh.parameters import Listening

LOSS = "loss"
"""The name of a loss of one term."""


@dataclass
class _Call:
    """The losses of a microbatch on this rank, or some of them, and what has arrived at them."""

    shape: tuple[int, ...]
    eps: float
    """Of the losses' dtype, in which their gradient arrives."""
    cu_seqlens: IntsLike | None
    lengths: Sequence[int] | None
    mask: Tensor | None
    names: Sequence[str] | None = None
    cp_group: ProcessGroup | None = None
    first: int = 0
    """Of its microbatch, the number of its first sequence."""
    scale: Tensor | None = None
    """What the schedule multiplied the loss by."""
    has_graph: bool = True
    arrived: list[Tensor] = field(default_factory=list)
    again: _Call | None = None
    """The same losses, recomputed in the backward pass, at which gradients arrived."""

    @property
    def trained(self) -> _Call:
        """The call at which gradients arrived."""
        return self.again or self

    def is_like(self, other: _Call) -> bool:
        """Whether another has losses of the same shape, mask and lengths; waits for the device."""
        if self.mask is None or other.mask is None:
            is_mask = self.mask is other.mask
        else:
            is_mask = self.mask.reshape(-1).tolist() == other.mask.reshape(-1).tolist()
        lengths = [None if one.lengths is None else [*one.lengths] for one in (self, other)]
        return self.shape == other.shape and is_mask and lengths[0] == lengths[1]


class Weighing:
    """Listens while one step runs, and says which weight each token was trained with.

    ``model``: the chunk or chunks in Megatron's DistributedDataParallel, as the schedule gets them;
    a model in torch's; any other model on one process only. A context manager around the schedule
    call or the backward passes, inside of a ``LossAggregator``'s step if there is one. It changes
    no value; no collective and no host sync before :meth:`weighed`. It weighs one step.
    ``num_microbatches``: M; None if :meth:`losses` is called once for each. ``loss_scale``: what
    the loss is multiplied by, and the gradient divided by, that Megatron's ``grad_scale_func`` does
    not know, such as torch's ``GradScaler.get_scale()``.

    What a program asks of ``torch.autograd.grad`` at parameters arrives as well: leave it out of a
    weighed step.

    Examples:
        One process, a step of one microbatch with sequences of 6 and 2 tokens. With a schedule,
        ``loss_func`` calls :meth:`losses`.

        >>> model = torch.nn.Linear(2, 8)
        >>> with Weighing(model) as weighing:
        ...     losses = weighing.losses(model(torch.rand(2)).exp(), cu_seqlens=[0, 6, 8])
        ...     loss = (losses[:6].mean() + losses[6:].mean()) / 2
        ...     loss.backward()
        >>> weighing.weighed().trains
        'sample_mean'
    """

    def __init__(
        self, model: Any, *, num_microbatches: int | None = None, loss_scale: float = 1.0
    ) -> None:
        self.run = run_of(model)
        self._parameters = Listening(self.run.candidates())
        self._loss_scale = loss_scale
        self._num_microbatches = num_microbatches
        self._terms: dict[str, list[list[_Call]]] = {}
        """Of each term, its microbatches, in most programs of one call each."""
        self._recomputed: list[tuple[str, int | None, _Call]] = []
        """Calls of the backward pass, with term and microbatch."""
        self._fault: ContractError | None = None
        """What one call of :meth:`losses` was refused for."""
        self._num_tokens: Tensor | None = None
        self._num_finalized = 0
        self._has_begun = False

    def __enter__(self) -> Weighing:
        if self._has_begun:
            raise ContractError("got a second step, expected one: make a Weighing for each step")
        self._has_begun = True
        self.run.begin(self._finalizes, self._parameters.finalized)
        self._parameters.begin()
        return self

    def __exit__(self, *raised: object) -> None:
        self.run.end()
        self._parameters.end()

    def losses(
        self,
        losses: Tensor,
        mask: Tensor | None = None,
        *,
        cu_seqlens: IntsLike | None = None,
        lengths: Sequence[int] | None = None,
        term: str = LOSS,
        names: Sequence[str] | None = None,
        microbatch: int | None = None,
        cp_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return a microbatch's per-token losses; the loss is computed from what is returned.

        ``losses``: this rank's, ``[T]`` or ``[b, s]``.
        ``mask``: like it; without one, a token that weighs 0 is not trained. ``cu_seqlens``:
        offsets of the whole packed sequences, padding included, ``[G + 1]``; without, an entry of
        the batch is a sequence. ``lengths``: in their place, the tokens of each sequence that this
        rank holds, in order. ``term``: the name of a term of the loss, which is weighed by itself.
        Call it once per microbatch and term, in their order. ``names``: what the report calls the
        sequences. ``microbatch``: its number, from 0, for a loss that is computed in pieces or not
        at all: each call for one has more of its sequences, told by ``lengths``. ``cp_group``: with
        dynamic context parallelism, the microbatch's own group, whose ranks hold its sequences.
        What is wrong with a call is raised by :meth:`weighed`, on every rank.
        """
        call = _Call((), 0.0, cu_seqlens, lengths, mask, names, cp_group)
        try:
            return self._heard(losses, call, term, microbatch)
        except ContractError as error:
            self._fault = self._fault or error.with_traceback(None)  # which knows this
            return losses

    def _heard(self, losses: Tensor, call: _Call, term: str, microbatch: int | None) -> Tensor:
        """Note a call and listen to its losses."""
        mask, m = call.mask, self._num_microbatches
        if not isinstance(losses, Tensor) or losses.dim() > 2 or not losses.is_floating_point():
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ContractError(
                f"got {got}, expected the losses of tokens, [T] or [b, s]: a model that returns "
                "logits is weighed in a loop of one's own (docs/weigh.md)"
            )
        if mask is not None and mask.numel() != losses.numel():
            raise ContractError(
                f"got a mask of {mask.numel()} for {losses.numel()} losses, expected as many: pass "
                "the part of the mask that this rank holds"
            )
        if microbatch is not None and m is not None and not 0 <= microbatch < m:
            raise ContractError(
                f"got microbatch={microbatch} in a step of {m}, expected 0 to {m - 1}"
            )
        call.shape, call.eps = tuple(losses.shape), torch.finfo(losses.dtype).eps
        call.has_graph, call.scale = losses.requires_grad, self.run.scale()
        microbatches = self._terms.setdefault(term, [])
        if is_in_backward():
            self._recomputed.append((term, microbatch, call))
        else:
            self._append(microbatches, call, microbatch)
        if not losses.requires_grad:
            return losses
        listened = losses.clone()  # whose node is of the losses only
        listen(listened, call.arrived)
        listened.grad_fn.register_prehook(self._parameters.read_later)  # type: ignore[union-attr]
        return listened

    def _append(self, microbatches: list[list[_Call]], call: _Call, microbatch: int | None) -> None:
        most = len(microbatches) + 1
        if microbatch is not None:
            most = max(microbatch + 1, self._num_microbatches or 0)
        microbatches += [[] for _ in range(len(microbatches), most)]
        calls = microbatches[-1 if microbatch is None else microbatch]
        lengths = [one.lengths for one in (*calls, call)]
        if calls and any(one is None for one in lengths):
            raise ContractError(
                f"got {len(lengths)} calls for microbatch {microbatch}, expected lengths= in each: "
                "pass the tokens of its sequences"
            )
        call.first = sum(len(one.lengths) for one in calls if one.lengths is not None)
        calls.append(call)

    def _put_recomputed(self) -> None:
        """Let a recomputed call at which gradients arrived stand for the call that it repeats.

        That one had no graph; of several, it is the first with the same shape, mask and lengths.
        Where no gradient arrived, the graph of the first call is the one that trains.
        """
        recomputed, self._recomputed = self._recomputed, []
        trained = {term for term, _, call in recomputed if call.arrived}
        unheard = {term for term in trained if not any(self._terms[term])}
        for term, microbatch, call in recomputed:
            # Of losses that were only heard with a graph, those of no token are calls too.
            if not call.arrived and (term not in unheard or np.prod(call.shape)):
                continue
            microbatches = self._terms[term]
            of = microbatches if microbatch is None else microbatches[microbatch : microbatch + 1]
            left = [one for one in chain(*of) if not one.has_graph and one.again is None]
            if left and term not in unheard:
                first = next((one for one in left if one.is_like(call)), left[0])
                first.again, call.first = call, first.first
            else:  # nothing was heard without a graph
                self._append(microbatches, call, microbatch)

    def weighed(self) -> Weighed:
        """Compare the weights of all ranks with every mode; the same on every rank.

        One ``all_gather_object`` over all ranks; waits for the device. Raises, on every rank, the
        :class:`ContractError` of one, and for a loss of several terms (:meth:`terms`).
        """
        terms = self.terms()
        if len(terms) > 1:
            raise ContractError(f"got the terms {[*terms]}, expected one loss: call terms()")
        return next(iter(terms.values()))

    def terms(self) -> dict[str, Weighed]:
        """Compare the weights of each term of the loss, as :meth:`weighed`, by its name."""
        own: tuple[RankWeights, dict[str, RankWeights]] | str
        try:
            of = {term: self.of_this_rank(term) for term in self._terms}
            own = next(iter(of.values()), None) or self.of_this_rank(), of
        except LossAggregationError as error:
            own = str(error)
        except Exception as error:  # whatever it is, no rank may leave the others waiting
            own = message_of(error)
        found: list[Any] = [own]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        refused = next((one for one in found if isinstance(one, str)), None)
        if refused is not None:
            raise ContractError(refused)
        names = dict.fromkeys(name for rank, terms in found if rank.counts for name in terms)
        return {
            name: compare(
                [
                    terms.get(name, replace(rank, parts=[], tolerance=TOLERANCE))
                    for rank, terms in found
                ]
            )
            for name in names or [LOSS]
        }

    def of_this_rank(self, term: str = LOSS) -> RankWeights:
        """Return the weights of this rank's tokens, per part of a sequence; waits for the device.

        No collective. A rank that computes no loss, or is not the first of its tensor-parallel
        ranks, has none.
        """
        if self._fault is not None:
            raise self._fault
        self._put_recomputed()
        if self._num_finalized > 1:
            raise ContractError(
                f"got {self._num_finalized} steps inside of one Weighing, expected one: make a "
                "Weighing for each schedule call"
            )
        place = self.run.place
        calls = [len(microbatches) for microbatches in self._terms.values()]
        every = [call.trained for call in chain(*self._terms.get(term, []))]
        num_tokens = None if self._num_tokens is None else float(self._num_tokens.item())
        return RankWeights(
            sizes={"M": self._num_microbatches or max(calls, default=0), **place.sizes},
            parts=self._parts_of(term),
            num_tokens=num_tokens if place.counts else 0,
            is_divided=num_tokens is not None,
            is_finalized=bool(self._num_finalized),
            factor=self.run.factor(),
            added=self._parameters.results(),
            counts=place.counts,
            tolerance=max([TOLERANCE, *(call.eps for call in every if call.arrived)]),
        )

    def _parts_of(self, term: str) -> list[Part]:
        microbatches, m = self._terms.get(term, []), self._num_microbatches
        if not self.run.place.counts:
            return []
        if m is not None and len(microbatches) % m:
            raise ContractError(
                f"got {len(microbatches)} calls of losses for the term {term!r} in a step of "
                f"{m} microbatches, expected as many: call it for each, with tokens or without"
            )
        parts = []
        # One name may be called more than once in each microbatch: the weights add up.
        times = max(len(microbatches) // m, 1) if m else 1
        for index in range(len(microbatches) // times):
            for calls in zip(*microbatches[index * times : (index + 1) * times], strict=True):
                trained = [call.trained for call in calls]
                if len(shapes := {call.shape for call in trained}) > 1:
                    raise ContractError(
                        f"got losses of {sorted(shapes)} under the term {term!r} of a microbatch, "
                        "expected one shape: call losses with a name for each term"
                    )
                arrived = [gradient for call in trained for gradient in call.arrived]
                parts += self._parts(index, replace(trained[-1], arrived=arrived))
        return parts

    def _finalizes(self, num_tokens: Tensor | None) -> None:
        self._num_finalized += 1
        if num_tokens is not None:
            self._num_tokens = num_tokens.detach().clone()  # summed over ranks in place

    def _parts(self, index: int, heard: _Call) -> list[Part]:
        """Sum a microbatch's weights per sequence, of the tokens that this rank holds."""
        num_tokens, run = int(np.prod(heard.shape)), self.run.of_microbatch(heard.cp_group)
        if heard.lengths is not None:
            held_G = [*range(len(heard.lengths))]
            segments = np.repeat(held_G, heard.lengths)
            allows_tail = False
        else:
            layout = run.layout(heard.shape, heard.cu_seqlens)
            segments = np.repeat(layout.segment_R, layout.length_R)
            held_G, allows_tail = np.unique(segments).tolist(), layout.allows_tail
        held = len(segments)
        if held > num_tokens or (held < num_tokens and not allows_tail):
            raise ContractError(
                f"got losses of {num_tokens} tokens, expected {held}, which this rank holds of "
                "the sequences: pass whole offsets with padding, or the lengths here"
            )
        scale = self._loss_scale * (1.0 if heard.scale is None else float(heard.scale))
        weight_T = np.zeros(num_tokens)
        for arrived in heard.arrived:
            weight_T += arrived.reshape(-1).double().cpu().numpy() / scale
        trained_T = weight_T != 0
        if heard.mask is not None:
            trained_T |= (heard.mask.detach().reshape(-1) != 0).cpu().numpy()
        segment_T = np.full(num_tokens, -1)
        segment_T[:held] = segments
        if (past := int((trained_T & (segment_T < 0)).sum())) > 0:
            raise ContractError(
                f"got {past} trained tokens past the last sequence, expected none: pass the "
                "offsets of all sequences, cu_seqlens"
            )
        return [
            _part(run.place, index, heard, segment, weight_T[trained_T & (segment_T == segment)])
            for segment in held_G
        ]


def _part(
    place: Place, microbatch: int, heard: _Call, segment: int, weights: np.ndarray[Any, Any]
) -> Part:
    return Part(
        dp_rank=place.dp_rank,
        cp_rank=place.cp_rank,
        microbatch=microbatch,
        sequence=heard.first + segment,
        name=heard.names[segment] if heard.names and segment < len(heard.names) else "",
        tokens=len(weights),
        weight_sum=float(weights.sum()),
        weight_min=float(weights.min()) if len(weights) else 0.0,
        weight_max=float(weights.max()) if len(weights) else 0.0,
    )
