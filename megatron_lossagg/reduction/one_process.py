"""The exchange of a process that has nobody to exchange with, and need not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lossagg.reduction.integers import Ints


class OneProcess:
    """What counting a step uses of an :class:`Exchange`, of this process only."""

    size, rank = 1, 0

    def name(self, rank: int | None = None) -> str:
        """Name the process for a message."""
        return "this process"

    def integers(self, own: Ints) -> Ints:
        """Return an int64 ``[K]`` as ``[1, K]``."""
        return own[None]

    def ragged(self, own: Sequence[Ints], counts_W: Ints) -> Sequence[Ints]:
        """Return the columns."""
        return own

    def messages(self, own: str) -> list[str]:
        """Return the message."""
        return [own]
