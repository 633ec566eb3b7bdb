"""A core attention for context parallelism in plain PyTorch.

Megatron-Core's own ``DotProductAttention`` knows neither packed sequences nor context
parallelism; Transformer Engine's knows both and needs a GPU. This one computes the same
function on any device and in any dtype.

Shape suffixes: t = tokens this rank holds, k = tokens of all context-parallel ranks
(gathered), G1 = packed segments and one more, C = context-parallel ranks.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_lossagg.errors import LossAggregationError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class UnsupportedModelError(LossAggregationError, ValueError):
    """A model or batch that ``megatron_lossagg.cpu`` does not build or compute."""


class ContextParallelAttention(torch.nn.Module):
    """Causal attention with the keys and values of all context-parallel ranks.

    Goes into the ``core_attention`` slot of ``SelfAttentionSubmodules``. A sequence padded to a
    multiple of 2 CP is split into 2 CP chunks and rank r holds the chunks r and 2 CP - 1 - r, in
    that order; if ``config.cp_partition_mode`` is ``contiguous``, rank r holds the r-th of CP equal
    intervals, of the packed buffer or of each unpacked sequence. Keys and values are gathered in
    one collective; its backward sums the ranks' gradients into the owner's (a reduce-scatter). Both
    are ``megatron.core.tensor_parallel.mappings.gather_from_sequence_parallel_region``. Queries
    stay, and see a gathered token of their own sequence at or before their own position. No host
    sync.

    The context-parallel size is ``config.context_parallel_size``, or ``local_cp_size`` of a
    microbatch's ``packed_seq_params``, with its ``cp_group``; at 1 there is no collective, for
    any groups. (Rotary embeddings read the size of the *group* instead: such a model in a
    context-parallel job also wants a ``pg_collection`` whose ``cp`` is a group of only this rank.)

    Packed sequences (``qkv_format="thd"``) lie at ``cu_seqlens_q_padded``, or ``cu_seqlens_q`` if
    no padded offsets are given. Padding follows the sequence's tokens, which therefore never see
    it. The mask is dense, one bool for each pair of a local and a gathered token (T^2 / CP bytes,
    made anew by each layer): for small models.

    ``attention_mask`` is not read, as in Transformer Engine under a causal mask type.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
    ) -> None:
        super().__init__()
        del layer_number, cp_comm_type
        _check_supported(config, attn_mask_type, attention_type)
        self.config = config
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_size: int = config.context_parallel_size
        self.is_contiguous = getattr(config, "cp_partition_mode", "zigzag") == "contiguous"
        self.cp_group: Any = None
        if self.cp_size > 1:
            # Megatron-Core 0.13 and 0.14 call the process groups model_comm_pgs.
            groups = pg_collection or model_comm_pgs
            self.cp_group = groups.cp if groups else parallel_state.get_context_parallel_group()
            if self.cp_group.size() != self.cp_size:
                raise UnsupportedModelError(
                    f"config.context_parallel_size is {self.cp_size}, the context-parallel group "
                    f"has {self.cp_group.size()} ranks: give both the same size, or 1 to the config"
                )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend; one all-gather over the context-parallel group, none at CP 1.

        ``query`` [t, heads, d] or [s, b, heads, d]; ``key`` and ``value`` the same with
        their own number of heads, a divisor. Returns [t, heads * d] or [s, b, heads * d],
        in the query's dtype.
        """
        del attention_mask
        self._check_call(attn_mask_type, attention_bias, packed_seq_params)
        group = self._group(packed_seq_params)
        if group is not None:
            key, value = self._gather(key, value, group)
        num_repeats = query.size(-2) // key.size(-2)
        if num_repeats > 1:
            key, value = (x.repeat_interleave(num_repeats, dim=-2) for x in (key, value))
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        mask_tk = self._mask(query, packed_seq_params, group)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = self._attend(query, key, value, mask_tk)
        output = output.permute(2, 0, 1, 3).flatten(2)
        return output.squeeze(1) if packed else output.contiguous()

    def _group(self, packed_seq_params: Any) -> Any:
        """Return the context-parallel group of the microbatch, or the model's; None of one rank."""
        size = getattr(packed_seq_params, "local_cp_size", None)
        if size is None:
            return self.cp_group
        return packed_seq_params.cp_group if size > 1 else None

    def _gather(self, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        both = tensor_parallel.gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), group=group
        )
        key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
        return key, value

    def _mask(self, query: Tensor, packed_seq_params: Any, group: Any) -> Tensor | None:
        num_tokens = query.size(0)
        cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
        if packed_seq_params is not None:
            offset_G1 = packed_seq_params.cu_seqlens_q_padded
            if offset_G1 is None:
                offset_G1 = packed_seq_params.cu_seqlens_q
        elif cp_size == 1:
            return None
        else:
            offset_G1 = torch.tensor([0, num_tokens * cp_size])
        offset_G1 = offset_G1.reshape(-1)
        if offset_G1.device.type == "cpu":
            unit = 1 if self.is_contiguous else 2 * cp_size
            _check_offsets(offset_G1, num_tokens, cp_size, unit)
        offset_G1 = offset_G1.to(query.device)
        if self.is_contiguous:
            at = _contiguous_positions(offset_G1, num_tokens, cp_size, cp_rank)
        else:
            at = _zigzag_positions(offset_G1, num_tokens, cp_size)
        return _causal_mask(*at, cp_rank)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask_tk: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so they drop by different random states,
        # as in Megatron-Core's DotProductAttention.
        fork = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else nullcontext():
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask_tk,
                dropout_p=dropout,
                is_causal=mask_tk is None,
                scale=self.softmax_scale,
            )

    def _check_call(
        self,
        attn_mask_type: AttnMaskType | None,
        attention_bias: Tensor | None,
        packed_seq_params: Any,
    ) -> None:
        _check_mask_type(attn_mask_type or self.attn_mask_type)
        if attention_bias is not None:
            raise UnsupportedModelError("got an attention_bias, expected None: it is not computed")
        if packed_seq_params is None:
            return
        if packed_seq_params.qkv_format != "thd":
            raise UnsupportedModelError(
                f"got packed_seq_params with qkv_format {packed_seq_params.qkv_format!r}, expected "
                "'thd': pass packed_seq_params=None for sbhd"
            )
        size = getattr(packed_seq_params, "local_cp_size", None)
        group = getattr(packed_seq_params, "cp_group", None)
        if size not in (None, 1) and (group is None or group.size() != size):
            raise UnsupportedModelError(
                f"got packed_seq_params.local_cp_size {size} and cp_group {group}, expected a "
                "context-parallel group of the microbatch of that size: give both or neither"
            )


def _check_supported(config: Any, attn_mask_type: AttnMaskType, attention_type: str) -> None:
    _check_mask_type(attn_mask_type)
    if attention_type != "self":
        raise UnsupportedModelError(f"got attention_type {attention_type!r}, expected 'self'")
    if config.window_size is not None:
        raise UnsupportedModelError(
            f"got window_size {config.window_size}, expected None: no sliding window is computed"
        )
    softmax_type = getattr(config, "softmax_type", "vanilla")
    if softmax_type != "vanilla":
        raise UnsupportedModelError(f"got softmax_type {softmax_type!r}, expected 'vanilla'")


def _check_mask_type(attn_mask_type: AttnMaskType) -> None:
    if attn_mask_type not in _CAUSAL:
        raise UnsupportedModelError(
            f"got attention mask type {attn_mask_type.name!r}, expected one of "
            f"{[mask_type.name for mask_type in _CAUSAL]}: only decoders are computed"
        )


def _causal_mask(position_Ct: Tensor, start_t: Tensor, cp_rank: int) -> Tensor:
    """Mark the gathered tokens that each local token sees: bool [t, k], k = C t, ranks in order."""
    key_k = position_Ct.reshape(1, -1)
    return (start_t[:, None] <= key_k) & (key_k <= position_Ct[cp_rank][:, None])


def _zigzag_positions(offset_G1: Tensor, num_tokens: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """Give each rank's tokens their position in the whole pack [C, t], and their sequence's start
    [t].

    Tokens past the last offset count as one more sequence: they must not be NaN.
    """
    end = offset_G1.new_full((1,), num_tokens * cp_size)
    offset_G1 = torch.cat([offset_G1, end]).long()
    local_G1 = offset_G1 // cp_size
    index_t = torch.arange(num_tokens, device=offset_G1.device)
    sequence_t = torch.bucketize(index_t, local_G1[1:], right=True)
    start_t, within_t = offset_G1[sequence_t], index_t - local_G1[sequence_t]
    chunk_t = (offset_G1[sequence_t + 1] - start_t) // (2 * cp_size)
    rank_C = torch.arange(cp_size, device=offset_G1.device)[:, None]
    second_t = within_t >= chunk_t
    first_position_Ct = start_t + rank_C * chunk_t + within_t
    second_position_Ct = start_t + (2 * cp_size - 2 - rank_C) * chunk_t + within_t
    return torch.where(second_t, second_position_Ct, first_position_Ct), start_t


def _contiguous_positions(
    offset_G1: Tensor, num_tokens: int, cp_size: int, cp_rank: int
) -> tuple[Tensor, Tensor]:
    """Return :func:`_zigzag_positions` for ranks that hold one interval each: ``[C, t]``, ``[t]``.

    Tokens past the last offset are one more sequence, as above.
    """
    position_Ct = torch.arange(cp_size * num_tokens, device=offset_G1.device).view(cp_size, -1)
    sequence_t = torch.bucketize(position_Ct[cp_rank], offset_G1[1:].long(), right=True)
    return position_Ct, offset_G1[sequence_t]


def _check_offsets(offset_G1: Tensor, num_tokens: int, cp_size: int, unit: int) -> None:
    length_G = offset_G1.diff()
    if cp_size > 1 and bool((length_G % unit).any()):
        raise UnsupportedModelError(
            f"got sequences of {length_G.tolist()} tokens at context-parallel size "
            f"{cp_size}: pad every "
            f"sequence to a multiple of {unit} and pass cu_seqlens_q_padded"
        )
    if int(offset_G1[-1]) > num_tokens * cp_size:
        raise UnsupportedModelError(
            f"cu_seqlens ends at {int(offset_G1[-1])}, this rank holds {num_tokens} tokens and "
            f"{cp_size} ranks {num_tokens * cp_size}: give every rank its 1 / {cp_size} of "
            f"each sequence"
        )
