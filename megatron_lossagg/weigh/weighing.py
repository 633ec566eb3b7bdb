"""Weigh one step: what arrives at the per-token losses, times what follows.

For a token t with loss x_t, ``a_t = g_t f``: ``g_t`` arrives at ``x_t`` in the backward pass and
holds what the script and the schedule do (mask, sum, means, ``/ num_tokens``, ``/ M``), once the
loss scale is taken out; ``f`` is what happens to every gradient afterwards (``compare.py``). The
gradient of the step is ``sum_t a_t d x_t / d theta`` over the tokens of all data- and
context-parallel ranks.

Source of what is in g_t: ``schedules.forward_step_calc_loss``.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.exchange import together
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout, held
from megatron_lossagg.weigh.causes import Array, bounds
from megatron_lossagg.weigh.compare import (
    TOLERANCE,
    RankWeights,
    Weighed,
    compare,
    parts_of,
)
from megatron_lossagg.weigh.factors import Listening, run_of
from megatron_lossagg.weigh.listen import (
    Arrived,
    Call,
    are_losses,
    is_in_backward,
    listening,
    microbatches_of,
    own,
    weights_of,
)

LOSS = "loss"
"""The name of a loss of one term."""
_SHOWN = 60
"""How long a sequence may be whose positions are shown."""
Ids = Sequence[Hashable] | Tensor | Array


class Told(NamedTuple):
    """What a step of this package has told of a microbatch."""

    ids: Mapping[str, Sequence[Any]]
    keep: Tensor | None = None
    """The mask of the tokens that this rank holds."""
    token_weights: Tensor | None = None
    layout: Layout | None = None
    """Which tokens these are."""

    def for_losses(self, values: Tensor | None, num: int, fill: float) -> Tensor | None:
        """Return values for losses of this rank, or of the whole mask that ranks have gathered.

        None if they are of others; ``fill``: of tokens that are another rank's.
        """
        if values is None or len(values) == num:
            return values
        if self.layout is None or self.layout.num_tokens != num:
            return None
        whole = values.new_full((num,), fill)
        whole[held(torch.arange(num), self.layout).to(whole.device)] = values
        return whole


class Weighing:
    """Listens while one step runs, and says which weight each token was trained with.

    ``model``: the chunk or chunks in Megatron's DistributedDataParallel or Megatron-FSDP, as the
    schedule gets them; a model in torch's; any other model on one process only. A context manager
    around the schedule call or the backward passes, inside of a ``LossAggregator``'s step if there
    is one. It changes no value; no collective before :meth:`weighed`, and no host sync but for ids
    on a device. It weighs one step.
    ``num_microbatches``: M; None if :meth:`losses` is called once for each, with a backward pass of
    its own. ``divisor``, ``exponent``: of ``constant`` and ``length_power``, to compare with them.
    ``loss_scale``: what the loss is multiplied by, and the gradient divided by, that Megatron's
    ``grad_scale_func`` does not know, such as torch's ``GradScaler.get_scale()``.

    What a program asks of ``torch.autograd.grad`` trains nothing, and is not counted. A hook of a
    program's own on the gradient of a parameter, or of what lies between the losses and the model,
    is not seen.

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
        if not loss_scale > 0:
            raise ContractError(f"got loss_scale={loss_scale}, expected a number above 0")
        self.run = run_of(model)
        self._parameters = Listening(self.run.candidates())
        self._loss_scale = loss_scale
        self._num_microbatches = num_microbatches
        given = {"divisor": divisor, "exponent": exponent}
        self._given = {name: value for name, value in given.items() if value is not None}
        self._calls: list[Call] = []
        self._told: list[Told] = []
        """What a step of this package has told of each microbatch."""
        self._steps: list[Any] = []
        """The sequences of each such step: several of a deferred one."""
        self._lacks: dict[str, str] = {}
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

    def _is_told(self, plan: Any, microbatch: Any, numbers: Any) -> None:
        """Note what a step knows of a microbatch's sequences; -1 is padding. Waits for the device.

        A sequence that weighs 0 is counted by what is ``told``; one that is left out is none.
        """
        if is_in_backward():
            return
        places, rank = [int(number) for number in _listed(numbers)], self.run.place.dp_rank
        aggregation, known = plan.aggregation, plan.sequences
        self._steps += [] if any(one is known for one in self._steps) else [known]
        step, has_weights = len(self._steps), aggregation.count == "weights"
        left = plan.is_left_out_S
        columns = {
            # By default each sequence is a sample of its own.
            "sample": (lambda s: (rank, step, s)) if known.sample is None else known.sample.item,
            "prompt": None if known.prompt is None else known.prompt.item,
            "group": None if known.group is None else known.group.item,
            "weight": lambda s: 1.0 if known.sequence_weight is None else known.sequence_weight[s],
            "told": (known.token_weight_sums if has_weights else plan.active_tokens).item,
        }
        counts = [s >= 0 and (left is None or not left[s]) for s in places]
        ids = {
            name: [of(s) if is_in else None for s, is_in in zip(places, counts, strict=True)]
            for name, of in columns.items()
            if of is not None
        }
        of = microbatch
        tokens = () if of is None else (of.keep, of.token_weights, of.layout)
        self._told.append(Told(ids, *tokens))
        self._is_under(aggregation)

    def _is_under(self, aggregation: Any) -> None:
        """Compare with the run's own mode first."""
        for name in ("mode", "divisor", "exponent"):
            if (value := getattr(aggregation, name)) is not None:
                is_c = (aggregation.mode, name) == ("token_sum", "divisor")
                self._given.setdefault("C" if is_c else name, value)

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
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """Return a microbatch's per-token losses; the loss is computed from what is returned.

        ``losses``: this rank's, ``[T]`` or ``[b, s]``.
        ``mask``: like it; tokens with a weight outside of it, and those of it without one, are
        reported. A loss of 0 outside of it, as of an ``ignore_index``, has no weight.
        ``cu_seqlens``: offsets of the whole packed sequences, padding included, ``[G + 1]``;
        without, an entry of the batch is a sequence. ``lengths``: in their place, the tokens of
        each sequence that this rank holds, in order. ``term``: the name of a term of the loss,
        which is weighed by itself. Call it once per microbatch and term, in their order.
        ``microbatch``: its number, from 0, for a loss that is computed in pieces: each call for one
        has more of its sequences. ``names``: what the report calls the sequences. ``cp_group``:
        whose ranks hold the microbatch's sequences, with dynamic context parallelism, or outside of
        Megatron. ``sample``, ``prompt``, ``group``: of each sequence, as for a step; padding has
        the sample None. ``token_weights``: like the losses, what each weighs in the loss: modes
        count their sums. What is wrong with a call is raised by :meth:`weighed`, on every rank.
        """
        try:
            if any(losses is call.heard() and call.term == term for call in self._calls):
                raise ContractError(
                    "got losses that losses() returned, expected those that it gets: call it once "
                    "for the same tokens of a term"
                )
            if cu_seqlens is not None and lengths is not None:
                raise ContractError("got cu_seqlens= and lengths=, expected one of them")
            mask = _checked(losses, mask, "a mask")
            token_weights = _checked(losses, token_weights, "token_weights")
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
            cu_seqlens=_kept(cu_seqlens),
            lengths=_kept(lengths),
            mask=mask,
            names=names,
            microbatch=microbatch,
            cp_group=cp_group,
            ids={name: _listed(ids) for name, ids in passed.items() if ids is not None},
            is_zero=losses.detach() == 0,
            token_weights=token_weights,
            scale=self.run.scale(),
            has_graph=losses.requires_grad,
            is_again=is_in_backward(),
        )
        self._calls.append(call)
        if not losses.requires_grad:
            return losses
        listened = losses.clone()  # whose node is of the losses only
        call.arrived.listen(listened)
        call.heard = weakref.ref(listened)
        return listened

    def reduced(self) -> None:
        """Read gradients that were reduced after the block; no collective, no host sync."""
        self._parameters.finalized()

    def has_mask(self, mask: Tensor) -> None:
        """Take a mask for the last call, if it had none and it is of as many tokens."""
        if self._calls and self._calls[-1].mask is None:
            with suppress(ContractError):
                self._calls[-1].mask = _of_shape(mask, self._calls[-1].shape, "a mask")

    def weighed(self) -> Weighed:
        """Compare the weights of all ranks with every mode; the same on every rank.

        One or two all-gathers over all ranks; waits for the device. Raises, on every rank, the
        :class:`ContractError` of one, and for a loss of several terms (:meth:`terms`).
        """
        terms = self.terms()
        if len(terms) > 1:
            raise ContractError(f"got the terms {[*terms]}, expected one loss: call terms()")
        return next(iter(terms.values()))

    @property
    def _terms(self) -> list[str]:
        return [*dict.fromkeys(call.term for call in self._calls)]

    def terms(self) -> dict[str, Weighed]:
        """Compare the weights of each term of the loss, as :meth:`weighed`, by its name."""
        with together(dist.group.WORLD, "call weighed() or terms()") as ranks:
            of = {term: self.of_this_rank(term) for term in self._terms}
            ranks.own = next(iter(of.values()), None) or self.of_this_rank(), of
        found: list[tuple[RankWeights, dict[str, RankWeights]]] = ranks.of_ranks
        of_ranks = [terms for _, terms in found]
        names = [*dict.fromkeys(chain(*of_ranks))] or [LOSS]
        # Metrics are reduced as terms are, and have no graph on any rank.
        trained = [
            name
            for name in names
            if any(terms[name].has_graph for terms in of_ranks if name in terms)
        ]
        of_term = {
            name: [
                terms.get(
                    name,
                    replace(
                        rank,
                        parts=parts_of(0),
                        tolerance=TOLERANCE,
                        moment=None,
                        unheard=rank.sizes["M"],
                    ),
                )
                for rank, terms in found
            ]
            for name in trained or names
        }
        is_any = any(rank.parts["tokens"].any() for rank in chain(*of_term.values()))
        training = [(rank, terms) for rank, terms in found if rank.has_gradient]
        is_heard = all(is_any and (terms or not rank.counts) for rank, terms in training)
        return {name: compare(ranks, is_heard=is_heard) for name, ranks in of_term.items()}

    def of_this_rank(self, term: str = LOSS) -> RankWeights:
        """Return the weights of this rank's tokens, per part of a sequence; waits for the device.

        No collective. A rank that computes no loss has none, and of tensor-parallel ranks, which
        all have the same tokens, only the first has parts.
        """
        if self._fault is not None:
            raise self._fault
        if self._num_finalized > 1:
            raise ContractError(
                f"got {self._num_finalized} steps inside of one Weighing, expected one: make a "
                "Weighing for each schedule call"
            )
        for aggregation in own:
            self._is_under(aggregation)
        counts, m = self.run.place.counts, self._num_microbatches
        of_term = {
            name: microbatches_of(
                [call for call in self._calls if call.term == name],
                m,
                gone=self._parameters.gone,
                reaching=self._parameters.reaching,
            )
            for name in self._terms
        }
        microbatches = of_term.get(term, [])
        first = next((call for call in chain(*microbatches)), None)
        run = self.run if first is None else self.run.of_microbatch(first.cp_group)
        num_tokens = None if self._num_tokens is None else float(self._num_tokens.item())
        eps = [call.trained.eps for call in chain(*microbatches)]
        is_told = len(self._told) == len(microbatches)
        found = [
            self._parts(number, calls, is_told=is_told) for number, calls in enumerate(microbatches)
        ]
        parts = np.concatenate([parts_of(0), *found])
        return RankWeights(
            sizes={"M": m or max(map(len, of_term.values()), default=0), **run.place.sizes},
            parts=parts if counts else parts_of(0),
            place=(run.place.dp_rank, run.place.cp_rank),
            moment=float(parts["moment"].sum()) if microbatches else None,
            num_tokens=num_tokens,
            is_finalized=bool(self._num_finalized),
            factor=self.run.factor(),
            added=self._parameters.results(),
            counts=counts,
            tolerance=max([TOLERANCE, *eps]),
            given=self._given,
            has_graph=any(call.trained.has_graph for call in chain(*microbatches)),
            unheard=max((m or 0) - sum(map(bool, microbatches)), 0),
            zeroed=sum(
                call.is_zeroed for call in self._calls if call.term == term and not call.is_again
            ),
            lacks=self._lacks,
        )

    def _finalizes(self, num_tokens: Tensor | None) -> None:
        self._num_finalized += 1
        if num_tokens is not None:
            self._num_tokens = num_tokens.detach().clone()  # summed over ranks in place

    def _parts(self, number: int, calls: Sequence[Call], *, is_told: bool) -> Array:
        """Sum a microbatch's weights per sequence, of the tokens that this rank holds."""
        found, first = [parts_of(0)], 0
        told = self._told[number] if is_told else None
        lengths = [() if one.trained.lengths is None else one.trained.lengths for one in calls]
        total = sum(map(len, lengths))
        for call in calls:
            parts, num_sequences = self._parts_of(call, first, told, total)
            found, first = [*found, parts], first + num_sequences
        parts = np.concatenate(found)
        parts["microbatch"] = number
        parts["padded"] = sum(int(np.prod(call.trained.shape)) for call in calls)
        return parts

    def _have_values(self, term: str) -> bool:
        """Whether a loss of a term is not 0; else those of 0 may have a gradient, as of a KL."""
        return any(not call.is_zero.all() for call in self._calls if call.term == term)

    def _parts_of(self, call: Call, first: int, told: Told | None, total: int) -> tuple[Array, int]:
        """Return the parts of a call, and how many sequences it has.

        ``first``: of its first; ``total``: how many all calls of the microbatch have, 0 if their
        lengths were not passed.
        """
        heard, run = call.trained, self.run.of_microbatch(call.cp_group)
        num_tokens = int(np.prod(heard.shape))
        if heard.lengths is not None:
            num_sequences = len(heard.lengths)
            segments, allows_tail = np.repeat(np.arange(num_sequences), heard.lengths), False
            held_G = np.arange(num_sequences)
        else:
            layout = run.layout(heard.shape, heard.cu_seqlens)
            segments = np.repeat(layout.segment_R, layout.length_R)
            num_sequences, allows_tail = layout.num_segments, layout.allows_tail
            held_G = np.unique(segments)
        num_held = len(segments)
        if num_held > num_tokens or (num_held < num_tokens and not allows_tail):
            raise ContractError(
                f"got losses of {num_tokens} tokens, expected {num_held}, which this rank holds of "
                "the sequences: pass whole offsets with padding, or the lengths here"
            )
        ids = heard.ids
        for kind, of in ids.items():
            if len(of) != num_sequences:
                raise ContractError(
                    f"got {kind} of {len(of)} sequences, expected {num_sequences}, as the call of "
                    "losses has: pass one for each, and None for padding"
                )
        mask = heard.mask if heard.mask is not None else call.mask
        values = heard.token_weights
        if told is not None and len(told.ids["sample"]) == (total or num_sequences):
            own_ids = {kind: of[first : first + num_sequences] for kind, of in told.ids.items()}
            ids = {**own_ids, **ids}
            mask = told.for_losses(told.keep, num_held, 0) if mask is None else mask
            values = told.for_losses(told.token_weights, num_held, 1) if values is None else values
            if values is None and told.token_weights is not None:
                self._lacks["weights of tokens"] = "token_weights, of losses that were gathered"
        scale = self._loss_scale * (1.0 if heard.scale is None else float(heard.scale))
        weight_T, arrived = np.zeros(num_tokens), [gradient for _, gradient in call.gradients]
        if arrived:
            weight_T = weights_of([one.cpu() for one in arrived], scale, torch.float64).numpy()
        if past := int((weight_T[num_held:] != 0).sum()):
            raise ContractError(
                f"got {past} trained tokens past the last sequence, expected none: pass the "
                "offsets of all sequences, cu_seqlens"
            )
        weight_T = weight_T[:num_held]
        mask_T = weight_T != 0 if mask is None else _numpy(mask)[:num_held]
        in_mask_T = mask_T != 0
        if self._have_values(call.term):
            weight_T[~in_mask_T & (_numpy(heard.is_zero)[:num_held] != 0)] = 0
        if values is None and (mask_T != in_mask_T).any():
            self._lacks["weights of tokens"] = "token_weights, if the mask's values are weights"
        value_T = np.ones(num_held) if values is None else _numpy(values)[:num_held]
        if (bad_T := in_mask_T & ~((value_T >= 0) & (value_T < np.inf))).any():
            raise ContractError(
                f"got token_weights of {value_T[bad_T][0]:g}, expected finite numbers from 0 on, "
                "which modes count: multiply others, such as advantages, into the losses"
            )
        # What is left out, or padding, weighs 0.
        omega_G = np.array([one or 0.0 for one in ids.get("weight", [1.0] * num_sequences)])
        own_T = value_T * omega_G[segments]
        in_mask_T = in_mask_T & (own_T != 0)
        parts = parts_of(
            num_sequences,
            dp_rank=run.place.dp_rank,
            cp_rank=run.place.cp_rank,
            sequence=first + np.arange(num_sequences),
            name=[*(heard.names or ()), *[""] * num_sequences][:num_sequences],
            **_sums(weight_T, in_mask_T, segments, value_T, own_T, num_sequences),
            **{kind: of for kind, of in ids.items() if kind != "weight"},
        )
        if run.place.sizes["CP"] == 1 and (shortest := _shortest(parts)) is not None:
            here = segments == shortest
            parts["shown"][shortest] = _signs(weight_T[here] != 0, in_mask_T[here])
        return parts[held_G], num_sequences


def _sums(
    weight_T: Array, in_mask_T: Array, segment_T: Array, value_T: Array, own_T: Array, size: int
) -> dict[str, Array]:
    """Sum over the tokens of each sequence of a call; columns of ``PART``, ``[G]``.

    ``value_T``, ``own_T``: what a token weighs in the loss, without and with its sequence.
    """
    has_T = weight_T != 0
    of, weight = segment_T[has_T], weight_T[has_T]
    smallest, largest = bounds(of, weight, size)
    with np.errstate(divide="ignore"):  # a token that should weigh nothing
        lowest, highest = bounds(of, weight / own_T[has_T], size)
    return {
        "tokens": np.bincount(of, minlength=size),
        "weight_sum": np.bincount(of, weight, minlength=size),
        "moment": np.bincount(of, abs(weight) * (1 + np.flatnonzero(has_T)), minlength=size),
        "weight_min": smallest,
        "weight_max": largest,
        "lowest": lowest,
        "highest": highest,
        "n": np.bincount(of, value_T[has_T], minlength=size),
        "outside": np.bincount(segment_T[has_T & ~in_mask_T], minlength=size),
        "missed": np.bincount(segment_T[in_mask_T & ~has_T], minlength=size),
        "length": np.bincount(segment_T, minlength=size),
    }


def _shortest(parts: Array) -> int | None:
    """Return the shortest sequence of which not every token has a weight, if it is short.

    One that differs from the mask, if there is one.
    """
    differs = parts["outside"] + parts["missed"] > 0
    able = (parts["tokens"] > 0) & (parts["tokens"] < parts["length"]) | differs
    able &= parts["length"] <= _SHOWN
    able &= differs | ~(able & differs).any()
    return int(np.where(able, parts["length"], _SHOWN + 1).argmin()) if able.any() else None


def _signs(has_T: Array, in_mask_T: Array) -> str:
    """Return a sign for each position."""
    return "".join(np.where(in_mask_T, np.where(has_T, "#", "0"), np.where(has_T, "!", ".")))


def _checked(losses: Any, values: Tensor | None, what: str) -> Tensor | None:
    """Return a value per loss, such as a mask; raises for what are no losses of tokens."""
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
    return None if values is None else _of_shape(values, tuple(losses.shape), what)


def _of_shape(values: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
    values = torch.as_tensor(values)
    is_other = values.dim() == len(shape) == 2 and values.shape != shape
    if values.numel() != np.prod(shape) or is_other:
        raise ContractError(
            f"got {what} of {tuple(values.shape)} for losses of {shape}, expected the same shape: "
            "pass the part that this rank holds, in the order of the losses"
        )
    return values.detach().clone()


def _numpy(values: Tensor) -> Array:
    """Return numbers per token, ``[T]``; waits for the device."""
    found: Array = values.detach().reshape(-1).double().cpu().numpy()
    return found


def _kept(values: Any) -> Any:
    """Copy lengths or offsets, whose buffer a loop may fill again; no host sync."""
    if isinstance(values, list | tuple):
        return [*values]
    copied = getattr(values, "clone", getattr(values, "copy", None))
    return values if copied is None else copied()


def _listed(ids: Any) -> list[Any]:
    if isinstance(ids, Tensor | np.ndarray):
        return ids.tolist()
    # Tensors of one number each are one id only if they are one object.
    return [one.item() if isinstance(one, Tensor) else one for one in ids]
