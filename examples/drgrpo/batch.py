"""Sequences packed end to end, as Megatron's packed sequences want them.

Shape suffixes: P = packed tokens, every sequence padded; T = the tokens of them that this
context-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import task
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training sequence."""

    tokens: list[int]
    """Prompt and response."""
    mask: list[int]
    """One 0/1 per response token."""
    coefficients: tuple[list[float], ...] = ()
    """Further numbers per response token, such as behaviour log-probabilities."""

    @property
    def active_tokens(self) -> int:
        """n_s: response tokens that are trained on."""
        return sum(self.mask)


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Packed sequences; everything is shifted so that entry i belongs to logit i."""

    sequences: list[int]
    """Positions of the sequences in the step."""
    token_P: Tensor
    label_P: Tensor
    """The next token of each."""
    position_P: Tensor
    mask_P: Tensor
    """1 where logit i predicts a response token that is trained on; 0 at padding."""
    coefficient_P: tuple[Tensor, ...]
    cu_seqlens_padded: Tensor

    @property
    def num_tokens(self) -> int:
        """Packed tokens, padding included."""
        return len(self.token_P)

    def packed_seq_params(self) -> PackedSeqParams:
        """Describe to Megatron-Core's attention where sequences begin and end."""
        longest = int(self.cu_seqlens_padded.diff().max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens_padded,
            cu_seqlens_kv=self.cu_seqlens_padded,
            cu_seqlens_q_padded=self.cu_seqlens_padded,
            cu_seqlens_kv_padded=self.cu_seqlens_padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def pack(sequences: Sequence[Row], indices: Sequence[int], cp_size: int) -> Microbatch:
    """Pack sequences, each padded to a multiple of 2 CP. ``indices``: their positions in
    the step.
    """
    multiple = 2 * cp_size
    padded = [-(-len(sequence.tokens) // multiple) * multiple for sequence in sequences]
    offsets = torch.tensor([0, *padded]).cumsum(0)
    token_P, label_P, position_P = torch.zeros((3, int(offsets[-1])), dtype=torch.long)
    mask_P = torch.zeros(len(token_P))
    coefficient_P = tuple(torch.zeros(len(token_P)) for _ in sequences[0].coefficients)
    for start, sequence in zip(offsets.tolist()[:-1], sequences, strict=True):
        n, response = len(sequence.tokens), len(sequence.mask)
        token_P[start : start + n] = torch.tensor(sequence.tokens)
        label_P[start : start + n - 1] = torch.tensor(sequence.tokens[1:])
        position_P[start : start + n] = torch.tensor(task.positions(n - response, response))
        # Logit n - 1 - response is the last of the prompt and predicts the first response token.
        predicts = slice(start + n - 1 - response, start + n - 1)
        mask_P[predicts] = torch.tensor(sequence.mask, dtype=torch.float32)
        for target_P, values in zip(coefficient_P, sequence.coefficients, strict=True):
            target_P[predicts] = torch.tensor(values)
    return Microbatch(
        sequences=list(indices),
        token_P=token_P,
        label_P=label_P,
        position_P=position_P,
        mask_P=mask_P,
        coefficient_P=coefficient_P,
        cu_seqlens_padded=offsets.to(torch.int32),
    )
