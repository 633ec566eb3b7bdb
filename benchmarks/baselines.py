"""What the package is compared with: slime's loop over samples.

Own code, no line of another project. It computes the package's sample_mean, token_mean and
constant over a microbatch of whole samples, and a benchmark compares its values with the
package's before it measures anything.

Shape suffix: T = tokens that this context-parallel rank holds.
"""

from __future__ import annotations

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
