"""Each ``check_`` of the two workers passes on two context-parallel ranks."""

import pytest
import torch
from conftest import each_check
from device_double import DeviceDouble
from steps import facts_of

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.guards.ownership import Ownership

output, test_ownership = each_check("guards/ownership_worker.py", processes=2)
output_of_whole, test_whole_masks = each_check(
    "guards/ownership_whole_masks_worker.py", processes=2
)


def test_the_comparison_waits_for_no_device_until_the_step_is_read():
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[5, 2]))
    facts = facts_of(plan, cp=2)
    guard = Ownership.of(facts)
    plan.state.log = facts.log
    with DeviceDouble() as double:
        mask = torch.tensor([1, 1, 1, 0, 1, 0]).to(double.device, non_blocking=True)
        layout = Layout.local([4, 2], cp_size=2, cp_rank=0)
        plan.reducer([0, 1], mask, layout)(torch.ones(6).to(double.device, non_blocking=True))
        guard.together(facts, has_failed=False)
        assert not double.syncs
        message = "train 2 tokens fewer of sequence 0 than the 5 that were counted"
        with pytest.raises(ReducerError, match=message):
            plan.check()
        assert double.syncs


def test_a_plan_of_which_no_rank_noted_anything_is_not_compared():
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[4]))
    facts = facts_of(plan, cp=2)
    Ownership.of(facts).together(facts, has_failed=False)
    plan.check()
