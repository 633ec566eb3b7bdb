"""Weigh one step: what arrives at the per-token losses, times what follows.

For a token t with loss x_t, ``a_t = g_t f``: ``g_t`` arrives at ``x_t`` in the backward pass and
holds what the script and the schedule do (mask, sum, means, ``/ num_tokens``, ``/ M``, loss scale);
``f`` is what happens to every gradient afterwards (``factors.py``). The gradient of the step is
``sum_t a_t d x_t / d theta`` over the tokens of all data- and context-parallel ranks.

Source of what is in g_t: ``schedules.forward_step_calc_loss``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import ContractError, LossAggregationError
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.weigh.compare import Part, RankWeights, Weighed, compare
from megatron_lossagg.weigh.factors import run_of

__all__ = ["LOSS", "Weighing"]

LOSS = "loss"
"""The name of a loss of one term."""


@dataclass
class _Microbatch:
    """The losses of one microbatch on this rank, and what has arrived at them."""

    shape: tuple[int, ...]
    cu_seqlens: IntsLike | None
    lengths: Sequence[int] | None
    mask: Tensor | None
    arrived: list[Tensor] = field(default_factory=list)


class Weighing:
    """Listens while one step runs, and says which weight each token was trained with.

    ``model``: the chunk or chunks in Megatron's DistributedDataParallel, as the schedule gets them;
    a model in torch's; any other model on one process only. A context manager around the schedule
    call or the backward passes, inside of a ``LossAggregator``'s step if there is one. It changes
    no value and no order of operations; no collective and no host sync before :meth:`weighed`.
    ``num_microbatches``: M; None if :meth:`losses` is called once for each.

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

    def __init__(self, model: Any, *, num_microbatches: int | None = None) -> None:
        self.run = run_of(model)
        self._num_microbatches = num_microbatches
        self._terms: dict[str, list[_Microbatch]] = {}
        self._num_tokens: Tensor | None = None
        self._is_finalized = False

    def __enter__(self) -> Weighing:
        self.run.begin(self._finalizes)
        return self

    def __exit__(self, *raised: object) -> None:
        self.run.end()

    def losses(
        self,
        losses: Tensor,
        mask: Tensor | None = None,
        *,
        cu_seqlens: IntsLike | None = None,
        lengths: Sequence[int] | None = None,
        term: str = LOSS,
    ) -> Tensor:
        """Listen to a microbatch's per-token losses; return the tensor that was passed.

        ``losses``: this rank's, ``[T]`` or ``[b, s]``, the tensor that the loss is computed from.
        ``mask``: like it; without one, a token that weighs 0 is not trained. ``cu_seqlens``:
        offsets of the whole packed sequences, padding included, ``[G + 1]``; without, an entry of
        the batch is a sequence. ``lengths``: in their place, the tokens of each sequence that this
        rank holds, in order. ``term``: the name of a term of the loss, which is weighed by itself.
        Call it once per microbatch and term, in their order.
        """
        if not isinstance(losses, Tensor) or losses.dim() > 2 or not losses.is_floating_point():
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ContractError(
                f"got {got}, expected the losses of tokens, [T] or [b, s]: a model that returns "
                "logits is weighed in a loop of one's own (docs/weigh.md)"
            )
        heard = _Microbatch(tuple(losses.shape), cu_seqlens, lengths, mask)
        self._terms.setdefault(term, []).append(heard)
        if losses.grad_fn is not None:
            # Of the node: what a script asks of autograd.grad at the losses trains nothing, and
            # does not run it.
            losses.grad_fn.register_prehook(partial(_keep, heard, losses.output_nr))
        return losses

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
        own: dict[str, RankWeights] | str
        try:
            own = {term: self.of_this_rank(term) for term in self._terms or {LOSS: []}}
        except LossAggregationError as error:
            own = str(error)
        found: list[Any] = [own]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        refused = next((one for one in found if isinstance(one, str)), None)
        if refused is not None:
            raise ContractError(refused)
        names = dict.fromkeys(name for one in found for name, its in one.items() if its.counts)
        nothing = self.of_this_rank("")
        return {
            name: compare([one.get(name) or replace(nothing, counts=False) for one in found])
            for name in names
        }

    def of_this_rank(self, term: str = LOSS) -> RankWeights:
        """Return the weights of this rank's tokens, per part of a sequence; waits for the device.

        No collective. A rank that computes no loss, or is not the first of its tensor-parallel
        ranks, has none.
        """
        place, parts = self.run.place, []
        microbatches = self._terms.get(term, [])
        if place.counts:
            factor, m = self.run.factor(self._device()), self._num_microbatches
            if m is not None and len(microbatches) % m:
                raise ContractError(
                    f"got {len(microbatches)} calls of losses for the term {term!r} in a step of "
                    f"{m} microbatches, expected as many: call it for each, with tokens or without"
                )
            # Where the loss is recomputed in the backward pass, a microbatch has two calls in turn.
            times = max(len(microbatches) // m, 1) if m else 1
            for index in range(len(microbatches) // times):
                calls = microbatches[index * times : (index + 1) * times]
                arrived = [gradient for call in calls for gradient in call.arrived]
                parts += self._parts(index, replace(calls[-1], arrived=arrived), factor)
        num_tokens = None if self._num_tokens is None else int(self._num_tokens.item())
        return RankWeights(
            dp_rank=place.dp_rank,
            cp_rank=place.cp_rank,
            sizes={"M": self._num_microbatches or len(microbatches), **place.sizes},
            parts=parts,
            num_tokens=num_tokens if place.counts else 0,
            is_divided=num_tokens is not None,
            is_finalized=self._is_finalized,
            counts=place.counts,
        )

    def _finalizes(self, num_tokens: Tensor | None) -> None:
        self._is_finalized = True
        if num_tokens is not None:
            self._num_tokens = num_tokens.detach().clone()  # summed over ranks in place

    def _device(self) -> torch.device:
        microbatches = (heard for term in self._terms.values() for heard in term)
        arrived = [tensor for heard in microbatches for tensor in heard.arrived]
        return arrived[0].device if arrived else torch.device("cpu")

    def _parts(self, index: int, heard: _Microbatch, factor: float) -> list[Part]:
        """Sum a microbatch's weights per sequence, of the tokens that this rank holds."""
        num_tokens = int(np.prod(heard.shape))
        if heard.lengths is not None:
            segments = np.repeat(np.arange(len(heard.lengths)), heard.lengths)
            allows_tail = False
        else:
            layout = self.run.layout(heard.shape, heard.cu_seqlens)
            segments = np.repeat(layout.segment_R, layout.length_R)
            allows_tail = layout.allows_tail
        held = len(segments)
        if held > num_tokens or (held < num_tokens and not allows_tail):
            raise ContractError(
                f"got losses of {num_tokens} tokens, expected {held}, which this rank holds of "
                "the sequences: pass whole offsets with padding, or the lengths here"
            )
        weight_T = np.zeros(num_tokens)
        for arrived in heard.arrived:
            weight_T += arrived.reshape(-1).double().cpu().numpy() * factor
        trained_T = weight_T != 0
        if heard.mask is not None:
            trained_T |= heard.mask.detach().reshape(-1).cpu().numpy() != 0
        segment_T = np.full(num_tokens, -1)
        segment_T[:held] = segments
        return [
            _part(index, segment, weight_T[trained_T & (segment_T == segment)])
            for segment in np.unique(segment_T[trained_T]).tolist()
        ]


def _part(microbatch: int, segment: int, weights: np.ndarray[Any, Any]) -> Part:
    return Part(
        microbatch=microbatch,
        sequence=segment,
        tokens=len(weights),
        weight_sum=float(weights.sum()),
        weight_min=float(weights.min()),
        weight_max=float(weights.max()),
    )


def _keep(heard: _Microbatch, index: int, gradients: Sequence[Tensor | None]) -> None:
    gradient = gradients[index]
    if gradient is not None:
        heard.arrived.append(gradient.detach().clone())
