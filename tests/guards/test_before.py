"""Refusals before a step that need no ranks."""

from types import SimpleNamespace

import pytest
from steps import a_chunk, groups_of

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.before import Asked, RunFacts, early_reduction


def asked_with(num_microbatches):
    return Asked(
        plan=None,
        num_microbatches=num_microbatches,
        forward_only=False,
        accumulates=False,
        iteration=None,
        is_previous_open=False,
    )


@pytest.mark.parametrize("has_experts", [False, True])
def test_on_one_rank_an_overlap_reduces_experts_only(has_experts):
    """With TP 2 and EP 2 the experts have ranks to reduce over, and DP CP is 1."""
    chunk = a_chunk()
    chunk.ddp_config.overlap_grad_reduce = True
    chunk.config.no_sync_func = None
    chunk.expert_parallel_buffers = [SimpleNamespace()] if has_experts else []
    run = RunFacts(
        chunks=[chunk],
        groups=groups_of(),
        loss_scaling="average",
        frozen=None,
        agreed=set(),
        finalize=None,
    )
    early_reduction(run, asked_with(1))
    if has_experts:
        with pytest.raises(ContractError, match=r"2 microbatches .*no_sync_func is None"):
            early_reduction(run, asked_with(2))
    else:
        early_reduction(run, asked_with(2))
