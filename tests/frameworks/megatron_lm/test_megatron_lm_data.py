"""Megatron-LM's packing scheduler, dynamic context parallelism and ``train_rl.py``.

With a checkout, as ``test_megatron_lm.py``. The scheduler is one of the development branch.
"""

import pytest
from frameworks import needs
from laws import assert_by_hand, assert_same
from megatron_lm_runs import (
    CHECKOUT,
    HERE,
    NEEDS,
    PER_TOKEN,
    PP2,
    SAMPLE_MEAN,
    SIZES,
    run_of,
    runs_of,
)

pytestmark = NEEDS


@pytest.fixture(scope="module")
def megatron_lm(launches, tmp_path_factory):
    with runs_of(tmp_path_factory.mktemp("megatron_lm")) as run:
        yield run


def has_scheduler():
    """Whether the checkout packs by a scheduler, as the development branch does (d48bd6be0a)."""
    file = CHECKOUT / "megatron" / "core" / "datasets" / "data_schedule.py"
    return file.exists() and "def wrap_data_iterator" in file.read_text()


def packed(longest):
    """Ask for packs of the scheduler, not as the data set packs them."""
    longest_here = ["--max-seqlen-per-dp-cp-rank", str(longest)]
    return ["--sequence-packing-scheduler", "dp_balanced", *longest_here]


@pytest.fixture(scope="module")
def alone(megatron_lm):
    """Return the runs on one process, of data that its data set or a scheduler packs."""
    packs = {"sft": [], "varlen": packed(96)}
    before = ["--wanted", "sample_mean"]
    return {
        kind: run_of(megatron_lm(kind, *SAMPLE_MEAN, *more, before=before))
        for kind, more in packs.items()
    }


def assert_trains_the_same(events, wanted):
    run = run_of(events)
    assert_by_hand(run, wanted.by_hand)
    assert_same(run, wanted)


@pytest.mark.skipif(not has_scheduler(), reason="this release has no packing scheduler")
@pytest.mark.parametrize("layout", ["DP2", "CP2", "PP2"])
@pytest.mark.parametrize("kind", ["sft", "varlen"])
def test_the_packing_scheduler_trains_the_loss_of_the_same_conversations(
    megatron_lm, alone, kind, layout
):
    processes, more = SIZES[layout]
    if layout == "CP2":  # of the local implementation, the branch accepts this one
        more = [*more, "--cp-comm-type", "all_gather"]
    packs = packed(48 if layout == "CP2" else 96)
    events = megatron_lm(kind, *SAMPLE_MEAN, *packs, *more, processes=processes)
    assert_trains_the_same(events, alone[kind])


@pytest.mark.skipif(not has_scheduler(), reason="this release has no packing scheduler")
@pytest.mark.parametrize("layout", ["DP2", "CP2", "DP2xCP2", "DP2xPP2"])
def test_the_scheduler_of_dynamic_context_parallelism_trains_the_same_loss(
    megatron_lm, alone, layout
):
    processes, more = {**SIZES, "DP2xPP2": (4, PP2)}[layout]
    fits = 32 if "PP" in layout else 64 // processes  # so that some groups have several ranks
    longest = ["--max-seqlen-per-dp-cp-rank", str(fits), "--cp-comm-type", "all_gather"]
    dynamic = ["--dynamic-context-parallel", *PER_TOKEN, *longest]
    events = megatron_lm("varlen", *SAMPLE_MEAN, *dynamic, *more, processes=processes)
    assert_trains_the_same(events, alone["varlen"])


@pytest.mark.skipif(not has_scheduler(), reason="this release has no packing scheduler")
def test_the_schedulers_own_batches_are_weighted_in_both_splits_and_with_each_padding(megatron_lm):
    done = megatron_lm.launch([str(HERE / "packing_worker.py")], processes=4, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("PACKED equals the loops") == 20 + 2 + 4
    assert "refused with dynamic context parallelism" in done.stdout


def gathers_log_probabilities():
    """Whether train_rl.py splits tokens over context-parallel ranks, as after 0.19 (d98e8a64)."""
    file = CHECKOUT / "megatron" / "rl" / "rl_utils.py"
    return file.exists() and "def _scatter_for_context_parallel" in file.read_text()


@needs("Megatron-LM", "httpx", "fastapi", "uvicorn", "wandb")
@pytest.mark.parametrize("cp", [1, 2])
def test_train_rls_own_rollout_data_and_loss_train_the_mean_over_rollouts_or_prompts(
    megatron_lm, cp
):
    if cp > 1 and not gathers_log_probabilities():
        pytest.skip("this release does not split tokens over context-parallel ranks")
    worker = [str(HERE / "train_rl_worker.py"), str(cp)]
    done = megatron_lm.launch(worker, processes=2, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    print(done.stdout)
    for kind in ("unpacked", "packed"):
        for mode in ("sample_mean", "prompt_mean"):
            assert f"TRAIN_RL equals the loops, {kind}, {mode}" in done.stdout
