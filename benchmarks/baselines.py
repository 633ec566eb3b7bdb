"""The known ways from per-token losses to a loss, written here after each algorithm.

Own code, named for the algorithm: no line of another project. Each computes the package's
sample_mean, token_mean and constant over a microbatch of whole samples, and a benchmark
compares its values with the package's before it measures anything.

Shape suffixes: S = rows; P = mask positions, all responses packed; T = tokens that this
context-parallel rank holds; SW = rows, each padded to the longest.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from benchmarks.workloads import Workload


class SampleLoop:
    """A Python loop over samples, as slime and miles have it.

    Building cuts each sample's mask to this rank's two chunks (CP 1: keeps it). A call
    multiplies, sums, clamps, divides and adds for every sample: 5 n operations forward,
    2 n + 2 backward. Denominators are given, one 0-dim tensor per sample.
    """

    def __init__(self, workload: Workload, denominators: list[Tensor]) -> None:
        self.denominators = denominators
        self.num_samples = workload.num_sequences
        self.divisor = workload.divisor
        self.num_tokens = sum(workload.active_S)
        if workload.cp_size == 1:
            self.masks = workload.masks
        else:
            self.masks = [
                cut_by_slices(mask, total, response, workload.cp_size, workload.cp_rank)
                for mask, total, response in zip(
                    workload.masks,
                    workload.total_S.tolist(),
                    workload.response_S.tolist(),
                    strict=True,
                )
            ]
        self.lengths = [len(mask) for mask in self.masks]

    def sample_mean(self, x_T: Tensor) -> Tensor:
        """Mean over samples of each sample's token mean."""
        parts = zip(x_T.split(self.lengths), self.masks, self.denominators, strict=True)
        means = [(x * m).sum() / torch.clamp_min(n, 1) for x, m, n in parts]
        return sum(means, torch.zeros(())) / self.num_samples

    def token_mean(self, x_T: Tensor) -> Tensor:
        """Mean over all active tokens: multiply, sum, add for every sample."""
        parts = zip(x_T.split(self.lengths), self.masks, strict=True)
        return sum(((x * m).sum() for x, m in parts), torch.zeros(())) / self.num_tokens

    def constant(self, x_T: Tensor) -> Tensor:
        """Token sums over a constant: multiply, sum, divide, add for every sample."""
        parts = zip(x_T.split(self.lengths), self.masks, strict=True)
        sums = ((x * m).sum() / self.divisor for x, m in parts)
        return sum(sums, torch.zeros(())) / self.num_samples


def cut_by_slices(mask: Tensor, total: int, response: int, cp_size: int, cp_rank: int) -> Tensor:
    """Cut one sample's response mask to the two chunks of a rank, by slices and one cat."""
    chunk = -(-total // (2 * cp_size))
    first_logit = total - response - 1
    pieces = []
    for k in (cp_rank, 2 * cp_size - 1 - cp_rank):
        start = min(max(k * chunk, first_logit), total - 1) - first_logit
        end = min(max((k + 1) * chunk, first_logit), total - 1) - first_logit
        pieces.append(mask[start:end])
    return torch.cat(pieces)


def denominators_of(workload: Workload) -> list[Tensor]:
    """One 0-dim tensor per sample: its active tokens over all context-parallel ranks."""
    return list(torch.tensor(workload.active_S).unbind())


class Floor:
    """What has to be done and nothing else: ``cat``, one gather, one multiply; ``(x * w).sum()``.

    Checks nothing, and a NaN at a masked position reaches the loss. Building includes the
    index of this rank's tokens, as it does for the package. At CP 1 all tokens are
    local, so only the weights are gathered, not the mask.
    """

    def __init__(self, workload: Workload, weight_S: Tensor) -> None:
        mask_P = torch.cat(workload.masks)
        if workload.cp_size == 1:
            self.mask_T = mask_P
            local_S = torch.from_numpy(workload.response_S)
            num_local = len(mask_P)
        else:
            start_R, length_R = runs_of(workload)
            num_local = int(length_R.sum())
            shift_R = start_R - (np.cumsum(length_R) - length_R)
            index_T = torch.arange(num_local) + torch.repeat_interleave(
                torch.from_numpy(shift_R), torch.from_numpy(length_R), output_size=num_local
            )
            self.mask_T = mask_P[index_T]
            local_S = torch.from_numpy(length_R.reshape(-1, 2).sum(1))
        weight_T = torch.repeat_interleave(weight_S, local_S, output_size=num_local)
        self.w_T = weight_T * self.mask_T
        self.num_tokens = sum(workload.active_S)
        self.total = workload.num_sequences * workload.divisor

    def under_token_mean(self) -> Floor:
        """Multiply the same mask by 1 / N."""
        return self._scaled(1.0 / self.num_tokens)

    def under_constant(self) -> Floor:
        """Multiply the same mask by 1 / (B L)."""
        return self._scaled(1.0 / self.total)

    def __call__(self, x_T: Tensor) -> Tensor:
        """Multiply and sum."""
        return (x_T * self.w_T).sum()

    def _scaled(self, weight: float) -> Floor:
        other = object.__new__(Floor)
        other.w_T = self.mask_T * weight
        return other


def runs_of(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of the two runs of mask positions that this rank holds of each row."""
    total_S, response_S = workload.total_S, workload.response_S
    offset_S = np.cumsum(response_S) - response_S
    first_logit_S = total_S - response_S - 1
    chunk_S = -(-total_S // (2 * workload.cp_size))
    start, length = [], []
    for k in (workload.cp_rank, 2 * workload.cp_size - 1 - workload.cp_rank):
        lo_S = np.clip(k * chunk_S, first_logit_S, total_S - 1)
        hi_S = np.clip((k + 1) * chunk_S, first_logit_S, total_S - 1)
        start.append(offset_S + lo_S - first_logit_S)
        length.append(hi_S - lo_S)
    return np.stack(start, 1).ravel(), np.stack(length, 1).ravel()


class PaddedMatrix:
    """A ``[rows, longest]`` matrix, masked and averaged along its rows, as verl has it.

    Losses come padded already; the way there is not measured. CP 1 only.
    """

    def __init__(self, workload: Workload) -> None:
        self.mask_SW = padded(workload.masks)
        self.num_samples = workload.num_sequences
        self.divisor = workload.divisor
        self.num_tokens = sum(workload.active_S)

    def sample_mean(self, x_SW: Tensor) -> Tensor:
        """Mean over samples of each sample's token mean."""
        sums_S = (x_SW * self.mask_SW).sum(-1)
        counts_S = self.mask_SW.sum(-1)
        return (sums_S / (counts_S + 1e-8)).sum() / self.num_samples

    def token_mean(self, x_SW: Tensor) -> Tensor:
        """Mean over all active tokens; a masked position is not read."""
        return torch.where(self.mask_SW.bool(), x_SW, 0.0).sum() / self.num_tokens

    def constant(self, x_SW: Tensor) -> Tensor:
        """Token sums over a constant."""
        return ((x_SW * self.mask_SW).sum(-1) / self.divisor).sum() / self.num_samples


class ScaledAdvantages:
    """Weights multiplied into what the losses are made of, then a plain sum, as SkyRL has it.

    Building scales a ``[rows, longest]`` matrix of advantages for each aggregation; a call is
    ``(x * mask).sum()`` of losses that carry the weights already. CP 1 only.
    """

    def __init__(self, workload: Workload, advantage_SW: Tensor) -> None:
        self.mask_SW = padded(workload.masks)
        counts_S1 = self.mask_SW.sum(-1, keepdim=True).clamp_min(1)
        self.scaled_SW = advantage_SW / counts_S1 / workload.num_sequences

    def __call__(self, x_SW: Tensor) -> Tensor:
        """Mask and sum."""
        return (x_SW * self.mask_SW).sum()


def padded(parts: list[Tensor]) -> Tensor:
    """Pad to the longest and stack."""
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


class PaddedLosses:
    """A workload's losses as a padded matrix, made once."""

    def __init__(self, workload: Workload) -> None:
        parts = workload.x_T.detach().split(workload.response_S.tolist())
        self.x_SW = padded(list(parts)).requires_grad_()

    @cached_property
    def metric_SW(self) -> Tensor:
        """The same values without a graph."""
        return self.x_SW.detach()
