"""Which sequences came: every order, every omission and doubling of small steps."""

import itertools
import re

import numpy as np
import pytest

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import SequenceTracker


def after(num_sequences, num_microbatches, calls, *, is_rerunning=False):
    tracker = SequenceTracker(
        num_sequences=num_sequences,
        num_microbatches=num_microbatches,
        is_rerunning=lambda: is_rerunning,
    )
    for sequences in calls:
        tracker.add(np.array(sequences, dtype=np.int64))
    return tracker


@pytest.mark.parametrize("order", list(itertools.permutations([(0, 2), (1,), ()])))
def test_a_whole_step_finishes_in_any_order(order):
    after(3, 3, order).finish(may_be_empty=False)


def test_a_step_that_the_rerun_machine_repeats_is_a_new_pass():
    calls = [(0, 2), (1,), ()]
    after(3, 3, calls * 2, is_rerunning=True).finish(may_be_empty=False)
    after(3, 3, calls + calls[::-1], is_rerunning=True).finish(may_be_empty=False)
    with pytest.raises(ContractError, match="ran for 1 microbatches, 3 were planned"):
        after(3, 3, [*calls, (1,)], is_rerunning=True).finish(may_be_empty=False)
    with pytest.raises(ContractError, match="sequence 0 is in two"):
        after(3, 3, [*calls, (0, 2), (0, 1)], is_rerunning=True)


def test_a_microbatch_that_comes_again_without_the_rerun_machine_is_refused():
    with pytest.raises(ContractError, match=r"sequence 0 is in two .* number 0 and number 1"):
        after(3, 2, [(0, 2), (0, 2)])
    with pytest.raises(ContractError, match="for more than the 2 planned"):
        after(1, 2, [(0,), (), (0,)])  # a sequence, padding, the sequence again


def test_a_sequence_in_two_microbatches_is_named_with_both():
    message = "sequence 2 is in two .* number 0 and number 1 .* sequences 1, 2"
    with pytest.raises(ContractError, match=message):
        after(3, 2, [(0, 2), (1, 2)])
    with pytest.raises(ContractError, match="sequence 1 is in two"):
        after(3, 3, [(0, 1), (1, 0)])


def test_more_microbatches_than_planned_are_refused():
    with pytest.raises(ContractError, match="for more than the 2 planned"):
        after(3, 2, [(0,), (1, 2), ()])
    with pytest.raises(ContractError, match="for more than the 1 planned"):
        after(2, 1, [(0, 1), ()])


def test_sequences_that_are_missing_when_the_last_microbatch_comes_are_named():
    with pytest.raises(ContractError, match=r"2 of 4 sequences were in no .* \(1, 3\)"):
        after(4, 2, [(0,), (2,)])
    for missing, listed in ((6, "1, 2, 3, 4, 5, 6"), (7, "1, 2, 3, 4, 5, 6, ...")):
        message = re.escape(
            f"{missing} of {missing + 1} sequences were in no microbatch of the step"
        )
        with pytest.raises(ContractError, match=message + re.escape(f" ({listed})")):
            after(missing + 1, 1, [(0,)])


def test_missing_microbatches_and_sequences_are_found_on_closing():
    with pytest.raises(ContractError, match="ran for 1 microbatches, 2 were planned"):
        after(2, 2, [(0, 1)]).finish(may_be_empty=False)
    with pytest.raises(ContractError, match="ran for 2 microbatches, 3 were planned"):
        after(2, 3, [(0, 1), ()]).finish(may_be_empty=False)
    with pytest.raises(ContractError, match=r"1 of 2 sequences .* \(1\)"):
        after(2, 3, [(), (), (0,)]).finish(may_be_empty=False)


def test_a_stage_that_calls_no_loss_func_may_finish_an_empty_tracker():
    after(2, 2, []).finish(may_be_empty=True)
    with pytest.raises(ContractError, match="ran for 0 microbatches, 2 were planned"):
        after(2, 2, []).finish(may_be_empty=False)
    with pytest.raises(ContractError, match="ran for 1 microbatches"):
        after(2, 2, [(0,)]).finish(may_be_empty=True)


def test_a_step_of_paddings_only_finishes():
    after(0, 2, [(), ()]).finish(may_be_empty=False)
