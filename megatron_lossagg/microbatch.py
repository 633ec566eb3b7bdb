"""The sequences and the loss mask of one microbatch: checked, and sliced for this rank.

Everything that the reducers of a microbatch share, under any aggregation. A mask on the
CPU is checked here, in numpy; the checks of a mask on a device are left on the device, for
the step to read when it closes.

Shape suffixes: P = positions of the whole mask; T = tokens that this rank holds;
G = segments of the microbatch (G1, G2: and one or two more); R = runs of consecutive
positions; S = sequences of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.devices import from_numpy, moved, on_host
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.faults import Faults, warn_once
from megatron_lossagg.integers import Ints, IntsLike, checked_integers, first_few
from megatron_lossagg.layout import Layout
from megatron_lossagg.state import StepState

__all__ = ["PADDING", "Microbatch", "Place"]

PADDING = -1
"""The entry of ``sequences`` that represents a padding sequence or padding segment."""

_MASK_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_COEFFICIENT = (
    "a mask is 0 or 1; multiply a coefficient (importance ratio, token weight) into the per-token "
    "losses"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """How messages name a microbatch, its sequences and its tokens; host integers alone."""

    sequences: Ints
    layout: Layout
    microbatch_of_sequence: Ints | None

    def __str__(self) -> str:
        """Name the microbatch: ``microbatch 2 with sequences 5, 6``."""
        real = self.sequences[self.sequences != PADDING]
        if not len(real):
            return "a microbatch without sequences"
        number = "a microbatch"
        if self.microbatch_of_sequence is not None:
            number = f"microbatch {self.microbatch_of_sequence[real[0]]}"
        return f"{number} with sequences {first_few(real)}"

    @property
    def rank(self) -> str:
        """Name this rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"rank {rank} (context-parallel rank {self.layout.cp_rank})"

    def token(self, index: int) -> tuple[str, str]:
        """Name the sequence, and the token in it, that this rank's token ``index`` is."""
        segment, token = self.layout.place(index)
        sequence = self.sequences[segment]
        whose = "a padding sequence" if sequence == PADDING else f"sequence {sequence}"
        is_part = self.layout.is_local and self.layout.cp_size > 1
        part = " of this rank's part" if is_part else ""
        return f"{whose} (segment {segment} of {self})", f"{token}{part}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """One microbatch: which sequences, which tokens of them this rank holds, and which it
    trains.
    """

    place: Place
    keep: Tensor
    """bool ``[T]``, on the mask's device: the training mask of the tokens this rank holds."""
    num_past_end: int
    """Mask positions past the last segment: as many losses may follow this rank's."""
    active_tokens: Ints
    """n_s of the step's sequences, int64 ``[S]``."""
    state: StepState
    """The step's: where checks on a device leave their results."""
    trained: Tensor | None
    """Tokens that this rank trains of each sequence of :attr:`own_sequences`, if the framework
    slices.
    """
    identity: object = field(default_factory=object, init=False, repr=False)
    """Stands for this microbatch where its tensors must not be kept."""
    _keep_on: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _weights: dict[tuple[Aggregation, torch.dtype, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    @staticmethod
    def checked(
        sequences: IntsLike,
        mask: Tensor,
        layout: Layout,
        *,
        active_tokens: Ints,
        microbatch_of_sequence: Ints | None,
        state: StepState,
    ) -> Microbatch:
        """Check sequences and mask and slice the mask; see ``StepPlan.reducer``.

        Raises :class:`ReducerError`. No collective. No host sync, unless ``sequences`` is a CUDA
        tensor.
        """
        sequences_G = _checked_sequences(sequences, layout, len(active_tokens))
        if microbatch_of_sequence is not None:
            _check_one_microbatch(sequences_G, microbatch_of_sequence)
        mask_P = _checked_shape(mask, layout)
        place = Place(
            sequences=sequences_G, layout=layout, microbatch_of_sequence=microbatch_of_sequence
        )
        checks = _Checks(
            place=place,
            counted_G=_of_sequences(active_tokens, sequences_G),
            rejects_tokens=state.rejects_tokens,
        )
        check = checks.on_host if on_host(mask_P) else checks.on_device
        keep_T, trained_G = check(mask_P, state.faults)
        trained = None
        if layout.is_local and layout.cp_size > 1:
            trained = trained_G[
                from_numpy(np.flatnonzero(sequences_G != PADDING), trained_G.device)
            ]
        return Microbatch(
            place=place,
            keep=keep_T,
            num_past_end=len(mask_P) - layout.num_tokens,
            active_tokens=active_tokens,
            state=state,
            trained=trained,
        )

    @property
    def own_sequences(self) -> Ints:
        """The sequences of the segments that are not padding."""
        own: Ints = self.sequences[self.sequences != PADDING]
        return own

    @property
    def faults(self) -> Faults:
        """Where checks on a device leave their results."""
        return self.state.faults

    @property
    def sequences(self) -> Ints:
        """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
        return self.place.sequences

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self.place.layout

    def keep_on(self, device: torch.device) -> Tensor:
        """Return ``keep`` on a device; copied there once."""
        if device not in self._keep_on:
            self._keep_on[device] = moved(self.keep, device)
        return self._keep_on[device]

    def weights(
        self,
        aggregation: Aggregation,
        weight_S: npt.NDArray[np.float64],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Give each token its sequence's weight, 0 where it is not trained; ``[T]``.

        ``weight_S``: the step's weights under the aggregation. Made once for an aggregation, dtype
        (float32 or float64) and device.
        """
        key = (aggregation, dtype, device)
        if key not in self._weights:
            self._weights[key] = self._packed(weight_S, dtype, device)
        return self._weights[key]

    def _packed(
        self, weight_S: npt.NDArray[np.float64], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        weight_G = _of_sequences(weight_S, self.sequences)
        values = weight_G[weight_G > 0]
        weight_G = weight_G.astype(str(dtype).removeprefix("torch."))
        if len(values) and PADDING not in self.sequences and (values == values[0]).all():
            # Sequences of weight 0 train nothing, so one weight serves for all that is kept.
            weight = weight_G.max()
            if on_host(self.keep):
                return from_numpy(np.multiply(self.keep.numpy(), weight), device)
            return torch.mul(self.keep_on(device), torch.tensor(weight, dtype=dtype))
        weight_T = np.repeat(weight_G[self.layout.segment_R], self.layout.length_R)
        if on_host(self.keep):
            np.multiply(weight_T, self.keep.numpy(), out=weight_T)
            return from_numpy(weight_T, device)
        return from_numpy(weight_T, device).mul_(self.keep_on(device))

    @property
    def counted_tokens(self) -> int:
        """Active tokens of this microbatch by the plan's count, complete over CP."""
        return int(_of_sequences(self.active_tokens, self.sequences).sum())


@dataclass(frozen=True, kw_only=True)
class _Checks:
    """The checks of one mask: 0 or 1, nothing past the end, each sequence's tokens as counted.

    Each rank checks that the tokens it holds are 0 or 1; together the context-parallel ranks
    hold them all. Tokens per sequence are summed over the whole mask. Both methods return the mask
    that this rank keeps, bool ``[T]``, and the tokens it trains of each segment, ``[G]``.
    """

    place: Place
    counted_G: Ints
    """The plan's count of each segment's sequence, 0 for a padding sequence."""
    rejects_tokens: bool
    """Whether a sequence may train fewer tokens than were counted."""

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self.place.layout

    @property
    def sequences_G(self) -> Ints:
        """The sequence of each segment."""
        return self.place.sequences

    def on_host(self, mask_P: Tensor, faults: Faults) -> tuple[Tensor, Tensor]:
        """Check in numpy and slice; raises :class:`ReducerError`."""
        if mask_P.dtype in (torch.float16, torch.bfloat16):  # too narrow for a count
            mask_P = mask_P.float()
        value_P: npt.NDArray[Any] = mask_P.numpy()
        end = self.layout.num_tokens
        if self.layout.is_in_order:
            value_T = value_P[: self.layout.num_local_tokens]
        else:
            value_T = np.take(value_P, self.layout.positions.numpy())
        if value_T.dtype == np.bool_:
            keep_T = np.copy(value_T)
        else:
            keep_T = np.not_equal(value_T, 0)
            if not _is_0_or_1(value_T, keep_T):
                self._raise_not_a_mask(value_T)
        if np.any(value_P[end:]):
            position = end + int(np.flatnonzero(value_P[end:])[0])
            raise ReducerError(f"the mask is 1 at position {position}, {self._past_end()}")
        with np.errstate(invalid="ignore"):  # NaN at a token that another rank holds and checks
            trained_G = self._tokens_by_segment(value_P).astype(np.int64)
        missing_G = self.counted_G - trained_G
        if len(missing_G):
            self._raise_if(self._miscounted(int(missing_G.min()), int(missing_G.argmin())))
            self._raise_if(self._miscounted(int(missing_G.max()), int(missing_G.argmax())))
            if self._shows_a_shift and np.any(
                value_P[np.maximum(self.layout.offset_S1[1:] - 1, 0)]
            ):
                _warn_of_shift()
        return torch.from_numpy(keep_T), torch.from_numpy(trained_G)

    def on_device(self, mask_P: Tensor, faults: Faults) -> tuple[Tensor, Tensor]:
        """Slice, and leave the results of the same checks on the device. No host sync."""
        device = mask_P.device
        if self.layout.is_in_order:
            value_T = mask_P[: self.layout.num_local_tokens]
        else:
            index_T = self.layout.positions.numpy()
            if len(mask_P) <= np.iinfo(np.int32).max:  # half the bytes to copy and to read
                index_T = index_T.astype(np.int32)
            value_T = torch.index_select(mask_P, 0, from_numpy(index_T, device))
        is_bool = value_T.dtype == torch.bool
        keep_T = value_T.clone() if is_bool else value_T == 1
        if not len(mask_P):
            if len(self.counted_G):
                most = int(self.counted_G.argmax())
                self._raise_if(self._miscounted(int(self.counted_G[most]), most))
            return keep_T, torch.zeros(len(self.sequences_G), dtype=torch.int64, device=device)
        # Segment G is what follows the last one, and may train nothing.
        end_G2 = np.append(self.layout.offset_S1, len(mask_P))
        last_G2, is_past_0_G2, counted_G2 = from_numpy(
            np.stack(
                [
                    np.maximum(end_G2 - 1, 0),  # the index of the sum up to an end
                    end_G2 > 0,
                    np.append(self.counted_G, [0, 0]),
                ]
            ),
            device,
        )
        selected_P = keep_T if len(keep_T) == len(mask_P) else mask_P
        sum_P = torch.cumsum(selected_P, dim=0, dtype=torch.int32)
        sum_G2 = sum_P[last_G2] * is_past_0_G2
        trained_G1 = sum_G2[1:] - sum_G2[:-1]
        missing_G1 = counted_G2[:-1] - trained_G1
        wrong = torch.zeros_like(missing_G1[0])
        if not is_bool:
            wrong = torch.count_nonzero(value_T) - torch.count_nonzero(keep_T)
        found = [wrong, *missing_G1.min(dim=0), *missing_G1.max(dim=0)]
        if self._shows_a_shift:
            found.append(selected_P[last_G2[1:-1]].any())
        faults.record(found, self._describe)
        return keep_T, trained_G1[:-1]

    @property
    def _holds_whole_sequences(self) -> bool:
        """Whether the mask has whole sequences; a local one has this rank's part of each."""
        return self.layout.cp_size == 1 or not self.layout.is_local

    @property
    def _shows_a_shift(self) -> bool:
        """Whether a segment's last position predicts a token that is not in it."""
        return self.layout.name in ("thd_zigzag", "bshd_zigzag") and len(self.sequences_G) > 0

    def _describe(self, values: list[float]) -> str:
        wrong, least, least_segment, most, most_segment, *at_last = map(int, values)
        where = f"{self.place.rank}: the mask of {self.place}"
        if wrong:
            return f"{where} has {wrong} values other than 0 and 1: {_COEFFICIENT}"
        if least < 0 and least_segment == len(self.sequences_G):
            return f"{where} is 1 at {-least} positions {self._past_end()}"
        for missing, segment in ((least, least_segment), (most, most_segment)):
            if fault := self._miscounted(missing, segment):
                return f"{where}: {fault}"
        if any(at_last):
            _warn_of_shift()
        return ""

    def _miscounted(self, missing: int, segment: int) -> str:
        """Describe a segment that trains ``missing`` tokens fewer than were counted, if wrong."""
        is_fault = missing < 0 or (
            missing > 0 and self._holds_whole_sequences and not self.rejects_tokens
        )
        if not is_fault:
            return ""
        sequence, counted = self.sequences_G[segment], self.counted_G[segment]
        if sequence == PADDING:
            return (
                f"segment {segment} is named as padding (-1) and its mask is 1 at {-missing} "
                "positions: give its sequence, or clear the mask there"
            )
        return (
            f"segment {segment} trains {counted - missing} tokens, the plan counted {counted} for "
            f"its sequence {sequence}: "
            + (
                "a loss mask never selects more tokens than were counted; check sequences and "
                "Sequences.active_tokens"
                if missing < 0
                else "check mask, sequences and Sequences.active_tokens; if tokens are rejected on "
                "purpose, declare it with --loss-aggregation-rejects-tokens "
                "(Options(rejects_tokens=True))"
            )
        )

    def _past_end(self) -> str:
        return (
            f"past the last segment's end {self.layout.num_tokens}: such a token belongs to no "
            "sequence; end cu_seqlens after it, or clear the mask there"
        )

    def _tokens_by_segment(self, value_P: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum the mask by segment in a type that holds the sums."""
        start_G, length_G = self.layout.offset_S1[:-1], np.diff(self.layout.offset_S1)
        trained_G = np.zeros(len(length_G))
        filled = length_G > 0  # reduceat gives an empty segment its neighbour's value
        if value_P.dtype == np.bool_:
            value_P = value_P.view(np.uint8)
        is_float = value_P.dtype.kind == "f"
        trained_G[filled] = np.add.reduceat(
            value_P[: self.layout.num_tokens],
            start_G[filled],
            dtype=value_P.dtype if is_float else np.result_type(value_P.dtype, np.int32),
        )
        return trained_G

    def _raise_not_a_mask(self, value_T: npt.NDArray[Any]) -> None:
        index = int(np.flatnonzero((value_T != 0) & (value_T != 1))[0])
        position = int(self.layout.positions[index])
        raise ReducerError(
            f"the mask holds {value_T[index]} at position {position}: {_COEFFICIENT}"
        )

    @staticmethod
    def _raise_if(fault: str) -> None:
        if fault:
            raise ReducerError(fault)


def _warn_of_shift() -> None:
    warn_once(
        "shift",
        "the mask is 1 at the last position of a segment, whose logit predicts a token that the "
        "segment does not hold: mask[i] belongs to logit i, the prediction of token i + 1; shift "
        "it before packing. Ignore this if each label is one token longer than its sequence, as in "
        "pretraining data",
    )


def _is_0_or_1(value_T: npt.NDArray[Any], keep_T: npt.NDArray[np.bool_]) -> bool:
    """Whether the values, of which ``keep_T`` are not 0, are 1 there."""
    if value_T.dtype.kind in "iu":  # no value may have a bit that 1 does not have
        return int(np.bitwise_or.reduce(value_T, initial=0)) in (0, 1)
    return np.array_equal(keep_T, np.equal(value_T, 1))


def _of_sequences(values_S: npt.NDArray[Any], sequences_G: Ints) -> npt.NDArray[Any]:
    """Look up a value per segment, 0 for a padding sequence."""
    value_G = np.zeros(len(sequences_G), dtype=values_S.dtype)
    is_sequence_G = sequences_G != PADDING
    value_G[is_sequence_G] = values_S[sequences_G[is_sequence_G]]
    return value_G


def _checked_sequences(sequences: IntsLike, layout: Layout, num_sequences: int) -> Ints:
    sequences_G = checked_integers("sequences", sequences, ReducerError)
    if len(sequences_G) != layout.num_segments:
        raise ReducerError(
            f"got {len(sequences_G)} sequences for {layout.num_segments} segments of the layout "
            f"{layout.name}: one entry per segment, -1 for a padding sequence or padding segment"
        )
    in_order = np.sort(sequences_G[sequences_G != PADDING])
    if len(in_order) and (in_order[0] < PADDING or in_order[-1] >= num_sequences):
        wrong = sequences_G[(sequences_G < PADDING) | (sequences_G >= num_sequences)][0]
        raise ReducerError(
            f"sequence {wrong} is not one of the {num_sequences} sequences of the step on "
            f"this rank: sequences are "
            "positions in Sequences.active_tokens, or -1"
        )
    doubled = in_order[1:][np.diff(in_order) == 0]
    if len(doubled):
        times = int((sequences_G == doubled[0]).sum())
        raise ReducerError(
            f"sequence {doubled[0]} appears in {times} segments of one microbatch: each "
            f"sequence is in "
            "exactly one segment of one microbatch of the step"
        )
    return sequences_G


def _check_one_microbatch(sequences_G: Ints, microbatch_S: Ints) -> None:
    own_sequences = sequences_G[sequences_G != PADDING]
    planned = microbatch_S[own_sequences]
    other = np.flatnonzero(planned != planned[:1])
    if len(other):
        raise ReducerError(
            f"sequence {own_sequences[0]} was planned in microbatch {planned[0]} and sequence "
            f"{own_sequences[other[0]]} in microbatch {planned[other[0]]}: pass the "
            f"sequences of one "
            "microbatch, as Sequences.microbatch has them"
        )
    whole = np.flatnonzero(microbatch_S == planned[:1]) if len(own_sequences) else own_sequences
    if len(own_sequences) != len(whole):
        missing = np.setdiff1d(whole, own_sequences)
        raise ReducerError(
            f"microbatch {planned[0]} was planned with {len(whole)} sequences, got "
            f"{len(own_sequences)} "
            f"without {first_few(missing)}: pass all of its sequences, as "
            f"Sequences.microbatch has them"
        )


def _checked_shape(mask: Tensor, layout: Layout) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ReducerError(
            f"got the mask {mask!r}, expected a tensor of 0 and 1: pass the microbatch's whole "
            "loss mask, packed like its tokens"
        )
    if mask.dtype not in _MASK_DTYPES:
        raise ReducerError(
            f"got a mask of {mask.dtype}, expected bool, a signed integer, uint8 or a float type"
        )
    past_end = mask.numel() - layout.num_tokens
    if past_end < 0 or (past_end > 0 and not layout.allows_tail):
        raise ReducerError(
            f"got a mask of {mask.numel()} tokens, the layout {layout.name} has "
            f"{layout.num_tokens}: pass the whole mask, packed and padded like the tokens, "
            "before slicing for context parallelism"
        )
    sizes = [size for size in mask.shape if size != 1]
    has_sequences = layout.batch_shape is not None and len(sizes) > 1 and mask.numel() > 0
    if has_sequences and not layout.is_in_rows(sizes, is_local=False):
        raise ReducerError(
            f"got a mask of shape {tuple(mask.shape)}, expected [b, s] = {layout.batch_shape}: "
            "pass it so and not as [s, b], or flat"
        )
    return mask.detach().reshape(-1)
