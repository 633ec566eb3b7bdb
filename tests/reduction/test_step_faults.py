"""What devices recorded in one step: read in order, exactly, and once."""

import pytest
import torch

from megatron_lossagg.errors import ContractError, ReducerError
from megatron_lossagg.reduction.faults import Faults


def test_values_of_mixed_types_come_back_exactly_and_in_their_order():
    seen = []
    faults = Faults()
    faults.record([torch.tensor(2**40 + 1), torch.tensor(0.1)], lambda v: seen.append(v) or "")
    faults.record([torch.tensor(True)], lambda v: seen.append(v) or "")
    faults.raise_first()
    assert seen == [[2**40 + 1, torch.tensor(0.1).item()], [1]]
    faults.record([torch.tensor(0.1), torch.tensor(0.1).double()], lambda v: seen.append(v) or "")
    faults.raise_first()
    assert seen[2] == [torch.tensor(0.1).item()] * 2


def test_the_first_fault_is_reported_and_all_are_read_once():
    faults = Faults()
    seen = []
    for n in range(4):
        faults.record([torch.tensor(n)], lambda v: seen.append(v[0]) or ("", f"{v[0]}")[v[0] > 1])
    with pytest.raises(ReducerError, match=r"^2\.0$"):
        faults.raise_first()
    assert seen == [0, 1, 2, 3]
    faults.raise_first()


def test_a_fault_raises_the_error_that_it_was_recorded_with():
    faults = Faults()
    faults.record([torch.tensor(1)], lambda values: "a schedule", error=ContractError)
    with pytest.raises(ContractError, match="a schedule"):
        faults.raise_first()


def test_only_what_a_guard_found_is_told_instead_of_raised():
    faults, told = Faults(), []
    faults.on_guard = lambda *found: told.append(found)
    faults.record([torch.tensor(1)], lambda values: "num_tokens", guard="Finalized")
    faults.record([torch.tensor(1)], lambda values: "a wrong mask")
    with pytest.raises(ReducerError, match="a wrong mask"):
        faults.raise_first()
    assert told == [("Finalized", "num_tokens")]


def test_what_is_recorded_holds_no_graph():
    faults = Faults()
    partial_loss = (torch.ones(3, requires_grad=True) * 2).sum()
    faults.record([partial_loss], lambda values: "")
    assert not faults._recorded[0][0][0].requires_grad
