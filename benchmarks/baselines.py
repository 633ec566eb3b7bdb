"""What the package is compared with: slime's loop over samples, and the least that must be done.

Own code, no line of another project. Both compute the package's sample_mean, token_mean and
constant over a microbatch of whole samples, and a benchmark compares their values with the
package's before it measures anything.

Shape suffixes: S = sequences; P = mask positions, all responses packed; T = tokens that this
context-parallel rank holds; R = runs of tokens, two per sequence.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.workloads import Workload


class SampleLoop:
    """A Python loop over samples, as slime and miles have it.

    Building cuts each sample's mask to this rank's two chunks (CP 1: keeps it). A call
    multiplies, sums, clamps, divides and adds for every sample: 5 n operations forward,
    2 n + 2 backward. Denominators are 0-dim tensors, one per sample.
    """

    def __init__(self, workload: Workload) -> None:
        self.denominators = workload.denominators
        self.num_samples = workload.num_sequences
        self.divisor = workload.divisor
        self.num_tokens = sum(workload.active_S)
        cp = workload.cp_size, workload.cp_rank
        lengths = zip(workload.total_S.tolist(), workload.response_S.tolist(), strict=True)
        self.masks = [
            mask if workload.cp_size == 1 else cut_by_slices(mask, total, response, *cp)
            for mask, (total, response) in zip(workload.masks, lengths, strict=True)
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


class Floor:
    """What has to be done and nothing else: ``cat``, one gather, one multiply; ``(x * w).sum()``.

    Checks nothing, and a NaN at a masked position reaches the loss. Building includes the
    index of this rank's tokens, as it does for the package. At CP 1 all tokens are
    local, so only the weights are gathered, not the mask.
    """

    def __init__(self, workload: Workload) -> None:
        mask_P = torch.cat(workload.masks)
        if workload.cp_size == 1:
            mask_T = mask_P
            local_S = torch.from_numpy(workload.response_S)
            num_local = len(mask_P)
        else:
            start_R, length_R = runs_of(workload)
            num_local = int(length_R.sum())
            shift_R = start_R - (np.cumsum(length_R) - length_R)
            index_T = torch.arange(num_local) + torch.repeat_interleave(
                torch.from_numpy(shift_R), torch.from_numpy(length_R), output_size=num_local
            )
            mask_T = mask_P[index_T]
            local_S = torch.from_numpy(length_R.reshape(-1, 2).sum(1))
        weight_S = workload.plan.weights.float()
        weight_T = torch.repeat_interleave(weight_S, local_S, output_size=num_local)
        self.mask_T, self.w_T = mask_T, weight_T * mask_T
        self.num_tokens = sum(workload.active_S)
        self.total = workload.num_sequences * workload.divisor

    def sample_mean(self, x_T: Tensor) -> Tensor:
        """Multiply and sum."""
        return (x_T * self.w_T).sum()

    def token_mean(self, x_T: Tensor) -> Tensor:
        """Multiply the same mask by 1 / N."""
        return (x_T * (self.mask_T * (1.0 / self.num_tokens))).sum()

    def constant(self, x_T: Tensor) -> Tensor:
        """Multiply the same mask by 1 / (B L)."""
        return (x_T * (self.mask_T * (1.0 / self.total))).sum()


def runs_of(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of the two runs of mask positions that this rank holds of each sequence."""
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
