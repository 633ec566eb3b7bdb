"""Megatron's groups of one process, for frameworks whose losses look them up."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def one_rank(*, dp_size: int = 1) -> Iterator[None]:
    """Initialize Megatron's groups of one process, and report ``dp_size`` as their size."""
    from megatron.core import parallel_state

    own = parallel_state.get_data_parallel_world_size
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            if dp_size > 1:
                parallel_state.get_data_parallel_world_size = lambda: dp_size
            yield
        finally:
            parallel_state.get_data_parallel_world_size = own
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
