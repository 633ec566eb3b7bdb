"""The one conversion to integers: what it takes, what it refuses and with which error."""

import numpy as np
import pytest
import torch

from megatron_lossagg.errors import LayoutError, PlanError
from megatron_lossagg.reduction.integers import checked_integers, first_few, is_integer

GOOD = {
    "list": [3, 0, 5],
    "tuple": (3, 0, 5),
    "int32": np.array([3, 0, 5], dtype=np.int32),
    "uint8": torch.tensor([3, 0, 5], dtype=torch.uint8),
    "strided": torch.tensor([3, 9, 0, 9, 5])[::2],
    "numpy scalars": [np.int64(3), np.int8(0), 5],
}
BAD = {
    "floats": [3.0],
    "bools": [True],
    "ragged": [[1], [1, 2]],
    "nothing": None,
    "a number": 3,
    "two dimensions": [[1], [2]],
    "strings": ["3"],
    "a tensor with a gradient": torch.ones(2, requires_grad=True),
    "beyond int64": np.array([2**63], dtype=np.uint64),
    "beyond int64, in the other byte order": np.array([2**64 - 1, 7], dtype=">u8"),
    "beyond every integer type": [2**70],
}


@pytest.mark.parametrize("form", GOOD)
def test_integers_of_any_form_become_contiguous_int64(form):
    found = checked_integers("n", GOOD[form], PlanError)
    assert found.dtype == np.int64
    assert found.flags.c_contiguous
    assert found.tolist() == [3, 0, 5]


@pytest.mark.parametrize("form", BAD)
def test_what_is_not_integers_is_refused_with_the_callers_error_and_name(form):
    for error in (PlanError, LayoutError):
        with pytest.raises(error, match=r"^lengths: got "):
            checked_integers("lengths", BAD[form], error)


def test_the_bounds_themselves_are_accepted():
    largest = np.array([2**63 - 1, 0], dtype=np.uint64)
    assert checked_integers("n", largest, PlanError, lowest=0).tolist() == [2**63 - 1, 0]


def test_a_message_shows_what_was_got():
    with pytest.raises(PlanError, match=r"^n: got 'seven', expected integers"):
        checked_integers("n", "seven", PlanError)
    with pytest.raises(PlanError, match=r"^n: got 3, expected integers"):
        checked_integers("n", 3, PlanError)


def test_empty_sequences_are_integers():
    for empty in ([], np.zeros(0), torch.zeros(0)):
        assert checked_integers("n", empty, PlanError).tolist() == []


def test_one_sequence_of_two_dimensions_is_squeezed_only_on_demand():
    assert checked_integers("n", [[1, 2]], PlanError, squeeze=True).tolist() == [1, 2]
    with pytest.raises(PlanError, match=r"of shape \(1, 2\)"):
        checked_integers("n", [[1, 2]], PlanError)
    with pytest.raises(PlanError, match=r"of shape \(2, 1\)"):
        checked_integers("n", [[1], [2]], PlanError, squeeze=True)


def test_bounds_and_length_are_checked_and_named():
    with pytest.raises(PlanError, match="n: got -1 at index 2, the smallest is 0"):
        checked_integers("n", [0, 3, -1], PlanError, lowest=0)
    with pytest.raises(PlanError, match="n: got 3 entries, expected 2, one per sequence"):
        checked_integers("n", [0, 3, 1], PlanError, length=2)
    assert checked_integers("n", [-1], PlanError).tolist() == [-1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0, True), (np.int32(4), True), (2**63 - 1, True)),
        *((2**63, False), (-1, False), (True, False), (2.0, False)),
        *(("2", False), (None, False), (torch.tensor(2), False)),
    ],
)
def test_an_integer_is_neither_bool_nor_float_nor_tensor(value, expected):
    assert is_integer(value) is expected


def test_bounds_of_one_integer_are_inclusive():
    assert [is_integer(n, lowest=1, highest=2) for n in range(4)] == [False, True, True, False]


def test_a_long_list_is_written_by_its_first_values():
    assert first_few(range(6)) == "0, 1, 2, 3, 4, 5"
    assert first_few(range(7)) == "0, 1, 2, 3, 4, 5, ..."
    assert first_few(np.arange(3), 2) == "0, 1, ..."
