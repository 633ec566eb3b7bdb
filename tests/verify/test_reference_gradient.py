"""What an error is relative to where terms cancel, and the weights of the reference."""

import math

import pytest
import torch
from conftest import launched

from megatron_lossagg.verify.reference_gradient import Reference, relative
from megatron_lossagg.verify.step_data import make_sequences


def test_the_size_of_terms_is_not_cancelled():
    reference = Reference(
        sequences=make_sequences(),
        padded=4,
        losses_Y=torch.zeros(3),
        gradients_YP=torch.tensor([[3.0, 4.0, 1.0], [-3.0, -4.0, 2.0], [9.0, 9.0, 9.0]]),
        parameters={"of_two": (2,), "of_one": (1, 1)},
    )
    slopes_HY = torch.tensor([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    cancelled = reference.of_parameter(slopes_HY @ reference.gradients_YP, "of_two")[0]
    assert cancelled.tolist() == [0, 0]
    assert reference.size_of_terms(slopes_HY, "of_two").tolist() == pytest.approx([50**0.5, 10])
    assert reference.size_of_terms(slopes_HY, "of_one").tolist() == pytest.approx([5**0.5, 2])


def test_an_error_is_relative_to_the_larger_of_value_and_terms():
    assert relative(1.5, 1.0) == 0.5
    assert relative(1.5, 1.0, terms=5.0) == 0.1
    assert relative(1.5, -1.0, terms=0.5) == 2.5
    assert relative(math.nan, 1.0, terms=5.0) == math.inf


@pytest.mark.launches
def test_the_weights_of_bfloat16_are_rounded_in_the_reference_too():
    """Their rounding is the model's, and no error of a gradient."""
    difference = float(launched("verify/reference_worker.py", processes=1))
    assert 1e-5 < difference < 1e-2
