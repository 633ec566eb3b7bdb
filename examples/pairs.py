"""Losses of a pair of sequences, or of a whole one: DPO, IPO, reward models; GSPO.

For ``loss_func`` in a loop of your own (docs/own-loop.md). At CP above 1 a rank has some tokens of
each sequence: its value is summed over the ranks, and gradients flow back to all of them.
``tests/examples/test_pairs.py`` compares them with loops over tokens, at DP 2 and at CP 2.

Shape suffixes: T = tokens that this rank holds; G = sequences of the microbatch; D = pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_lossagg import Layout
from megatron_lossagg.contract.outputs import Outputs
from megatron_lossagg.loop.step import Step


def per_sequence(x_T: Tensor, layout: Layout, cp_group: torch.distributed.ProcessGroup) -> Tensor:
    """Sum over the tokens of each sequence, ``[G]``, alike on all context-parallel ranks."""
    segment_T = torch.repeat_interleave(torch.from_numpy(layout.local_lengths)).to(x_T.device)
    sum_G = x_T.new_zeros(layout.num_segments).index_add(0, segment_T, x_T)
    summed: Tensor = gather_from_sequence_parallel_region(sum_G[None], group=cp_group).sum(0)
    return summed


def dpo(difference_D: Tensor, beta: float) -> Tensor:
    """DPO, arXiv 2305.18290; beta 1 is a reward model's loss."""
    return -logsigmoid(beta * difference_D)


def ipo(difference_D: Tensor, beta: float) -> Tensor:
    """IPO, arXiv 2310.12036."""
    return (difference_D - 1 / (2 * beta)).square()


def pair_loss(
    step: Step,
    pairs: list[int],
    value_T: Tensor,
    layout: Layout,
    cp_group: torch.distributed.ProcessGroup,
    losses: Callable[[Tensor], Tensor],
) -> Outputs:
    """Train the mean over the step's pairs: a pair is a sequence of one token.

    ``step``: of ``aggregator.step(active_tokens=[1] * pairs_of_this_rank, ...)``. ``pairs``: the
    microbatch's, as positions in it; its sequences are chosen, rejected, chosen, ...
    ``value_T``: log p - log p_ref, or the reward at a sequence's last token; 0 elsewhere.
    ``losses``: such as :func:`dpo`, of the sum over the chosen less that over the rejected one.
    """
    sum_G = per_sequence(value_T, layout, cp_group)[: 2 * len(pairs)]
    loss_D = losses(sum_G[0::2] - sum_G[1::2])
    # Every context-parallel rank has all of them, and weighs its part.
    own = slice(layout.cp_rank, None, layout.cp_size)
    is_own = torch.zeros(len(pairs), dtype=torch.int)
    is_own[own] = 1
    mb = step.microbatch(pairs, is_own[own], lengths=is_own.tolist())
    loss = mb.reduce(loss_D[own])
    return mb.outputs(loss, report={"loss": loss})


def gspo(
    step: Step,
    sequences: list[int],
    mask: Tensor,
    log_ratio_T: Tensor,
    advantage_G: Tensor,
    layout: Layout,
    cp_group: torch.distributed.ProcessGroup,
    clip: float,
) -> Outputs:
    """GSPO (arXiv 2507.18071), under any mode; its paper's is ``sample_mean``.

    ``log_ratio_T``: log p - log p_old, 0 where the mask is. Each token gets its sequence's loss.
    """
    n_G = per_sequence(mask[layout.positions].to(log_ratio_T), layout, cp_group)
    ratio_G = (per_sequence(log_ratio_T, layout, cp_group) / n_G.clamp(min=1)).exp()
    loss_G = -torch.minimum(ratio_G * advantage_G, ratio_G.clamp(1 - clip, 1 + clip) * advantage_G)
    mb = step.microbatch(sequences, mask, layout=layout)
    lengths_G = torch.from_numpy(layout.local_lengths).to(loss_G.device)
    loss = mb.reduce(loss_G.repeat_interleave(lengths_G))
    return mb.outputs(loss, report={"loss": loss})
