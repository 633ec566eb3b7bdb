"""What the ranks of a group tell each other: a few integers, ragged rows, a message.

Each call is one collective and one host sync. The tensors live where the group's backend
wants them: on the CPU for gloo, on the current CUDA device for NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_lossagg.layout import Ints

_MESSAGE_BYTES = 2048


@dataclass(frozen=True)
class Exchange:
    """All-gathers over one process group; without a group, this process alone."""

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

    def integers(self, mine: Ints) -> Ints:
        """Gather an int64 ``[K]`` of every rank; returns ``[W, K]``. One all-gather."""
        if self.group is None or self.size == 1:
            return mine[None]
        device = self._device()
        mine_here = torch.from_numpy(np.ascontiguousarray(mine)).to(device)
        every = [torch.empty_like(mine_here) for _ in range(self.size)]
        dist.all_gather(every, mine_here, group=self.group)
        gathered: Ints = torch.stack(every).cpu().numpy()
        return gathered

    def rows(self, mine: Ints, counts_W: Ints) -> Ints:
        """Gather int64 ``[n, C]`` of every rank, n differing; returns ``[sum n, C]``.

        One all-gather. ``counts_W``: every rank's n, already known to all.
        """
        padded = np.zeros((int(counts_W.max()), mine.shape[1]), dtype=np.int64)
        padded[: len(mine)] = mine
        every = self.integers(padded.ravel()).reshape(self.size, *padded.shape)
        return np.concatenate([rows[:n] for rows, n in zip(every, counts_W, strict=True)])

    def messages(self, mine: str) -> list[str]:
        """Gather a text of every rank, cut to 2048 bytes. One all-gather."""
        packed = np.zeros(_MESSAGE_BYTES, dtype=np.uint8)
        encoded = np.frombuffer(mine.encode()[:_MESSAGE_BYTES], dtype=np.uint8)
        packed[: len(encoded)] = encoded
        every = self.integers(packed.view(np.int64))
        return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in every]

    def _device(self) -> torch.device:
        # A backend is named "gloo", "nccl" or "cpu:gloo,cuda:nccl".
        backend = str(dist.get_backend_config(self.group))
        if "cpu:" in backend or backend == dist.Backend.GLOO:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
