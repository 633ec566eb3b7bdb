"""A framework's integration on live Megatron-Core without the framework: what they share.

``NAME_live.py`` has a framework's own part, written from its source, with the factors it multiplies
by afterwards. Each context-parallel rank gathers whole sequences' log-probabilities.
"""

import itertools

import framework_step
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lossagg import Aggregation
from megatron_lossagg.verify.step_data import zigzag

DP, CP = 2, 2
OTHERS = {
    "reducer": Aggregation("constant", divisor=framework_step.L),
    "microbatch_token_mean": Aggregation("microbatch_token_mean"),
}


class Live:
    """A framework's own part of a step; ``steps``: the sequences of each data-parallel rank."""

    cases = ("token_mean", "sample_mean", "constant")
    per_token = False
    sums_gradients = False
    """Whether the gradient of the gathered log-probabilities is summed over the ranks."""

    def __init__(self, steps, dp_size):
        self.steps, self.dp_size = steps, dp_size

    def prepare(self, case):
        """Return the sequences as the framework's trainer sends them; no process group yet."""
        return self.steps

    def begin(self, case, sequences, m):
        """Prepare a step of this rank, of ``m`` microbatches."""

    def returned(self, loss):
        """Return what the framework's loss function returns to Megatron."""
        return loss, {"loss": loss.detach().clone()}

    def sample_of(self, case):
        """Return what of a sequence names its sample."""
        return "number"

    def refuse(self):
        """See all ranks refuse what one of them has."""


class Gather(torch.autograd.Function):
    """Gather over context parallelism; the gradient of the own slice, summed or not."""

    @staticmethod
    def forward(ctx, own, is_summed):
        ctx.is_summed, group = is_summed, parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        ctx.num_own = len(own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        group = parallel_state.get_context_parallel_group()
        if ctx.is_summed:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=group)
        return gradient.split(ctx.num_own)[dist.get_rank(group)], None


def gathered_log_probs(model, sequences, is_summed):
    """Return each sequence's log-probabilities of its response, whole on every rank."""
    cp_size = parallel_state.get_context_parallel_world_size()
    cp_rank = parallel_state.get_context_parallel_rank()
    tokens, targets, offsets = [], [], [0]
    for sequence in sequences:
        fill = [0] * (-len(sequence["tokens"]) % (2 * cp_size))
        tokens += sequence["tokens"] + fill
        targets += [*sequence["tokens"][1:], 0, *fill]
        offsets.append(len(tokens))
    held = zigzag(offsets, cp_size, cp_rank)
    whose = [zigzag(offsets, cp_size, rank) for rank in range(cp_size)]
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(offsets)])
    logits = model(
        torch.tensor(tokens)[held][None],
        positions[held][None],
        None,
        packed_seq_params=tiny_gpt.packed_at(offsets),
    )

    def read(logits):
        target = torch.tensor(targets)[held][:, None]
        own = torch.log_softmax(logits[0], -1).gather(1, target).squeeze(1)
        places = torch.tensor([place for part in whose for place in part])
        whole = Gather.apply(own, is_summed)[places.argsort()]
        starts = [
            offset + len(sequence["tokens"]) - sequence["response"] - 1
            for offset, sequence in zip(offsets, sequences, strict=False)
        ]
        return [
            whole[start : start + sequence["response"]]
            for start, sequence in zip(starts, sequences, strict=True)
        ]

    return logits, read


def padded(values):
    """Pad to ``[b, s]`` with zeros."""
    made = [value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in values]
    return torch.nn.utils.rnn.pad_sequence(made, batch_first=True)
