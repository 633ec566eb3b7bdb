"""What the ranks of a group send each other: a few integers, ragged columns, a message.

Each call is one collective and, except :meth:`Exchange.tensors`, one host sync. The tensors
are on the device that the group's backend needs: the CPU for gloo, the current CUDA device for
NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.integers import Ints

_MESSAGE_BYTES = 2048


@dataclass(frozen=True)
class Exchange:
    """All-gathers over one process group; without a group, this process only."""

    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def name(self, rank: int | None = None) -> str:
        """Name a rank of the group for a message, by default this process's."""
        if self.group is None and dist.is_initialized():
            return f"rank {dist.get_rank()}"
        return f"rank {self.rank if rank is None else rank} of the data-parallel group"

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Global ranks of the group; None without a group."""
        return None if self.group is None else tuple(dist.get_process_group_ranks(self.group))

    def integers(self, own: Ints) -> Ints:
        """Gather an int64 ``[K]`` of every rank; returns ``[W, K]``. One all-gather."""
        integers: Ints = self.tensors(torch.from_numpy(np.ascontiguousarray(own))).cpu().numpy()
        return integers

    def tensors(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a ``[K]`` of every rank; returns ``[W, K]`` on the backend's device.

        One all-gather; no host sync if ``own`` is on that device.
        """
        if self.size == 1:
            return own[None]
        own = moved(own, self._device_for(own))
        gathered = own.new_empty(self.size, len(own))
        dist.all_gather(list(gathered.unbind()), own, group=self.group)
        return gathered

    def ragged(self, own: Sequence[Ints], counts_W: Ints) -> Sequence[Ints]:
        """Gather columns of int64 ``[n]`` of every rank, n differing; each ``[sum n]``.

        One all-gather. ``counts_W``: every rank's n, already known to all.
        """
        if self.size == 1:
            return own
        padded = np.zeros((len(own), int(counts_W.max())), dtype=np.int64)
        padded[:, : len(own[0])] = own
        gathered = self.integers(padded.ravel()).reshape(self.size, *padded.shape)
        parts = [columns[:, :n] for columns, n in zip(gathered, counts_W, strict=True)]
        return list(np.concatenate(parts, axis=1))

    def messages(self, own: str) -> list[str]:
        """Gather a string of every rank, truncated to 2048 bytes. One all-gather.

        Never raises on one rank only: what UTF-8 cannot encode (half of a surrogate pair, as in
        the name of a file that is not UTF-8) becomes a question mark.
        """
        packed = np.zeros(_MESSAGE_BYTES, dtype=np.uint8)
        encoded = np.frombuffer(own.encode(errors="replace")[:_MESSAGE_BYTES], dtype=np.uint8)
        packed[: len(encoded)] = encoded
        gathered = self.integers(packed.view(np.int64))
        return [text.tobytes().rstrip(b"\0").decode(errors="ignore") for text in gathered]

    def _device_for(self, own: torch.Tensor) -> torch.device:
        # A backend is named "gloo", "nccl" or "cpu:gloo,cuda:nccl".
        backend = str(dist.get_backend_config(self.group))
        if f"{own.device.type}:" in backend:
            return own.device
        if "cpu:" in backend or backend == dist.Backend.GLOO:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def gather_counts(
    own: Any, fault: str, tp_group: dist.ProcessGroup | None
) -> tuple[list[Any], str]:
    """Gather what each rank of a tensor-parallel group counted, and the first fault, with its rank.

    One ``all_gather_object``; none without a group or in a group of one.
    """
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return [own], fault
    gathered: list[Any] = [None] * dist.get_world_size(tp_group)
    dist.all_gather_object(gathered, (own, fault), group=tp_group)
    faults = [f"tensor-parallel rank {rank}: {f}" for rank, (_, f) in enumerate(gathered) if f]
    return [counts for counts, _ in gathered], next(iter(faults), "")
