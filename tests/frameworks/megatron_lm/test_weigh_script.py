"""``lossagg weigh`` on unmodified Megatron-LM checkouts, against loops over their sequences.

``FRAMEWORKS_DIR=... pytest tests/frameworks/megatron_lm/test_weigh_script.py``, as
``test_megatron_lm.py``; with Python 3.12 and triton on main and dev as well (``-k LM-main``).
"""

import json
import sys
from itertools import groupby
from shlex import split
from types import SimpleNamespace

import pytest
from frameworks import checkout_of, needs
from megatron_lm_runs import (
    CP2,
    FSDP_SIZES,
    NEEDED,
    PER_TOKEN,
    SAMPLE_MEAN,
    SIZES,
    runs_of,
    steps,
)
from weighed import ended

CHECKOUTS = [pytest.param("Megatron-LM", marks=needs("Megatron-LM", *NEEDED))]
for checkout in ("Megatron-LM-main", "Megatron-LM-dev"):
    marks = [
        needs(checkout, *NEEDED, "triton"),
        pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12"),
    ]
    CHECKOUTS.append(pytest.param(checkout, marks=marks))

EVERY = {
    **{f"sft-{name}": ("sft", *SIZES[name]) for name in ("DP2", "CP2", "PP2", "PP2xVPP2")},
    **{f"mock-{name}": ("mock", *SIZES[name]) for name in ("TP2", "TP2-SP", "DP2xCP2")},
    "sft-fp16": ("sft", 2, ["--fp16", "--initial-loss-scale", "1024"]),
    "sft-recompute": (
        "sft",
        1,
        split("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ),
}
# With the local attention dev takes no other context parallelism; at CP 2 it fails on packed
# data without its scheduler, for it splits a padding mask that is None.
DEV_CP = ["--cp-comm-type", "all_gather"]
DEV_PACKS = split("--sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank 48")
MOE = split("--num-experts 2 --moe-router-topk 2 --disable-bias-linear")
MTP = split("--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion")


@pytest.fixture(scope="module", params=CHECKOUTS)
def weigh(request, launches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weigh")
    is_dev = request.param.endswith("dev")
    with runs_of(folder, checkout_of(request.param)) as run_one:

        def run(kind, *more, **how):
            if is_dev and CP2[0] in more:
                more = [*more, *DEV_CP, *(DEV_PACKS if kind == "sft" else [])]
            return run_one(kind, *more, **how)

        def weighed(kind, *more, processes, before=()):
            file = folder / "weighed.json"
            events = run(kind, *more, processes=processes, before=["--weigh", str(file), *before])
            found = json.loads(file.read_text())
            (step,) = found["steps"]
            return SimpleNamespace(**step, sequences=found["sequences"], events=events)

        weighed.plain, weighed.checkout = run, request.param
        yield weighed


def by_hand(sequences, num_microbatches, num_ranks):
    """Return stock's weight of each token at CP 1, in a loop over microbatches."""
    weights = []
    microbatches = groupby(sequences, key=lambda s: (s["dp_rank"], s["microbatch"]))
    for _, its in microbatches:
        its = list(its)
        tokens = sum(s["tokens"] for s in its)
        weights += [1 / (num_microbatches * num_ranks * tokens)] * len(its)
    return weights


@pytest.mark.parametrize("case", EVERY)
def test_the_weights_of_a_stock_run_sum_to_1(weigh, case):
    kind, processes, more = EVERY[case]
    found = weigh(kind, *more, processes=processes)
    assert found.weight_sum == pytest.approx(1.0, rel=1e-5)
    assert sum(s["weight_sum"] for s in found.sequences) == pytest.approx(1.0, rel=1e-5)
    if "CP2" in case:
        of_each = "per microbatch and context-parallel rank"
        token, sample = (f"a mean of one {unit} mean {of_each}" for unit in ("token", "sample"))
        one_sequence_each = kind == "mock"  # then both are one
        assert found.causes == ([token, f"or {sample}"] if one_sequence_each else [token])
        return
    wanted = by_hand(found.sequences, found.sizes["M"], found.sizes["DP"])
    for sequence, weight in zip(found.sequences, wanted, strict=True):
        assert sequence["weight_min"] == pytest.approx(weight, rel=1e-5)
        assert sequence["weight_max"] == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("more", [MOE, MTP], ids=["MoE", "MTP"])
def test_the_main_loss_of_a_model_with_other_losses_is_weighed(weigh, more):
    if more is MTP and weigh.checkout == "Megatron-LM-main":
        pytest.skip("main makes no MTP layer without Transformer Engine")
    found = weigh("mock", *more, *PER_TOKEN, processes=2)
    assert (found.trains, found.weight_sum) == ("token_mean", pytest.approx(1.0, rel=1e-5))


@pytest.mark.parametrize("scaling", [[], PER_TOKEN], ids=["average", "per_token"])
@pytest.mark.parametrize("layout", ["DP2", "CP2", "DP2xCP2"])
def test_under_a_mode_each_token_has_the_modes_weight(weigh, layout, scaling):
    processes, more = SIZES[layout]
    found = weigh("sft", *SAMPLE_MEAN, *more, *scaling, processes=processes)
    assert found.trains == "sample_mean"
    for sequence in found.sequences:
        weight = 1 / len(found.sequences) / sequence["tokens"]
        assert sequence["weight_min"] == pytest.approx(weight, rel=1e-5)
        assert sequence["weight_max"] == pytest.approx(weight, rel=1e-5)


def test_stock_with_per_token_loss_trains_a_token_mean_at_cp_2(weigh):
    found = weigh("sft", *CP2, *PER_TOKEN, processes=2)
    assert (found.trains, found.causes) == ("token_mean", [])


@pytest.mark.parametrize("mode", [[], SAMPLE_MEAN], ids=["stock", "sample_mean"])
def test_a_weighed_run_trains_bit_for_bit_as_an_unweighed_one(weigh, mode):
    weighed = weigh("sft", *CP2, *mode, processes=2)
    unweighed = weigh.plain("sft", *CP2, *mode, processes=2)
    assert steps(weighed.events) == steps(unweighed)


@pytest.mark.parametrize("weigh", CHECKOUTS[:1], indirect=True)
@pytest.mark.parametrize("mode", [[], SAMPLE_MEAN], ids=["stock", "sample_mean"])
@pytest.mark.parametrize("scaling", [[], PER_TOKEN], ids=["average", "per_token"])
@pytest.mark.parametrize("name", FSDP_SIZES)
def test_on_megatron_fsdp_each_token_has_the_weight_of_a_loop_and_trains_as_unweighed(
    weigh, name, scaling, mode
):
    processes, more = FSDP_SIZES[name]
    found = weigh("sft", *mode, *more, *scaling, processes=processes)
    assert found.is_measured
    n, is_split = sum(s["tokens"] for s in found.sequences), found.sizes["CP"] > 1
    wanted = by_hand(found.sequences, found.sizes["M"], found.sizes["DP"])
    if mode:
        wanted = [1 / len(found.sequences) / s["tokens"] for s in found.sequences]
    elif scaling:
        wanted = [1 / n] * len(found.sequences)
    means = {(): "microbatch_token_mean", tuple(PER_TOKEN): "token_mean"}
    if is_split and not mode and not scaling:
        cause = "a mean of one token mean per microbatch and context-parallel rank"
        assert (found.trains, found.causes) == (None, [cause])
    else:
        assert found.trains == ("sample_mean" if mode else means[tuple(scaling)])
        for sequence, weight in zip(found.sequences, wanted, strict=True):
            assert sequence["weight_min"] == pytest.approx(weight, rel=1e-5)
            assert sequence["weight_max"] == pytest.approx(weight, rel=1e-5)
    if name == "FSDP-DP2":
        unweighed = weigh.plain("sft", *mode, *more, *scaling, processes=processes)
        assert steps(found.events) == steps(unweighed)


@pytest.mark.parametrize(("mode", "status"), [("token_mean", 0), ("sample_mean", 1)])
def test_the_exit_status_holds_a_run_to_a_mode(weigh, tmp_path, mode, status):
    options = ["--expect", mode]
    if status == 0:
        weigh("sft", *PER_TOKEN, processes=2, before=options)
    else:
        before = ["--weigh", str(tmp_path / "weighed.json"), *options]
        out = weigh.plain("sft", *PER_TOKEN, processes=2, before=before, fails=True)
        assert "expected sample_mean, and the verdict is: trains token_mean" in out


def test_stop_ends_the_run_after_the_weighed_steps(weigh):
    options = ["--at", "2", "--stop", "--divisor", "40"]
    found = weigh("sft", *PER_TOKEN, processes=2, before=options)
    assert found.step == 2
    assert "constant" in found.modes
    assert len(steps(found.events)) < 3


@pytest.mark.parametrize("weigh", CHECKOUTS[-1:], indirect=True)
@pytest.mark.parametrize("mode", [[], SAMPLE_MEAN], ids=["stock", "sample_mean"])
@pytest.mark.parametrize("layout", ["DP2", "DP2xCP2"])
def test_a_sequence_is_whole_where_each_microbatch_has_its_own_cp_group(weigh, layout, mode):
    processes, more = SIZES[layout]
    alone = weigh("varlen", *DEV_PACKS[:-1], "96", processes=1)
    longest = ["--max-seqlen-per-dp-cp-rank", str(64 // processes)]  # the longest need all ranks
    dynamic = ["--dynamic-context-parallel", *DEV_CP, *longest, *more, *mode, *PER_TOKEN]
    found = weigh("varlen", *dynamic, processes=processes)
    groups = {(s["dp_rank"], s["microbatch"]) for s in found.sequences}
    assert len(groups) < found.sizes["M"] * processes  # some of several ranks
    lengths = sorted(s["tokens"] for s in found.sequences)
    assert lengths == sorted(s["tokens"] for s in alone.sequences)
    for sequence in found.sequences:
        weight = 1 / len(lengths) / sequence["tokens"] if mode else 1 / sum(lengths)
        assert sequence["weight_min"] == pytest.approx(weight, rel=1e-5)
        assert sequence["weight_max"] == pytest.approx(weight, rel=1e-5)
    assert found.trains == ("sample_mean" if mode else "token_mean")
    assert found.weight_sum == pytest.approx(1.0, rel=1e-5)
    assert steps(found.events) == steps(weigh.plain("varlen", *dynamic, processes=processes))


@pytest.mark.launches
@needs("Megatron-LM", installed=True)
@pytest.mark.parametrize(
    ("changed", "into", "said"),
    [
        ("losses * loss_mask)", "losses / 0 * loss_mask)", "got exit code 16 from train_step"),
        ("'lm loss'", "'its loss'", "got ['its loss'] in the log of train_step"),
    ],
)
def test_a_megatron_lm_that_logs_no_loss_is_told_why(tmp_path, changed, into, said):
    checkout = checkout_of("Megatron-LM")
    text = (checkout / "pretrain_gpt.py").read_text()
    assert changed in text
    (tmp_path / "pretrain_gpt.py").write_text(text.replace(changed, into))
    status, printed = ended("megatron-lm", tmp_path, tmp_path, checkout, more=["--setting", "all"])
    assert status == 1
    assert printed.rstrip().splitlines()[-1].partition("FrameworkError: ")[2].startswith(said)
