"""The sequences and the loss mask of one microbatch: checked, and sliced for this rank.

Everything that the reducers of a microbatch share, under any aggregation. The code is the same
for a mask on any device; :meth:`Faults.check` decides when its checks are read.

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

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.faults import Faults, warn_once
from megatron_lossagg.reduction.integers import Ints, IntsLike, checked_integers, first_few
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.step_state import StepState

__all__ = ["PADDING", "Microbatch", "Segments", "held", "weight_slack"]

PADDING = -1
"""The entry of ``sequences`` that represents a padding sequence or padding segment."""

_MASK_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The segments of one microbatch, and how messages name them; integers on the CPU only."""

    sequences: Ints
    """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
    counted: Ints
    """int64 ``[G]``: the plan's count of each segment's sequence, 0 for a padding sequence."""
    counted_weights: npt.NDArray[np.float64] | None
    """float64 ``[G]``: the plan's sum of token weights likewise; None if it has none."""
    layout: Layout
    microbatch_of_sequence: Ints | None
    rejects_tokens: bool
    """Whether a sequence may train fewer tokens than were counted."""

    def __str__(self) -> str:
        """Name the microbatch: ``microbatch 2 with sequences 5, 6``."""
        real = self.own_sequences
        if not len(real):
            return "a microbatch without sequences"
        number = "a microbatch"
        if self.microbatch_of_sequence is not None:
            number = f"microbatch {self.microbatch_of_sequence[real[0]]}"
        return f"{number} with sequences {first_few(real)}"

    @property
    def own_sequences(self) -> Ints:
        """The sequences of the segments that are not padding."""
        own: Ints = self.sequences[self.sequences != PADDING]
        return own

    @property
    def is_sliced_by_framework(self) -> bool:
        """Whether the mask has only this rank's part of each sequence."""
        return self.layout.is_local and self.layout.cp_size > 1

    @property
    def rank_name(self) -> str:
        """Name this rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"rank {rank} (context-parallel rank {self.layout.cp_rank})"

    @property
    def mask_name(self) -> str:
        """Name this microbatch's mask on this rank."""
        return f"{self.rank_name}: the mask of {self}"

    def token(self, index: int) -> tuple[str, str]:
        """Name the sequence, and the token in it, that this rank's token ``index`` is."""
        segment, token = self.layout.place(index)
        sequence = self.sequences[segment]
        whose = "a padding sequence" if sequence == PADDING else f"sequence {sequence}"
        part = " of this rank's part" if self.is_sliced_by_framework else ""
        return f"{whose} (segment {segment} of {self})", f"{token}{part}"

    def describe_value(self, values: list[float]) -> str:
        """Describe a mask's value that is not 0 or 1; see :func:`_check_mask`."""
        is_wrong, index, value = values
        if not is_wrong:
            return ""
        position = self.layout.positions[int(index)]
        return (
            f"{self.mask_name} holds {value:.9g} at position {position}: a mask is 0 or 1; pass "
            "weights that the denominators count as token_weights= (--loss-aggregation-count "
            "weights), and multiply another coefficient (importance ratio) into the losses"
        )

    def describe_weight(self, values: list[float]) -> str:
        """Describe a token weight that no loss may have; see :func:`_check_weights`."""
        is_wrong, index, value = values
        if not is_wrong:
            return ""
        position = self.layout.positions[int(index)]
        return (
            f"{self.rank_name}: the token weights of {self} hold {value:g} at position {position}: "
            "a weight is finite and not negative, and 0 where the mask is 0"
        )

    def describe_weight_sums(self, values: list[float]) -> str:
        """Describe a segment whose trained weights are not those counted; see _check_weights."""
        least, least_segment, most, most_segment = values
        allows_fewer = self.rejects_tokens or self.is_sliced_by_framework
        if least >= 0 and (most <= 0 or allows_fewer):
            return ""
        segment = int(most_segment if least >= 0 else least_segment)
        whose = f"{self.rank_name}: the token weights of {self}"
        if segment == len(self.sequences):
            return f"{whose} are not 0 past the last segment's end"
        assert self.counted_weights is not None
        return (
            f"{whose} do not sum to what was counted: segment {segment} has "
            f"{'less' if least >= 0 else 'more'} than the "
            f"{self.counted_weights[segment]:.9g} of its sequence {self.sequences[segment]}: check "
            "token_weights, mask, sequences and Sequences.token_weight_sums, which are sums in "
            "float64"
        )

    def describe_counts(self, values: list[float]) -> str:
        """Describe a segment that trains other tokens than were counted; see _check_mask."""
        least, least_segment, most, most_segment = map(int, values)
        if least < 0 and least_segment == len(self.sequences):
            return (
                f"{self.mask_name} is 1 at {-least} positions past the last segment's end "
                f"{self.layout.num_tokens}: end cu_seqlens after them, or clear the mask there"
            )
        if least < 0:
            return f"{self.mask_name}: {self._miscounted(least, least_segment)}"
        if most > 0 and not self.rejects_tokens and not self.is_sliced_by_framework:
            return f"{self.mask_name}: {self._miscounted(most, most_segment)}"
        return ""

    def _miscounted(self, missing: int, segment: int) -> str:
        """Describe a segment that trains ``missing`` tokens fewer than were counted."""
        sequence, counted = self.sequences[segment], self.counted[segment]
        if sequence == PADDING:
            return (
                f"segment {segment} is named as padding (-1) and its mask is 1 at {-missing} "
                "positions: give its sequence, or clear the mask there"
            )
        remedy = "check mask, sequences and Sequences.active_tokens"
        if missing > 0:
            remedy += (
                "; if tokens are rejected on purpose, declare it with "
                "--loss-aggregation-rejects-tokens (Options(rejects_tokens=True))"
            )
        return (
            f"segment {segment} trains {counted - missing} tokens, the plan counted {counted} for "
            f"its sequence {sequence}: {remedy}"
        )

    @staticmethod
    def describe_shift(values: list[float]) -> str:
        """Warn if a segment's last position, which predicts a token outside of it, is trained."""
        if any(values):
            warn_once(
                "shift",
                "the mask is 1 at the last position of a segment, whose logit predicts a token "
                "that the segment does not hold: mask[i] belongs to logit i, the prediction of "
                "token i + 1; shift it before packing. Ignore this if each label is one token "
                "longer than its sequence, as in pretraining data",
            )
        return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """One microbatch: its segments, and which of their tokens this rank trains."""

    segments: Segments
    keep: Tensor
    """bool ``[T]``, on the mask's device: the loss mask of the tokens this rank holds."""
    token_weights: Tensor | None
    """v_t of the same tokens, on the mask's device; None if the plan has none."""
    num_past_end: int
    """Mask positions past the last segment: as many losses may follow this rank's."""
    state: StepState
    """The step's: where checks on a device leave their results."""
    trained: Tensor
    """``[G]``: tokens of each segment that the mask trains and this rank holds."""
    trained_weights: Tensor | None
    """float64 ``[G]``: the sum of their weights; None if the plan has none."""
    identity: object = field(default_factory=object, init=False, repr=False)
    """Stands for this microbatch when its tensors must not be kept."""
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
        token_weights: Tensor | None,
        active_tokens: Ints,
        token_weight_sums: npt.NDArray[np.float64] | None,
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
        segments = Segments(
            sequences=sequences_G,
            counted=_of_sequences(active_tokens, sequences_G),
            counted_weights=None
            if token_weight_sums is None
            else _of_sequences(token_weight_sums, sequences_G),
            layout=layout,
            microbatch_of_sequence=microbatch_of_sequence,
            rejects_tokens=state.rejects_tokens,
        )
        keep_T, trained_G = _check_mask(mask_P, segments, state.faults)
        weight_T, trained_weight_G = None, None
        if token_weights is not None:
            weight_P = _checked_weights(token_weights, mask)
            weight_T, trained_weight_G = _check_weights(
                weight_P, mask_P, keep_T, segments, state.faults
            )
        return Microbatch(
            segments=segments,
            keep=keep_T,
            token_weights=weight_T,
            num_past_end=len(mask_P) - layout.num_tokens,
            state=state,
            trained=trained_G,
            trained_weights=trained_weight_G,
        )

    def note_trained(self, num_sequences: int) -> None:
        """Note what this rank trains of each sequence, which context-parallel ranks compare.

        Where the framework slices the mask, and of gathered losses, each rank weighs its part by a
        mask of its own: every call of a reducer is noted. A whole mask should be the other ranks'
        too; of several over one sequence the first is noted.
        """
        layout, sequences = self.segments.layout, self.segments.own_sequences
        if layout.cp_size == 1 or self.state.calls is None:  # no step runs, whose end compares
            return
        own = np.flatnonzero(self.segments.sequences != PADDING)
        tally, weight_tally = self.state.trained, self.state.trained_weights
        if not (layout.is_local or layout.is_gathered):
            tally, weight_tally = self.state.trained_of_whole, self.state.weights_of_whole
            is_new = tally.lacks(sequences)
            if not is_new.any():
                return
            own, sequences = own[is_new], sequences[is_new]
        index = from_numpy(own, self.trained.device)
        tally.add(sequences, self.trained[index], num_sequences)
        if self.trained_weights is not None:
            weight_tally.add(sequences, self.trained_weights[index], num_sequences)

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
            weight_T = self._packed(weight_S, dtype, device)
            if aggregation.count == "weights":
                assert self.token_weights is not None
                weight_T = weight_T.mul_(moved(self.token_weights, device).to(dtype))
            self._weights[key] = weight_T
        return self._weights[key]

    def _packed(
        self, weight_S: npt.NDArray[np.float64], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        keep_T, layout = self.keep_on(device), self.segments.layout
        weight_G = _of_sequences(weight_S, self.segments.sequences)
        values = weight_G[weight_G > 0]
        weight_G = weight_G.astype(str(dtype).removeprefix("torch."))
        if len(values) and PADDING not in self.segments.sequences and (values == values[0]).all():
            # Sequences of weight 0 train nothing, so one weight serves for all that is kept.
            return torch.mul(keep_T, torch.tensor(weight_G.max(), dtype=dtype))
        weight_T = np.repeat(weight_G[layout.segment_R], layout.length_R)
        return from_numpy(weight_T, device).mul_(keep_T)


def _check_mask(mask_P: Tensor, segments: Segments, faults: Faults) -> tuple[Tensor, Tensor]:
    """Slice a mask and check it: 0 or 1, nothing past the end, each sequence's tokens as counted.

    Returns the mask that this rank keeps, bool ``[T]``, and how many tokens that is of each
    segment, ``[G]``. Each rank checks that the tokens it holds are 0 or 1; the context-parallel
    ranks together hold them all.
    """
    layout, device = segments.layout, mask_P.device
    value_T = held(mask_P, layout)
    keep_T = value_T == 1
    if not len(mask_P):
        if segments.counted.any():
            most = int(segments.counted.argmax())
            fault = segments.describe_counts([0, 0, segments.counted[most], most])
            if fault:
                raise ReducerError(fault)
        return keep_T, torch.zeros(layout.num_segments, dtype=torch.int64, device=device)
    if mask_P.dtype != torch.bool and len(value_T):
        faults.check(
            device,
            lambda: _first_of(value_T != keep_T, value_T),
            segments.describe_value,
            seems_right=lambda: bool(value_T.count_nonzero() == keep_T.count_nonzero()),
        )
    selected_P = keep_T if len(keep_T) == len(mask_P) else mask_P
    sum_P = torch.cumsum(selected_P, dim=0, dtype=torch.int32)
    trained_G1, last_G2 = _segment_sums(sum_P, layout)
    # Segment G is what follows the last one, and may train nothing.
    missing_G1 = from_numpy(np.append(segments.counted, 0), device) - trained_G1
    faults.check(
        device,
        lambda: [*missing_G1.min(dim=0), *missing_G1.max(dim=0)],
        segments.describe_counts,
        seems_right=lambda: not missing_G1.any(),
    )
    if layout.is_whole and layout.num_segments:
        faults.check(device, lambda: [selected_P[last_G2[1:-1]].any()], segments.describe_shift)
    return keep_T, _held_sums(sum_P, trained_G1[:-1], layout)


def held(value_P: Tensor, layout: Layout) -> Tensor:
    """Slice what is packed like the mask: the tokens that this rank holds, ``[T]``."""
    if layout.interval is not None:
        return value_P[layout.interval]
    index_T = layout.positions.numpy()
    if len(value_P) <= np.iinfo(np.int32).max:  # half the bytes to copy and to read
        index_T = index_T.astype(np.int32)
    return torch.index_select(value_P, 0, from_numpy(index_T, value_P.device))


def _segment_sums(sum_P: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Take each segment's sum out of a cumulative one, ``[G1]``: the last is of what follows them.

    Also returns the index of each segment's last position, ``[G2]``, from that before the first.
    """
    end_G2 = np.append(layout.offset_G1, len(sum_P))
    last_G2 = np.maximum(end_G2 - 1, 0)  # the index of the sum up to an end
    last_G2, is_past_0_G2 = from_numpy(np.stack([last_G2, end_G2 > 0]), sum_P.device)
    sum_G2 = sum_P[last_G2] * is_past_0_G2
    return sum_G2[1:] - sum_G2[:-1], last_G2


def _held_sums(sum_P: Tensor, whole_G: Tensor, layout: Layout) -> Tensor:
    """Take the sums over what this rank holds of each segment out of a cumulative one, ``[G]``.

    ``whole_G``: those over whole segments, which are the same if the rank holds the whole mask.
    """
    if layout.cp_size == 1 or layout.is_local:
        return whole_G
    last_2R = np.stack([layout.start_R - 1, layout.start_R + layout.length_R - 1])
    last_2R, is_past_0_2R = from_numpy(
        np.stack([np.maximum(last_2R, 0), last_2R >= 0]), sum_P.device
    )
    before_R, through_R = sum_P[last_2R] * is_past_0_2R
    segment_R = from_numpy(np.array(layout.segment_R), sum_P.device)  # the layout's is read-only
    return torch.zeros_like(whole_G).index_add_(0, segment_R, through_R - before_R)


def weight_slack(counted: Tensor, total: Tensor) -> Tensor:
    """Return how far sums of weights may be from those counted.

    1e-6 of their own size, and 1e-10 of ``total``, from whose cumulative sum they are taken.
    """
    return 1e-6 * counted + 1e-10 * total


def _check_weights(
    weight_P: Tensor, mask_P: Tensor, keep_T: Tensor, segments: Segments, faults: Faults
) -> tuple[Tensor, Tensor]:
    """Slice token weights and check them: each a weight, each sequence's sum as counted.

    Returns those of the tokens that this rank holds, ``[T]``, and the sum of those that are trained
    of each segment, float64 ``[G]``.
    """
    layout, device = segments.layout, mask_P.device
    weight_T = held(weight_P, layout)
    if layout.interval is not None:  # a view, and the caller may use its memory again
        weight_T = weight_T.clone()
    if not len(mask_P):
        return weight_T, torch.zeros(layout.num_segments, dtype=torch.float64, device=device)
    is_wrong_T = ~((weight_T >= 0) & (weight_T < torch.inf))
    if not segments.rejects_tokens:
        is_wrong_T |= (weight_T != 0) & ~keep_T
    if len(weight_T):
        faults.check(
            device,
            lambda: _first_of(is_wrong_T, weight_T),
            segments.describe_weight,
            seems_right=lambda: not is_wrong_T.any(),
        )
    sum_P = torch.cumsum(torch.where(mask_P == 1, weight_P, 0), dim=0, dtype=torch.float64)
    trained_G1, _ = _segment_sums(sum_P, layout)
    assert segments.counted_weights is not None
    counted_G1 = from_numpy(np.append(segments.counted_weights, 0.0), device)
    missing_G1, slack_G1 = counted_G1 - trained_G1, weight_slack(counted_G1, sum_P[-1])
    faults.check(
        device,
        lambda: [*(missing_G1 + slack_G1).min(dim=0), *(missing_G1 - slack_G1).max(dim=0)],
        segments.describe_weight_sums,
        seems_right=lambda: bool((missing_G1.abs() <= slack_G1).all()),
    )
    return weight_T, _held_sums(sum_P, trained_G1[:-1], layout)


def _first_of(is_wrong_T: Tensor, value_T: Tensor) -> list[Tensor]:
    """Say whether any is wrong, the index of the first, and its value."""
    is_wrong, index = is_wrong_T.max(dim=0)
    return [is_wrong, index, value_T.index_select(0, index.view(1)).view(())]


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
            f"sequence {wrong} is not one of the {num_sequences} sequences of the step on this "
            "rank: pass positions in Sequences.active_tokens, or -1"
        )
    doubled = in_order[1:][np.diff(in_order) == 0]
    if len(doubled):
        times = int((sequences_G == doubled[0]).sum())
        raise ReducerError(
            f"sequence {doubled[0]} appears in {times} segments of one microbatch: a sequence is "
            "in one segment of one microbatch"
        )
    return sequences_G


def _check_one_microbatch(sequences_G: Ints, microbatch_S: Ints) -> None:
    own_sequences = sequences_G[sequences_G != PADDING]
    planned = microbatch_S[own_sequences]
    other = np.flatnonzero(planned != planned[:1])
    if len(other):
        raise ReducerError(
            f"sequence {own_sequences[0]} was planned in microbatch {planned[0]} and sequence "
            f"{own_sequences[other[0]]} in microbatch {planned[other[0]]}: pass the sequences of "
            "one microbatch, as Sequences.microbatch has them"
        )
    whole = np.flatnonzero(microbatch_S == planned[:1]) if len(own_sequences) else own_sequences
    if len(own_sequences) != len(whole):
        missing = np.setdiff1d(whole, own_sequences)
        raise ReducerError(
            f"microbatch {planned[0]} was planned with {len(whole)} sequences, got "
            f"{len(own_sequences)} without {first_few(missing)}: pass all of its sequences"
        )


def _checked_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Return token weights flat, in floating point and on the mask's device."""
    if not isinstance(weights, Tensor) or weights.dtype not in _MASK_DTYPES:
        raise ReducerError(
            f"got the token weights {weights!r}, expected a tensor of numbers: pass one weight for "
            "each position of the mask"
        )
    if weights.shape != mask.shape:
        raise ReducerError(
            f"got token weights of shape {tuple(weights.shape)} for a mask of shape "
            f"{tuple(mask.shape)}: pass them packed, padded and sliced as the mask is"
        )
    if weights.requires_grad:
        raise ReducerError(
            "got token weights that require a gradient, expected constants, as their counted sums "
            "are: pass token_weights.detach(), and multiply what is trained into the losses"
        )
    weight_P = moved(weights, mask.device).reshape(-1)
    return weight_P if weight_P.is_floating_point() else weight_P.to(torch.float32)


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
    if mask.requires_grad:
        raise ReducerError(
            "got a mask that requires a gradient, expected constants: pass mask.detach(), and "
            "multiply what is trained into the losses"
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
    return mask.reshape(-1)
