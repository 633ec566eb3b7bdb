"""The tokens of a layout are those that Megatron-Core and Transformer Engine put on a rank.

Their own slicing functions run here: Megatron-Core's for unpacked sequences on any machine,
Transformer Engine's for packed sequences where it and CUDA are available.
"""

import pytest
import torch
from conftest import early, launched, new_folder
from ranks import rows_of

from megatron_lossagg import Layout
from megatron_lossagg.verify.job import Job, write_job
from megatron_lossagg.verify.parallelism import Parallelism

SLICED = {"CP2": Parallelism(dp=2, cp=2), "CP4": Parallelism(cp=4)}
# Offsets in units of 2 CP tokens: one sequence, uneven sequences, an empty sequence between two,
# many sequences.
OFFSETS = ((0, 1), (0, 3, 4, 9), (0, 2, 2, 5), tuple(range(0, 120, 3)))


@early
def slices():
    job = Job(layouts=list(SLICED.values()), cases=())
    write_job(job, file := new_folder() / "job")
    out = launched("megatron/matrix_worker.py", "slices", file, processes=job.world_size)
    return rows_of(out)


@pytest.mark.parametrize("name", SLICED)
def test_megatron_slices_an_unpacked_batch_like_bshd_zigzag(slices, name):
    """Tokens, a mask and a field with a dimension more; the group given, and by default."""
    comparisons = [c for c in slices if c["layout"] == str(SLICED[name])]
    assert len(comparisons) in (3, 6)  # later releases have no default
    for comparison in comparisons:
        assert all(all(found.values()) for found in comparison["ranks"]), comparison


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_transformer_engine_slices_packed_sequences_like_thd_zigzag(cp_size, offsets):
    if not torch.cuda.is_available():
        pytest.skip("Transformer Engine slices packed sequences with a CUDA kernel")
    pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    import transformer_engine_torch

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda") * 2 * cp_size
    for cp_rank in range(cp_size):
        theirs = transformer_engine_torch.thd_get_partitioned_indices(
            cu_seqlens, int(cu_seqlens[-1]), cp_size, cp_rank
        )
        ours = Layout.thd_zigzag(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank)
        assert theirs.tolist() == ours.positions.tolist()
