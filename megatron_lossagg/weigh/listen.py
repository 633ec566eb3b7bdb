"""Listen to one schedule call: what arrives at the per-token losses, and what follows it.

For a token t with loss x_t, ``a_t = g_t f``: ``g_t`` arrives at ``x_t`` in the backward pass and
holds what the script and the schedule do (mask, sum, means, ``/ num_tokens``, ``/ M``, loss scale);
``f`` is what Megatron does to every gradient afterwards. The gradient of the step is
``sum_t a_t d x_t / d theta`` over the tokens of all data- and context-parallel ranks.

Sources: ``schedules.forward_step_calc_loss``, ``DistributedDataParallel.__init__``
(``gradient_scaling_factor``), ``finalize_model_grads``, ``MegatronOptimizer.scale_loss``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.contract.finalize import FinalizeHook
from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.weigh.compare import Part, RankWeights

__all__ = ["Listener"]


@dataclass
class _Microbatch:
    """The losses of one microbatch on this rank, and what has arrived at them."""

    shape: tuple[int, ...]
    cu_seqlens: IntsLike | None
    mask: Tensor | None
    arrived: list[Tensor] = field(default_factory=list)


class Listener:
    """Listens while one schedule call runs; a context manager around it, inside of a step's.

    ``chunks``: this rank's model chunks in Megatron's DistributedDataParallel, as the schedule gets
    them. Changes no value and no order of operations; no collective and no host sync before
    :meth:`weights`.

    Example::

        with Listener(chunks) as listener:  # loss_func calls listener.losses(losses)
            schedule(...)
        of_this_rank = listener.weights()
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = chunks
        self.groups = LiveGroups.of(chunks)
        if self.groups.is_dynamic:
            raise ContractError(
                "got dynamic context parallelism, expected a fixed context-parallel size: which "
                "rank holds which token of a microbatch is not read here"
            )
        self._microbatches: list[_Microbatch] = []
        self._num_tokens: Tensor | None = None
        self._is_finalized = False
        self._hook: FinalizeHook | None = None

    def __enter__(self) -> Listener:
        config = self.chunks[0].config
        if config.finalize_model_grads_func is not None:  # else nobody finalizes
            self._hook = FinalizeHook(config, self._finalizes)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._hook is not None:
            self._hook.end()

    def losses(
        self, losses: Tensor, mask: Tensor | None = None, *, cu_seqlens: IntsLike | None = None
    ) -> Tensor:
        """Listen to a microbatch's per-token losses; return the tensor that was passed.

        ``losses``: this rank's, ``[T]`` or ``[b, s]``, the tensor that the loss is computed from.
        ``mask``: like it; without one, a token that weighs 0 is not trained. ``cu_seqlens``:
        offsets of the whole packed sequences, padding included, ``[G + 1]``; without, an entry of
        the batch is a sequence. Call it once per microbatch, in their order.
        """
        if not isinstance(losses, Tensor) or losses.dim() > 2 or not losses.is_floating_point():
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ContractError(
                f"got {got}, expected the losses of tokens, [T] or [b, s]: a model that returns "
                "logits is weighed in a loop of one's own (docs/weigh.md)"
            )
        heard = _Microbatch(tuple(losses.shape), cu_seqlens, mask)
        self._microbatches.append(heard)
        if losses.grad_fn is not None:
            # Of the node: what a script asks of autograd.grad at the losses trains nothing, and
            # does not run it.
            losses.grad_fn.register_prehook(partial(_keep, heard, losses.output_nr))
        return losses

    def weights(self) -> RankWeights:
        """Return the weights of this rank's tokens, per part of a sequence; waits for the device.

        No collective. A rank that computes no loss, or is not the first of its tensor-parallel
        ranks, has none.
        """
        groups, parts = self.groups, []
        counts = groups.is_last_stage and dist.get_rank(groups.tp_group) == 0
        if counts:
            factor = self._factor_without_num_tokens()
            for index, heard in enumerate(self._microbatches):
                parts += self._parts(index, heard, factor)
        num_tokens = None if self._num_tokens is None else int(self._num_tokens.item())
        return RankWeights(
            dp_rank=dist.get_rank(groups.dp_group),
            cp_rank=groups.cp_rank,
            sizes={
                "M": len(self._microbatches),
                "DP": groups.dp_size,
                "CP": groups.cp_size,
                "TP": dist.get_world_size(groups.tp_group),
                "PP": dist.get_world_size(groups.pp_group),
            },
            parts=parts,
            num_tokens=num_tokens if counts else 0,
            is_divided=num_tokens is not None,
            is_finalized=self._is_finalized,
            counts=counts,
        )

    def _finalizes(self, num_tokens: Tensor | None) -> None:
        self._is_finalized = True
        if num_tokens is not None:
            self._num_tokens = num_tokens.detach().clone()  # summed over ranks in place

    def _factor_without_num_tokens(self) -> float:
        """Return f of this rank but for ``/ num_tokens``, which all ranks' sum decides."""
        chunk = self.chunks[-1]
        buffers = [*chunk.buffers] or [*chunk.expert_parallel_buffers]
        factor = float(buffers[0].gradient_scaling_factor) if buffers else 1.0
        if getattr(chunk.ddp_config, "average_in_collective", False):
            factor /= self.groups.dp_cp_size
        scale = chunk.config.grad_scale_func
        if scale is not None:
            factor /= float(scale(torch.ones((), device=self._device())))
        return factor

    def _device(self) -> torch.device:
        arrived = [tensor for heard in self._microbatches for tensor in heard.arrived]
        return arrived[0].device if arrived else torch.device("cpu")

    def _parts(self, index: int, heard: _Microbatch, factor: float) -> list[Part]:
        """Sum a microbatch's weights per sequence, of the tokens that this rank holds."""
        layout = self._layout(heard)
        num_tokens = int(np.prod(heard.shape))
        if layout.num_local_tokens > num_tokens or (
            layout.num_local_tokens < num_tokens and not layout.allows_tail
        ):
            raise ContractError(
                f"got losses of {num_tokens} tokens, expected {layout.num_local_tokens}, which "
                "this rank holds of the sequences at cu_seqlens: pass whole offsets, with padding"
            )
        weight_T = np.zeros(num_tokens)
        for arrived in heard.arrived:
            weight_T += arrived.reshape(-1).double().cpu().numpy() * factor
        trained_T = weight_T != 0
        if heard.mask is not None:
            trained_T |= heard.mask.detach().reshape(-1).cpu().numpy() != 0
        segment_T = np.full(num_tokens, -1)
        segment_T[: layout.num_local_tokens] = np.repeat(layout.segment_R, layout.length_R)
        parts = []
        for segment in np.unique(segment_T[trained_T]).tolist():
            of_part = weight_T[trained_T & (segment_T == segment)]
            parts.append(
                Part(
                    microbatch=index,
                    sequence=segment,
                    tokens=len(of_part),
                    weight_sum=float(of_part.sum()),
                    weight_min=float(of_part.min()),
                    weight_max=float(of_part.max()),
                )
            )
        return parts

    def _layout(self, heard: _Microbatch) -> Layout:
        groups = self.groups
        if heard.cu_seqlens is not None:
            offsets = torch.as_tensor(heard.cu_seqlens).detach().cpu().reshape(-1)
            return groups.thd(offsets[offsets >= 0])
        b, s = heard.shape if len(heard.shape) == 2 else (1, *heard.shape)
        kind = Layout.bshd_contiguous if groups.split == "contiguous" else Layout.bshd_zigzag
        return kind(b, s * groups.cp_size, cp_size=groups.cp_size, cp_rank=groups.cp_rank)


def _keep(heard: _Microbatch, index: int, gradients: Sequence[Tensor | None]) -> None:
    gradient = gradients[index]
    if gradient is not None:
        heard.arrived.append(gradient.detach().clone())
