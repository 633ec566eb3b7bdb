"""Weigh one step: what arrives at the per-token losses, times what follows.

For a token t with loss x_t, ``a_t = g_t f``: ``g_t`` arrives at ``x_t`` in the backward pass and
holds what the script and the schedule do (mask, sum, means, ``/ num_tokens``, ``/ M``), once the
loss scale is taken out; ``f`` is what happens to every gradient afterwards (``measured.py``). The
gradient of the step is ``sum_t a_t d x_t / d theta`` over the tokens of all data- and
context-parallel ranks.

Source of what is in g_t: ``schedules.forward_step_calc_loss``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from threading import Timer
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError, LossAggregationError, message_of, say
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.weigh.calls import Arrived, Call, microbatches_of
from megatron_lossagg.weigh.compare import TOLERANCE, Part, RankWeights, Weighed, compare
from megatron_lossagg.weigh.factors import run_of
from megatron_lossagg.weigh.listen import is_in_backward, listen
from megatron_lossagg.weigh.parameters import Listening
from megatron_lossagg.weigh.told import listening

LOSS = "loss"
"""The name of a loss of one term."""
_SHOWN = 60
"""How long a sequence may be whose positions are shown."""
_PATIENCE = 30.0
_WAITS = (
    "rank {} has waited {:g} s for other ranks to call weighed() or terms(): call it on every rank"
)
_Array = np.ndarray[Any, Any]
Ids = Sequence[Hashable] | Tensor | _Array


class Weighing:
    """Listens while one step runs, and says which weight each token was trained with.

    ``model``: the chunk or chunks in Megatron's DistributedDataParallel, as the schedule gets them;
    a model in torch's; any other model on one process only. A context manager around the schedule
    call or the backward passes, inside of a ``LossAggregator``'s step if there is one. It changes
    no value; no collective and no host sync before :meth:`weighed`. It weighs one step.
    ``num_microbatches``: M; None if :meth:`losses` is called once for each, with a backward pass of
    its own. ``divisor``, ``exponent``: of ``constant`` and ``length_power``, to compare with them.
    ``loss_scale``: what the loss is multiplied by, and the gradient divided by, that Megatron's
    ``grad_scale_func`` does not know, such as torch's ``GradScaler.get_scale()``.

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
        self,
        model: Any,
        *,
        num_microbatches: int | None = None,
        loss_scale: float = 1.0,
        divisor: float | None = None,
        exponent: float | None = None,
    ) -> None:
        if num_microbatches is not None and num_microbatches < 1:
            raise ContractError(f"got num_microbatches={num_microbatches}, expected 1 or more")
        self.run = run_of(model)
        self._parameters = Listening(self.run.candidates())
        self._loss_scale = loss_scale
        self._num_microbatches = num_microbatches
        given = {"divisor": divisor, "exponent": exponent}
        self._given = {name: value for name, value in given.items() if value is not None}
        self._calls: list[Call] = []
        self._told: list[dict[str, Sequence[Hashable]]] = []
        """The ids that a step of this package has told of each microbatch."""
        self._steps: list[Any] = []
        """The sequences of each such step: several of a deferred one."""
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
        listening.append(self._is_told)
        return self

    def __exit__(self, *raised: object) -> None:
        listening.remove(self._is_told)
        self.run.end()
        self._parameters.end()

    def _is_told(self, aggregation: Any, sequences: Any, numbers: Any) -> None:
        """Note the ids of a microbatch's sequences; -1 is padding. Waits for the device."""
        if is_in_backward():
            return
        places, rank = [int(number) for number in _listed(numbers)], self.run.place.dp_rank
        self._steps += [] if any(one is sequences for one in self._steps) else [sequences]
        step, samples = len(self._steps), sequences.sample
        left = sequences.left_out if not aggregation.count_left_out else None
        ids = {
            # By default each sequence is a sample of its own.
            "sample": lambda s: (rank, step, s) if samples is None else samples[s],
            "prompt": None if sequences.prompt is None else sequences.prompt.__getitem__,
            "group": None if sequences.group is None else sequences.group.__getitem__,
        }
        counts = [s >= 0 and (left is None or not left[s]) for s in places]
        weight = sequences.sequence_weight
        is_zero = [
            not ok or (weight is not None and not weight[s])
            for s, ok in zip(places, counts, strict=True)
        ]
        self._told.append(
            {
                name: [of(s) if is_in else None for s, is_in in zip(places, counts, strict=True)]
                for name, of in ids.items()
                if of is not None
            }
            | {"zero": is_zero}
        )
        for name in ("divisor", "exponent"):
            if (value := getattr(aggregation, name)) is not None:
                self._given.setdefault(name, value)

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
        sample: Ids | None = None,
        prompt: Ids | None = None,
        group: Ids | None = None,
    ) -> Tensor:
        """Return a microbatch's per-token losses; the loss is computed from what is returned.

        ``losses``: this rank's, ``[T]`` or ``[b, s]``.
        ``mask``: like it; tokens with a weight outside of it, and those of it without one, are
        reported. ``cu_seqlens``: offsets of the whole packed sequences, padding included,
        ``[G + 1]``; without, an entry of the batch is a sequence. ``lengths``: in their place, the
        tokens of each sequence that this rank holds, in order. ``term``: the name of a term of the
        loss, which is weighed by itself. Call it once per microbatch and term, in their order.
        ``microbatch``: its number, from 0, for a loss that is computed in pieces: each call for one
        has more of its sequences. ``names``: what the report calls the sequences. ``cp_group``:
        whose ranks hold the microbatch's sequences, with dynamic context parallelism, or outside of
        Megatron. ``sample``, ``prompt``, ``group``: of each sequence, as for a step; padding has
        the sample None. What is wrong with a call is raised by :meth:`weighed`, on every rank.
        """
        try:
            mask = _checked(losses, mask)
            if microbatch is not None and microbatch not in range(self._num_microbatches or 2**31):
                m = self._num_microbatches
                to = "from 0 on" if m is None else f"0 to {m - 1}"
                of = "" if m is None else f" in a step of {m}"
                raise ContractError(f"got microbatch={microbatch}{of}, expected {to}")
        except ContractError as error:
            self._fault = self._fault or error.with_traceback(None)  # which knows this
            return losses
        passed = {"sample": sample, "prompt": prompt, "group": group}
        call = Call(
            term=term,
            shape=tuple(losses.shape),
            eps=torch.finfo(losses.dtype).eps,
            arrived=Arrived(self._parameters.read_later),
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            mask=mask,
            names=names,
            microbatch=microbatch,
            cp_group=cp_group,
            ids={name: _listed(ids) for name, ids in passed.items() if ids is not None},
            scale=self.run.scale(),
            has_graph=losses.requires_grad,
            is_again=is_in_backward(),
        )
        self._calls.append(call)
        if not losses.requires_grad:
            return losses
        listened = losses.clone()  # whose node is of the losses only
        listen(listened, call.arrived)
        return listened

    def has_mask(self, mask: Tensor) -> None:
        """Take a mask for the last call, if it had none and it is of as many tokens."""
        if self._calls and self._calls[-1].mask is None:
            with suppress(ContractError):
                self._calls[-1].mask = _of_shape(mask, self._calls[-1].shape)

    def finalized(self) -> None:
        """Take gradients as they are now for the step's, if they were reduced after the schedule.

        No collective, no host sync.
        """
        self._parameters.finalized()

    def weighed(self) -> Weighed:
        """Compare the weights of all ranks with every mode; the same on every rank.

        One ``all_gather_object`` over all ranks; waits for the device. Raises, on every rank, the
        :class:`ContractError` of one, and for a loss of several terms (:meth:`terms`).
        """
        terms = self.terms()
        if len(terms) > 1:
            raise ContractError(f"got the terms {[*terms]}, expected one loss: call terms()")
        return next(iter(terms.values()))

    @property
    def _terms(self) -> list[str]:
        return [call.term for call in self._calls]

    def terms(self) -> dict[str, Weighed]:
        """Compare the weights of each term of the loss, as :meth:`weighed`, by its name."""
        own: tuple[RankWeights, dict[str, RankWeights]] | str
        try:
            of = {term: self.of_this_rank(term) for term in dict.fromkeys(self._terms)}
            own = next(iter(of.values()), None) or self.of_this_rank(), of
        except LossAggregationError as error:
            own = str(error)
        except Exception as error:  # whatever it is, no rank may leave the others waiting
            own = message_of(error)
        found: list[Any] = [own]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            timer = Timer(_PATIENCE, say, [_WAITS.format(dist.get_rank(), _PATIENCE)])
            timer.daemon = True
            timer.start()
            try:
                dist.all_gather_object(found, own)
            finally:
                timer.cancel()
        refused = next((one for one in found if isinstance(one, str)), None)
        if refused is not None:
            raise ContractError(refused)
        counted = [terms for rank, terms in found if rank.counts]
        names = [*dict.fromkeys(name for terms in counted for name in terms)] or [LOSS]
        # Metrics are reduced as terms are, and have no graph on any rank.
        trained = [
            name
            for name in names
            if any(terms[name].has_graph for terms in counted if name in terms)
        ]
        of_term = {
            name: [
                terms.get(name, replace(rank, parts=[], tolerance=TOLERANCE))
                for rank, terms in found
            ]
            for name in trained or names
        }
        parts = (part for ranks in of_term.values() for rank in ranks for part in rank.parts)
        is_heard = any(part.tokens for part in parts)
        return {name: compare(ranks, is_heard=is_heard) for name, ranks in of_term.items()}

    def of_this_rank(self, term: str = LOSS) -> RankWeights:
        """Return the weights of this rank's tokens, per part of a sequence; waits for the device.

        No collective. A rank that computes no loss, or is not the first of its tensor-parallel
        ranks, has none.
        """
        if self._fault is not None:
            raise self._fault
        if self._num_finalized > 1:
            raise ContractError(
                f"got {self._num_finalized} steps inside of one Weighing, expected one: make a "
                "Weighing for each schedule call"
            )
        counts, m = self.run.place.counts, self._num_microbatches
        of_term = {
            name: microbatches_of(
                [call for call in self._calls if call.term == name], m, gone=self._parameters.gone
            )
            for name in dict.fromkeys(self._terms)
            if counts
        }
        microbatches = of_term.get(term, [])
        first = next((call for call in chain(*microbatches)), None)
        run = self.run if first is None else self.run.of_microbatch(first.cp_group)
        num_tokens = None if self._num_tokens is None else float(self._num_tokens.item())
        eps = [call.trained.eps for call in chain(*microbatches) if call.gradients]
        return RankWeights(
            sizes={"M": m or max(map(len, of_term.values()), default=0), **run.place.sizes},
            parts=[
                part
                for number, calls in enumerate(microbatches)
                for part in self._parts(number, calls, is_told=len(self._told) == len(microbatches))
            ],
            num_tokens=num_tokens if counts else 0,
            is_divided=num_tokens is not None,
            is_finalized=bool(self._num_finalized),
            factor=self.run.factor(),
            added=self._parameters.results(),
            counts=counts,
            tolerance=max([TOLERANCE, *eps]),
            padded={
                number: sum(int(np.prod(call.trained.shape)) for call in calls)
                for number, calls in enumerate(microbatches)
            },
            given=self._given,
            has_graph=any(call.trained.has_graph for call in chain(*microbatches)),
        )

    def _finalizes(self, num_tokens: Tensor | None) -> None:
        self._num_finalized += 1
        if num_tokens is not None:
            self._num_tokens = num_tokens.detach().clone()  # summed over ranks in place

    def _parts(self, number: int, calls: Sequence[Call], *, is_told: bool) -> list[Part]:
        """Sum a microbatch's weights per sequence, of the tokens that this rank holds."""
        parts: list[Part] = []
        first = 0
        told = self._told[number] if is_told and len(calls) == 1 else {}
        for call in calls:
            found, num_sequences = self._parts_of(number, call, first, told)
            parts, first = parts + found, first + num_sequences
        return parts

    def _parts_of(
        self, number: int, call: Call, first: int, told: Mapping[str, Sequence[Hashable]]
    ) -> tuple[list[Part], int]:
        """Return the parts of a call, and how many sequences it has; ``first``: of its first."""
        heard, run = call.trained, self.run.of_microbatch(call.cp_group)
        num_tokens = int(np.prod(heard.shape))
        if heard.lengths is not None:
            num_sequences = len(heard.lengths)
            segments, allows_tail = np.repeat(np.arange(num_sequences), heard.lengths), False
            held_G = range(num_sequences)
        else:
            layout = run.layout(heard.shape, heard.cu_seqlens)
            segments = np.repeat(layout.segment_R, layout.length_R)
            num_sequences, allows_tail = layout.num_segments, layout.allows_tail
            held_G = np.unique(segments).tolist()
        if len(told.get("sample", ())) == num_sequences and not heard.ids:
            heard.ids = told
        held = len(segments)
        if held > num_tokens or (held < num_tokens and not allows_tail):
            raise ContractError(
                f"got losses of {num_tokens} tokens, expected {held}, which this rank holds of "
                "the sequences: pass whole offsets with padding, or the lengths here"
            )
        scale = self._loss_scale * (1.0 if heard.scale is None else float(heard.scale))
        weight_T = np.zeros(num_tokens)
        for _, gradient in call.gradients:
            weight_T += gradient.reshape(-1).double().cpu().numpy() / scale
        mask = heard.mask if heard.mask is not None else call.mask
        in_mask_T = weight_T != 0
        if mask is not None:
            in_mask_T = (mask.detach().reshape(-1) != 0).cpu().numpy()
        segment_T = np.full(num_tokens, -1)
        segment_T[:held] = segments
        if (past := int(((weight_T != 0) & (segment_T < 0)).sum())) > 0:
            raise ContractError(
                f"got {past} trained tokens past the last sequence, expected none: pass the "
                "offsets of all sequences, cu_seqlens"
            )
        sums = _Sums(weight_T[:held], in_mask_T[:held], segments, num_sequences)
        shown = sums.shortest() if run.place.sizes["CP"] == 1 else None
        parts = [
            Part(
                dp_rank=run.place.dp_rank,
                cp_rank=run.place.cp_rank,
                microbatch=number,
                sequence=first + segment,
                name=heard.names[segment] if heard.names and segment < len(heard.names) else "",
                shown=sums.shown(segment) if segment == shown else "",
                **{**sums.of(segment), **({"missed": 0} if heard.id_of("zero", segment) else {})},
                sample=heard.id_of("sample", segment),
                prompt=heard.id_of("prompt", segment),
                group=heard.id_of("group", segment),
            )
            for segment in held_G
        ]
        return parts, num_sequences


class _Sums:
    """Sums over the tokens of each sequence of a call."""

    def __init__(
        self, weight_T: _Array, in_mask_T: _Array, segment_T: _Array, num_sequences: int
    ) -> None:
        self._weight_T, self._in_mask_T, self._segment_T = weight_T, in_mask_T, segment_T
        has_T, size = weight_T != 0, max(num_sequences, 1)
        of, weight = segment_T[has_T], weight_T[has_T]
        smallest, largest = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(smallest, of, weight)
        np.maximum.at(largest, of, weight)
        n_G = np.bincount(of, minlength=size)
        self._columns = {
            "tokens": n_G,
            "weight_sum": np.bincount(of, weight, minlength=size),
            "weight_min": np.where(n_G > 0, smallest, 0.0),
            "weight_max": np.where(n_G > 0, largest, 0.0),
            "outside": np.bincount(segment_T[has_T & ~in_mask_T], minlength=size),
            "missed": np.bincount(segment_T[in_mask_T & ~has_T], minlength=size),
        }

    def of(self, segment: int) -> dict[str, Any]:
        """Return the sums of a sequence."""
        return {name: values[segment].item() for name, values in self._columns.items()}

    def shortest(self) -> int | None:
        """Return the shortest sequence of which not every token has a weight, if it is short."""
        lengths = np.bincount(self._segment_T, minlength=1)
        columns = {name: values[: len(lengths)] for name, values in self._columns.items()}
        able = (columns["tokens"] < lengths) | (columns["outside"] > 0)
        able &= (columns["tokens"] > 0) & (lengths <= _SHOWN)
        return int(np.where(able, lengths, _SHOWN + 1).argmin()) if able.any() else None

    def shown(self, segment: int) -> str:
        """Return a sign for each position."""
        here = self._segment_T == segment
        signs = np.where(self._in_mask_T[here], "0", ".")
        signs = np.where(
            self._weight_T[here] != 0, np.where(self._in_mask_T[here], "#", "!"), signs
        )
        return "".join(signs)


def are_losses(losses: Any) -> bool:
    """Whether something can be the losses of tokens."""
    return (
        isinstance(losses, Tensor) and losses.dim() in (1, 2) and bool(losses.is_floating_point())
    )


def _checked(losses: Any, mask: Tensor | None) -> Tensor | None:
    """Return the mask in the shape of the losses; raises for what are no losses of tokens."""
    if not are_losses(losses):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if got == ():
            raise ContractError(
                "got losses of no dimension, a loss, expected those of its tokens, [T] or [b, s]: "
                "pass them before they are summed"
            )
        raise ContractError(
            f"got {got}, expected the losses of tokens, [T] or [b, s]: a model that returns "
            "logits is weighed in a loop of one's own (docs/weigh.md)"
        )
    return None if mask is None else _of_shape(mask, tuple(losses.shape))


def _of_shape(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    if mask.numel() != np.prod(shape) or (mask.dim() == len(shape) == 2 and mask.shape != shape):
        raise ContractError(
            f"got a mask of {tuple(mask.shape)} for losses of {shape}, expected the same shape: "
            "pass the part of the mask that this rank holds, in the order of the losses"
        )
    return mask.detach()


def _listed(ids: Any) -> list[Any]:
    return ids.tolist() if isinstance(ids, Tensor | np.ndarray) else [*ids]
