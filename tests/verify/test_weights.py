"""A verification compares the weights that arrived at the losses, sequence by sequence."""

from dataclasses import replace

import pytest
import torch

from megatron_lossagg.verify.causes import Facts, weights_error
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import Reference
from megatron_lossagg.verify.step_data import assign_sequences, make_sequences
from megatron_lossagg.weigh.compare import WeighedSequence

SEQUENCES = make_sequences(1)
DP2 = Parallelism(dp=2)
LENGTHS = [len(sequence) for sequence in SEQUENCES]


def facts():
    num = sum(LENGTHS) + 1
    reference = Reference(
        sequences=SEQUENCES,
        padded=1,
        losses_Y=torch.zeros(num),
        gradients_YP=torch.zeros(num, 1),
        parameters={"theta": (1,)},
    )
    return Facts(
        reference=reference,
        assignment=assign_sequences(SEQUENCES, DP2.m_of_ranks),
        parallelism=DP2,
        loss_scaling="average",
    )


def weighed(slope_Y):
    """Return what is weighed if the slopes are right, by the order of packing."""
    found, starts = [], facts().reference.starts
    assignment = facts().assignment
    for rank in range(2):
        for microbatch in range(assignment.microbatches[rank]):
            packed = [i for i in assignment.of_rank(rank) if assignment.keys[i][1] == microbatch]
            for place, index in enumerate(packed):
                total = float(slope_Y[starts[index] : starts[index + 1]].sum())
                if total:
                    weights = ("weight_sum", "weight_min", "weight_max", "lowest", "highest")
                    place_of = {"dp_rank": rank, "microbatch": microbatch, "sequence": place}
                    columns = {**place_of, **dict.fromkeys(weights, total)}
                    found.append(WeighedSequence(**columns, tokens=1, n=1))
    return found


@pytest.fixture
def slope():
    return torch.rand(sum(LENGTHS) + 1, generator=torch.Generator().manual_seed(1)).double()


def test_right_weights_have_no_error(slope):
    assert weights_error(weighed(slope), facts(), slope) < 1e-12


def test_a_weight_of_one_sequence_that_is_off_is_seen(slope):
    first, *rest = weighed(slope)
    off = replace(first, weight_sum=1.25 * first.weight_sum)
    assert weights_error([off, *rest], facts(), slope) == pytest.approx(0.25)


def test_a_sequence_that_is_missing_and_one_too_many_are_seen(slope):
    first, *rest = weighed(slope)
    assert weights_error(rest, facts(), slope) == pytest.approx(1.0)
    extra = replace(first, microbatch=99)
    assert weights_error([first, *rest, extra], facts(), slope) > 1


def test_an_error_is_relative_to_weights_that_cancel(slope):
    slope[0], slope[1] = 1.0, 1e-6 - 1 - slope[2 : LENGTHS[0]].sum()  # its sum is 1e-6
    first, *rest = sorted(weighed(slope), key=lambda one: one.weight_sum)
    rounded = replace(first, weight_sum=first.weight_sum + 6e-8)
    assert weights_error([rounded, *rest], facts(), slope) < 6e-8
    off = replace(first, weight_sum=first.weight_sum + 1)
    assert weights_error([off, *rest], facts(), slope) > 0.05
