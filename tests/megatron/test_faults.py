"""A lost rank or a NaN ends the step soon, with the reason; faults of stock Megatron-Core.

The second half shows, on stock Megatron-Core without this package's loss_func, what the
aggregator refuses or leaves unchanged, and why: when one of these fails after an update, stock has
been fixed, and the refusal or workaround can go.
"""

import time
from collections import ChainMap
from pathlib import Path

import pytest
from conftest import RELEASE, early, fork_server, launched, new_folder, worker_path
from ranks import rows_of

from megatron_lossagg.cpu import launch

pytestmark = pytest.mark.launches

WORKER = Path(__file__).parent / "fault_worker.py"
SECONDS = 60
"""From the fault to the end of every rank; seen: 2 under the launcher, 10 after a timeout."""
THROUGH = "THE STEP WENT THROUGH"
LOST = ("DP2-killed", "PP2-killed", "DP2-stopped")


def test_the_launcher_ends_the_other_rank_when_one_is_killed_in_loss_func(tmp_path):
    """PP 2: the last stage dies, the first waits for its gradient."""
    command = [str(WORKER), "killed", "PP2", str(tmp_path / "time")]
    done = launch(command, processes=2, timeout=300, env={"PYTHONPATH": worker_path()})
    assert (tmp_path / "time").exists(), done.stderr[-4000:]
    assert time.time() - float((tmp_path / "time").read_text()) < SECONDS
    assert done.returncode != 0
    assert "Signal 9" in done.stderr
    assert THROUGH not in done.stdout


@early
def unwatched():
    """Run ranks without a launcher; return how the first ended after the second was lost."""
    out = launched("megatron/fault_worker.py", "unwatched", new_folder(), processes=1)
    assert THROUGH not in out
    return {outcome["lost"]: outcome for outcome in rows_of(out)}


@pytest.mark.parametrize("name", LOST)
def test_no_rank_waits_for_a_lost_rank_without_a_launcher(unwatched, name):
    """Killed: the connection closes. Stopped: the process group's timeout, here 10 s."""
    outcome = unwatched[name]
    assert outcome["other"] == -9
    assert outcome["ended"] == 1  # by an exception; None if it still waited
    assert outcome["seconds"] < SECONDS


def test_a_nan_loss_is_named_by_rank_microbatch_sequence_and_token_and_ends_the_launch():
    """DP 2 x CP 2: rank 3's second microbatch; the token's place is found without the package."""
    done = fork_server().launch([str(WORKER), "nan"], processes=4, timeout=300)
    assert THROUGH not in done.stdout
    assert done.stdout, done.stderr[-4000:]
    (outcome,) = rows_of(done.stdout)
    assert time.time() - outcome["time"] < SECONDS
    assert done.returncode != 0
    sequences = ", ".join(map(str, outcome["sequences"]))
    errors = [line for line in done.stderr.splitlines() if "ReducerError: " in line]
    assert len(errors) == 1, errors
    for words in (
        "rank 3 (context-parallel rank 1)",
        f"the loss of sequence {outcome['sequence']} ",
        f"microbatch {outcome['microbatch']} with sequences {sequences})",
        f"is nan at its token {outcome['token']}:",
    ):
        assert words in errors[0]


@early
def stock():
    return dict(ChainMap(*rows_of(launched("megatron/fault_worker.py", "stock", processes=2))))


@pytest.mark.skipif(RELEASE != (0, 16), reason="seen in megatron-core 0.16")
def test_stock_mtp_is_nan_after_a_masked_microbatch_with_and_without_this_package(stock):
    """It divides by the microbatch's tokens in the average loss scaling. The main loss is
    finite.
    """
    found = stock["a_masked_microbatch_under_mtp"]
    assert found["average"]["stock_nan"]
    assert not found["per_token"]["stock_nan"]
    assert all(each["nan_where_stock_is"] for each in found.values())
    assert found["average"]["our_loss"] == found["per_token"]["our_loss"] > 0


@pytest.mark.skipif(RELEASE != (0, 16), reason="seen in megatron-core 0.16")
def test_stock_does_not_sum_expert_gradients_over_tensor_ranks_at_ep_1_and_etp_1(stock):
    """TP 2 with sequence parallel: both ranks hold an expert, and none sums its gradients."""
    found = stock["copies_of_experts_over_tensor_ranks"]
    assert found["experts"] > 0.1
    assert found["router"] < 1e-6


def test_stock_does_not_divide_by_counts_that_wrap_in_int32(stock):
    found = stock["counts_past_int32"]
    assert found[str(2**30)] == pytest.approx(1)
    assert found[str(2**31)] == pytest.approx(2**31)


def test_stock_trains_a_multiple_where_the_loss_scaling_is_flipped_after_wrapping(stock):
    """DP 2: DDP's factor was frozen at 1/2 for the average, at 1 for the sum."""
    found = stock["loss_scaling_flipped_after_wrapping"]
    assert found["per_token"] == pytest.approx(1 / 2)
    assert found["average"] == pytest.approx(2)


def test_stock_trains_side_losses_n_times_where_two_outputs_are_returned_per_token(stock):
    """Why ``Microbatch.outputs`` makes three."""
    found = stock["two_outputs_per_token"]
    assert found["N"] > 1
    assert found["factors"] == pytest.approx([found["N"]] * len(found["factors"]))
