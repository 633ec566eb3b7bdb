"""Loss aggregation for Megatron-Core in one file, to read or to vendor, almost without checks.

::

    loss = sum over sequences s of w_s * (sum of the losses of its active tokens)

    step = plan("sample_mean", n, sample=ids, num_microbatches=M, dp_group=dp_group)

    def loss_func(output):
        loss = partial_loss(step, token_losses(output), sequences, mask, cu_seqlens, CP, cp_rank)
        return outputs(step, loss, sequences, DP * CP, cp_rank, per_token=per_token)

``tests/examples/test_one_file.py`` holds it equal to the package, which checks what it is given.
Shape suffixes: S = sequences of this rank's step; G = sequences of a microbatch, in its order, -1
for padding; P = tokens of its packed mask; T = those that this rank holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

NEEDS = {"prompt_mean": "prompt", "balanced": "group", "microbatch_token_mean": "microbatch"}


class Row(NamedTuple):
    """One sequence: its active tokens, complete over CP, and the ids of what it belongs to."""

    n: int
    sample: Hashable
    prompt: Hashable
    group: Hashable
    microbatch: Hashable


class Step(NamedTuple):
    """One optimizer step, as this data-parallel rank knows it."""

    n_S: list[int]
    weight_S: Tensor  # float64, and a 0 at the end: of padding, whose sequence is -1
    num_tokens: int  # N, of all ranks
    num_microbatches: int  # M, of this rank


def plan(
    mode: str,
    active_tokens: Sequence[int],
    *,
    sample: Sequence[Hashable] | None = None,
    prompt: Sequence[Hashable] | None = None,
    group: Sequence[Hashable] | None = None,
    microbatch: Sequence[int] | None = None,
    num_microbatches: int = 1,
    dp_group: Any = None,
    **numbers: Any,
) -> Step:
    """Weigh this rank's sequences by the counts of all ranks, before the first forward pass.

    Equal ids on two ranks are one sample. Without ``sample`` each sequence is one. ``numbers``:
    those of :func:`weights`. One all-gather. :class:`ValueError` without ids that a mode needs.
    """
    ids = {"prompt": prompt, "group": group, "microbatch": microbatch}
    if mode in NEEDS and ids[NEEDS[mode]] is None:
        raise ValueError(f"got {mode} without {NEEDS[mode]}=, expected one per sequence")
    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(dp_group), dist.get_world_size(dp_group)
    S = len(active_tokens)
    samples = sample or [(rank, s) for s in range(S)]
    microbatches = [(rank, number) for number in microbatch or [0] * S]
    columns = active_tokens, samples, prompt or [0] * S, group or [0] * S, microbatches
    rows_of_ranks: list[Any] = [[Row(*row) for row in zip(*columns, strict=True)]] * ranks
    if ranks > 1:
        dist.all_gather_object(rows_of_ranks, rows_of_ranks[rank], group=dp_group)
    rows = [row for of_rank in rows_of_ranks for row in of_rank]
    weight_A = weights(mode, rows, num_means=num_microbatches * ranks, **numbers)
    first = sum(map(len, rows_of_ranks[:rank]))
    weight_S = torch.tensor([*weight_A[first : first + S], 0], dtype=torch.float64)
    return Step(list(active_tokens), weight_S, sum(row.n for row in rows), num_microbatches)


def weights(
    mode: str,
    rows: Sequence[Row],
    *,
    num_means: int = 1,
    count_empty: bool = True,
    divisor: float = 1.0,
    exponent: float = 0.0,
) -> list[float]:
    """Return w_s of every sequence of the step, 0 for one with no active tokens.

    ``num_means``: M DP. ``divisor``: L of ``constant``, C of ``token_sum``. ``exponent``: a of
    ``length_power``. ``count_empty``: whether samples and prompts with no active tokens count.
    """
    n_b, n_p, n_c, n_mb = (Counter[Hashable]() for _ in range(4))
    for row in rows:
        n_b[row.sample] += row.n
        n_p[row.prompt] += row.n
        n_c[row.group] += row.n
        n_mb[row.microbatch] += row.n
    N = sum(row.n for row in rows)
    B, P = (sum(n > 0 or count_empty for n in counts.values()) for counts in (n_b, n_p))
    R_b = Counter(row.sample for row in rows if row.n or count_empty)
    samples = {(row.group, row.sample) for row in rows if n_b[row.sample] or count_empty}
    k_c = Counter(group for group, _ in samples)
    Z = math.fsum(n ** (1 - exponent) for n in n_b.values() if n)
    one_over_w = {
        "token_mean": lambda row: N,
        "sample_mean": lambda row: B * n_b[row.sample],
        "prompt_mean": lambda row: P * n_p[row.prompt],
        "constant": lambda row: B * divisor,
        "sample_sum": lambda row: B,
        "token_sum": lambda row: divisor,
        "length_power": lambda row: n_b[row.sample] ** exponent * Z,
        "balanced": lambda row: B * n_c[row.group] / k_c[row.group],
        "row_mean": lambda row: B * R_b[row.sample] * row.n,
        "microbatch_token_mean": lambda row: num_means * n_mb[row.microbatch],
    }[mode]
    return [1 / one_over_w(row) if row.n else 0.0 for row in rows]


def zigzag(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions in a pack that this context-parallel rank holds, ``[T]``.

    A sequence, padded to a multiple of 2 CP, is cut into 2 CP chunks: r and 2 CP - 1 - r.
    """
    sequences = torch.arange(int(cu_seqlens[-1])).split(cu_seqlens.diff().tolist())
    chunks = [sequence.tensor_split(2 * cp_size) for sequence in sequences]
    return torch.cat([of[r] for of in chunks for r in (cp_rank, 2 * cp_size - 1 - cp_rank)])


def partial_loss(
    step: Step,
    losses_T: Tensor,
    sequences_G: Sequence[int],
    mask_P: Tensor,
    cu_seqlens: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Sum w_s x_t over this rank's active tokens; ``mask_P[t]`` is of the loss at logit t."""
    weight_P = step.weight_S[list(sequences_G)].repeat_interleave(cu_seqlens.diff().cpu())
    dtype = torch.promote_types(losses_T.dtype, torch.float32)
    weight_T = (weight_P * mask_P.cpu())[zigzag(cu_seqlens, cp_size, cp_rank)]
    weight_T = weight_T.to(losses_T.device, dtype)
    return (torch.where(weight_T > 0, losses_T.to(dtype), 0) * weight_T).sum()  # masked: NaN too


def outputs(
    step: Step,
    loss: Tensor,
    sequences_G: Sequence[int],
    dp_cp_size: int,
    cp_rank: int = 0,
    *,
    per_token: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return what ``loss_func`` returns: loss * K, num_tokens, and the report of the step's loss.

    megatron-core 0.13 to 0.19 divides by num_tokens, M and DP CP; or, with
    ``calculate_per_token_loss``, once by the sum of num_tokens.
    """
    means = step.num_microbatches * dp_cp_size
    report = {"loss": torch.stack([loss.detach(), torch.full_like(loss, 1 / means)])}
    if not per_token:
        return loss * means, torch.ones_like(loss, dtype=torch.int), report
    counted = sum(step.n_S[s] for s in sequences_G if s >= 0) if cp_rank == 0 else 0
    num_tokens = torch.full_like(loss, counted, dtype=torch.int)
    return loss * max(step.num_tokens, 1), num_tokens, report
