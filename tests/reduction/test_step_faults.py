"""What devices recorded in one step: read in order, exactly, and once."""

import torch

from megatron_lossagg.reduction.faults import Faults


def test_values_of_mixed_types_come_back_exactly_and_in_their_order():
    seen = []
    faults = Faults()
    faults.record([torch.tensor(2**40 + 1), torch.tensor(0.1)], lambda v: seen.append(v) or "")
    faults.record([torch.tensor(True)], lambda v: seen.append(v) or "")
    assert faults.take() == ""
    assert seen == [[2**40 + 1, torch.tensor(0.1).item()], [1]]
    faults.record([torch.tensor(0.1), torch.tensor(0.1).double()], lambda v: seen.append(v) or "")
    assert faults.take() == ""
    assert seen[2] == [torch.tensor(0.1).item()] * 2


def test_the_first_fault_is_reported_and_all_are_read_once():
    faults = Faults()
    seen = []
    for n in range(4):
        faults.record([torch.tensor(n)], lambda v: seen.append(v[0]) or ("", f"{v[0]}")[v[0] > 1])
    assert faults.take() == "2.0"
    assert seen == [0, 1, 2, 3]
    assert faults.take() == ""


def test_what_is_recorded_holds_no_graph():
    faults = Faults()
    partial_loss = (torch.ones(3, requires_grad=True) * 2).sum()
    faults.record([partial_loss], lambda values: "")
    assert not faults._recorded[0][0][0].requires_grad
