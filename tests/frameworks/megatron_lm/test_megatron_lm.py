"""An unmodified Megatron-LM checkout under ``lossagg run``: its real loop, data and optimizer.

``FRAMEWORKS_DIR=... pytest tests/frameworks/megatron_lm/test_megatron_lm.py``, with what
``megatron_lm_runs.py`` names; without, these tests skip. What the hook does without a checkout is
in ``test_schedule.py``; a packing scheduler and ``train_rl.py``: ``test_megatron_lm_data.py``.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from framework_folders import ROOT
from laws import Comparison, PretrainingLaws
from megatron_lm_runs import (
    CHECKOUT,
    CP2,
    FSDP_SIZES,
    NEEDS,
    PER_TOKEN,
    SAMPLE_MEAN,
    SIZES,
    run_of,
    runs_of,
    steps,
)

from megatron_lossagg.cli.main import main

pytestmark = NEEDS

LAYOUTS = [
    *(("mock", layout) for layout in SIZES),
    *(("sft", layout) for layout in ("DP2", "CP2", "PP2", "DP2xCP2")),
    *(("rope", layout) for layout in ("DP2", "CP2")),
    *(("sft", layout) for layout in FSDP_SIZES),
]


@pytest.fixture(scope="module")
def megatron_lm(launches, tmp_path_factory):
    with runs_of(tmp_path_factory.mktemp("megatron_lm")) as run:
        yield run


@pytest.fixture(scope="module")
def alone(megatron_lm):
    """Return the runs on one process, with each step computed by the reference too."""
    kinds = ("sft", "rope", "mock")
    before = ["--wanted", "sample_mean"]
    return {kind: megatron_lm(kind, *SAMPLE_MEAN, before=before) for kind in kinds}


@pytest.fixture(scope="module")
def stock_events(megatron_lm):
    """Return the stock script's runs on packed conversations, without a flag of ours."""
    layouts = {name: SIZES[name] for name in ("DP2", "CP2")}
    return {name: megatron_lm("sft", *more, processes=n) for name, (n, more) in layouts.items()}


@pytest.fixture(scope="module")
def stock(stock_events):
    return {"DP 2": run_of(stock_events["DP2"]), "CP 2": run_of(stock_events["CP2"])}


@pytest.fixture(params=["sft", "rope", "mock"])
def on_one_process(alone, request):
    events = alone[request.param]
    if request.param != "mock":
        wanted = [event["sequences"] for event in events if "wanted" in event]
        assert set(wanted) != {4}, "every entry held one conversation"
    return run_of(events)


@pytest.fixture(
    params=[
        pytest.param((*case, scaling), id="-".join((*case, scaling)))
        for scaling in ("average", "per_token")
        for case in LAYOUTS
    ]
)
def in_layout(megatron_lm, alone, request):
    kind, layout, loss_scaling = request.param
    processes, more = {**SIZES, **FSDP_SIZES}[layout]
    more = [*more, *(PER_TOKEN if loss_scaling == "per_token" else [])]
    events = megatron_lm(kind, *SAMPLE_MEAN, *more, processes=processes)
    return Comparison(run=run_of(events), wanted=run_of(alone[kind]))


TWO_STAGES = {
    "DP2": (2, []),
    "CP2": (2, CP2),
    "CP2 per-token": (2, [*CP2, *PER_TOKEN]),
}


def two_stages(run, folder, processes, more, before=()):
    """Train a run for each stage, the second from the first one's checkpoint."""
    found = []
    for stage, mode in enumerate(["token_mean", "sample_mean"], start=1):
        options = ["--loss-aggregation", mode, *more]
        options += ["--save", str(folder / f"stage{stage}"), "--save-interval", "3"]
        if stage == 2:
            options += ["--load", str(folder / "stage1"), "--finetune", "--no-load-optim"]
        options += ["--ckpt-format", "torch"]
        hand = [*before, mode] if before else []
        found.append(run("sft", *options, processes=processes, before=hand))
    return found


@pytest.fixture(scope="module")
def two_stages_by_hand(megatron_lm, tmp_path_factory):
    """Return the steps of both stages by the reference, on one process."""
    folder = tmp_path_factory.mktemp("by_hand")
    stages = two_stages(megatron_lm, folder, 1, [], before=["--wanted"])
    return [run_of(events) for events in stages]


@pytest.fixture(params=TWO_STAGES)
def in_two_stages(megatron_lm, two_stages_by_hand, tmp_path, request):
    found = two_stages(megatron_lm, tmp_path, *TWO_STAGES[request.param])
    both = zip(found, two_stages_by_hand, strict=True)
    return [Comparison(run=run_of(events), wanted=wanted) for events, wanted in both]


class TestMegatronLM(PretrainingLaws):
    """``pretrain_gpt.py`` with its own data sets."""


SAME_DATA = [(4, 6), (8, 3), (24, 1)]
"""Batch sizes, and evaluation steps."""
SHADOW = ["--loss-aggregation-shadow", "token_mean"]


@pytest.fixture(scope="module")
def evaluated(megatron_lm):
    """Return a function that evaluates the same data in other batches; no weight changes."""

    def evaluated(kind, batch, num_steps, *more, processes=1, before=()):
        options = [*SAMPLE_MEAN, *SHADOW, "--global-batch-size", str(batch)]
        options += ["--eval-iters", str(num_steps), "--train-iters", "1", "--lr", "0"]
        options += ["--split", "34,33,33"]
        return megatron_lm(kind, *options, *more, processes=processes, before=before)

    return evaluated


@pytest.fixture(scope="module")
def evaluated_by_hand(evaluated):
    """Return, for each kind of data and mode, the loss of validation and test by the reference."""
    found = {}
    for kind, mode in itertools.product(("mock", "sft"), ("token_mean", "sample_mean")):
        events = evaluated(kind, *SAME_DATA[0], before=["--wanted", mode])
        found[kind, mode] = [e["of_evaluation"] for e in events if "of_evaluation" in e]
        assert len(found[kind, mode]) == 2
    return found


@pytest.mark.parametrize("kind", ["mock", "sft"])
@pytest.mark.parametrize(
    ("layout", "loss_scaling", "batch", "num_steps"),
    [
        *(("DP2", "average", *size) for size in SAME_DATA),
        ("CP2", "average", *SAME_DATA[0]),
        ("PP2", "per_token", *SAME_DATA[1]),
    ],
)
def test_an_evaluation_reports_the_loss_of_all_its_data_at_every_batch_size(
    evaluated, evaluated_by_hand, kind, layout, loss_scaling, batch, num_steps
):
    processes, more = SIZES[layout]
    more = [*more, *(PER_TOKEN if loss_scaling == "per_token" else [])]
    events = evaluated(kind, batch, num_steps, *more, processes=processes)
    losses = [event["evaluate"] for event in events if "evaluate" in event]
    for name, mode in (("lm loss", "sample_mean"), ("lossagg/shadow/token_mean", "token_mean")):
        by_hand = evaluated_by_hand[kind, mode]
        assert [one[name] for one in losses] == pytest.approx(by_hand, rel=1e-6, abs=0)
    for one in losses:
        assert one["lossagg/weight_sum"] == pytest.approx(one["lossagg/weight_expected"], rel=1e-6)


def test_microbatch_token_mean_at_dp_2_is_the_stock_loss(megatron_lm, stock_events):
    events = megatron_lm("sft", "--loss-aggregation", "microbatch_token_mean", processes=2)
    ours = [event["grad_norm"] for event in steps(events)]
    assert ours == pytest.approx(
        [event["grad_norm"] for event in steps(stock_events["DP2"])], rel=1e-6
    )


def test_without_a_flag_the_script_runs_bit_for_bit_as_it_is(megatron_lm, stock_events):
    plain = megatron_lm("sft", processes=2, before=["--plain"])
    assert plain == stock_events["DP2"]


def test_a_run_that_was_killed_resumes_with_the_same_losses_and_record(
    megatron_lm, tmp_path, capsys
):
    def recorded(name):
        return ["--loss-aggregation-record", str(tmp_path / f"{name}.jsonl")]

    keep = ["--save-interval", "1", "--ckpt-format", "torch", *SAMPLE_MEAN]
    folder = str(tmp_path / "whole")
    whole = megatron_lm("mock", *keep, "--save", folder, *recorded("whole"), processes=2)
    kept = ["--save", str(tmp_path / "killed"), "--load", str(tmp_path / "killed")]
    kept += recorded("killed")
    text = megatron_lm("mock", *keep, *kept, processes=2, env={"KILL_AFTER": "2"}, fails=True)
    assert "Signal 9" in text
    resumed = megatron_lm("mock", *keep, *kept, processes=2)
    assert steps(resumed) == steps(whole)[2:]
    megatron_lm("mock", *SAMPLE_MEAN, *CP2, *recorded("cp"), processes=2)
    for other in ("killed", "cp"):
        files = [str(tmp_path / f"{name}.jsonl") for name in ("whole", other)]
        assert main(["diff", *files]) == 0
        same = "the same loss function on the same batches in 3 steps (steps 1 to 3 at DP 2 CP 1"
        assert same in capsys.readouterr().out


def test_on_megatron_fsdp_a_shadow_changes_no_bit_and_a_record_is_that_of_another_engine(
    megatron_lm, tmp_path, capsys
):
    processes, fsdp = FSDP_SIZES["FSDP-DP2"]
    plain = megatron_lm("sft", *fsdp, processes=processes, before=["--plain"])
    shadowed = megatron_lm("sft", *fsdp, *SHADOW, processes=processes)
    assert len(plain) == len(shadowed)
    for one, other in zip(steps(plain), steps(shadowed), strict=True):
        assert "lossagg/shadow/token_mean" in other["step"]
        assert one["step"] == {name: other["step"][name] for name in one["step"]}
        assert one["grad_norm"] == other["grad_norm"]
    files = [str(tmp_path / name) for name in ("ddp.jsonl", "fsdp.jsonl")]
    for file, more in zip(files, ([], fsdp), strict=True):
        record = ["--loss-aggregation-record", file]
        megatron_lm("sft", *SAMPLE_MEAN, *more, *record, processes=processes)
    assert main(["diff", *files]) == 0
    assert "the same loss function on the same batches in 3 steps" in capsys.readouterr().out


SHADOWS = ("sample_mean", "token_mean", "constant:64", "length_power:0.5")


# A checkpoint has Megatron's classes, which are imported when it is read.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_under_a_shadow_stock_trains_the_same_bits_and_every_mode_is_logged(megatron_lm, tmp_path):
    def run(name, *more, before=()):
        save = ["--save", str(tmp_path / name), "--save-interval", "3", "--ckpt-format", "torch"]
        return megatron_lm("sft", *CP2, *save, *more, processes=2, before=before)

    plain = run("plain", before=["--plain"])
    shadowed = run("shadowed", "--loss-aggregation-shadow", ",".join(SHADOWS))
    trained = megatron_lm("sft", *SAMPLE_MEAN, *CP2, processes=2)
    assert len(plain) == len(shadowed)
    for one, other in zip(plain, shadowed, strict=True):
        kind = "step" if "step" in one else "evaluate"
        logged = {f"lossagg/shadow/{name}" for name in (*SHADOWS, "stock")}
        assert other[kind].keys() - one[kind].keys() == logged
        assert one[kind] == {name: other[kind][name] for name in one[kind]}
        assert one.get("grad_norm") == other.get("grad_norm")
    first, wanted = steps(shadowed)[0]["step"], steps(trained)[0]["step"]["lm loss"]
    assert first["lossagg/shadow/sample_mean"] == pytest.approx(wanted, rel=1e-6)
    assert first["lossagg/shadow/token_mean"] == pytest.approx(first["lm loss"], rel=1e-6)
    assert abs(first["lossagg/shadow/stock"] / first["lm loss"] - 1) > 1e-4  # CP 2
    one, other = (checkpoint(tmp_path / name) for name in ("plain", "shadowed"))
    assert one.keys() == other.keys()
    assert any("exp_avg" in name for name in one), "the optimizer's state is compared too"
    assert all(torch.equal(one[name], other[name]) for name in one)


def checkpoint(folder):
    """Return every tensor of a checkpoint by its place in it."""
    tensors = {}

    def collect(name, value):
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{name}/{key}", inner)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                collect(f"{name}/{index}", inner)

    files = sorted(folder.rglob("*.pt"))
    assert files
    for file in files:
        collect(str(file.relative_to(folder)), torch.load(file, weights_only=False))
    return {name: tensor for name, tensor in tensors.items() if "/rng_state" not in name}


def test_a_finished_run_that_is_resumed_has_status_0_and_says_so(megatron_lm, tmp_path):
    kept = ["--save", str(tmp_path), "--load", str(tmp_path), "--ckpt-format", "torch"]
    options = ["--save-interval", "3", "--eval-iters", "0", *kept, *SAMPLE_MEAN]
    assert len(steps(megatron_lm("mock", *options))) == 3
    assert steps(megatron_lm("mock", *options)) == []
    assert "pretrain_gpt.py had no step left to do, so nothing was trained" in megatron_lm.errors


def test_a_script_that_masks_more_than_its_data_is_an_error_unless_it_says_so(
    megatron_lm, tmp_path
):
    script = tmp_path / "pretrain_gpt.py"  # as a fork's
    text = (CHECKOUT / "pretrain_gpt.py").read_text()
    call = "return output_tensor, partial("
    masks = "loss_mask = loss_mask * (labels % 3 != 0)\n    "
    script.write_text(text.replace(f"    {call}", f"    {masks}{call}"))
    text = megatron_lm("sft", *SAMPLE_MEAN, script=script, fails=True)
    assert "declare it with --loss-aggregation-rejects-tokens" in text
    declared = megatron_lm("sft", *SAMPLE_MEAN, "--loss-aggregation-rejects-tokens", script=script)
    assert len(steps(declared)) == 3


def test_help_shows_our_options_and_the_scripts(megatron_lm):
    megatron_lm("mock", "--help", fails=None)
    ours, theirs = "--loss-aggregation MODE|SYSTEM:NAME", "--tensor-model-parallel-size"
    with_help = megatron_lm.output
    assert ours in with_help
    megatron_lm("mock", "--help", before=["--plain"], fails=None)
    assert (theirs in with_help) == (theirs in megatron_lm.output)  # d98e8a64's own fails


def test_prompt_mean_is_refused_before_the_script_starts(megatron_lm):
    text = megatron_lm("mock", "--loss-aggregation", "prompt_mean", fails=True)
    assert "prompt_mean needs prompt ids" in text
    assert "building GPT model" not in text


def test_a_script_without_a_training_step_is_an_error(megatron_lm):
    text = megatron_lm("mock", *SAMPLE_MEAN, "--skip-train", "--eval-iters", "0", fails=True)
    assert "ended without a step that --loss-aggregation sample_mean" in text


PAGE = ROOT / "docs" / "integrations" / "megatron-lm.md"


@pytest.fixture
def at_the_prompt(tmp_path):
    """Return a copy of the checkout, and an environment whose python is this one."""
    copied = shutil.ignore_patterns(".git", "tests", "docs", "*.pyc", "*.so")
    shutil.copytree(CHECKOUT, tmp_path / "checkout", ignore=copied)
    torchrun = tmp_path / "bin" / "torchrun"  # this environment may have torch from another one
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    folders = [str(torchrun.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    path = {"PATH": os.pathsep.join(folders), "PYTHONPATH": str(ROOT)}
    others = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "hf")}
    return {"cwd": tmp_path / "checkout", "env": {**os.environ, **path, **others}}


@pytest.fixture
def typed(at_the_prompt):
    """Type the page's block for a laptop, with other words for some of it; return its output."""

    def run(*changes):
        section = PAGE.read_text().partition("## Try it on a laptop")[2]
        (block,) = re.findall(r"^```sh\n([^`]*?<<'EOF'.*?)^```", section, re.M | re.S)
        for old, new in changes:
            assert block.count(old) == 1
            block = block.replace(old, new)
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            **at_the_prompt, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


def test_the_block_for_a_laptop_trains_as_it_stands_on_the_page(typed):
    done = typed()
    assert "loss aggregation sample_mean: w_s = 1/(B n_b)" in done.stdout + done.stderr
    trained = re.findall(r"iteration +(\d+)/ +5 .* lm loss: (\S+)", done.stdout)
    assert [step for step, _ in trained] == ["1", "2", "3", "4", "5"]
    assert all(float(loss) > 0 for _, loss in trained)


def test_a_weighed_step_of_the_block_has_the_report_that_readme_quotes(typed):
    cp = "--context-parallel-size 2 --cp-comm-type all_gather --global-batch-size 16"
    done = typed(
        ("run --cpu pretrain_gpt.py", "weigh --cpu --stop pretrain_gpt.py"),
        ("--loss-aggregation sample_mean", cp),
        ("--global-batch-size 4", ""),
    )
    text = (ROOT / "README.md").read_text()
    (quoted,) = re.findall(r"^```text\n(weighed step 1:.*?)^```", text, re.M | re.S)
    printed = to_digits(done.stdout)
    at = 0
    for part in to_digits(quoted).split("  ...\n"):
        assert part in printed[at:], done.stdout
        at = printed.index(part, at) + len(part)


def to_digits(text):
    """Write each number with a point in six digits, which every machine rounds alike."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.6g}", text)


CPU_NEEDS = {
    "torch.cuda.device_count": "DP2",
    "torch.cuda.set_device": "DP2",
    "torch.cuda.get_device_properties": "CP2",
    "megatron.training.training.initialize_megatron": "DP2",
    "megatron.training.training.set_jit_fusion_options": "DP2",
    "megatron.legacy.fused_kernels.load": "DP2",
    "megatron.core.utils.get_thd_batch_on_this_cp_rank": "CP2",
    "megatron.core.utils._get_batch_on_this_cp_rank_per_document_balancing": "CP2",
    "megatron.core.transformer.transformer_block._get_block_submodules": "CP2",
    "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd": "rope DP2",
}
"""A layout of packed SFT that needs each stand-in. Not here: what only NVML or only MTP needs, and
``deallocate_pipeline_outputs``, without which gloo is wrong in some runs alone."""


@pytest.mark.parametrize("name", CPU_NEEDS)
def test_megatron_lm_does_not_run_on_a_cpu_without_a_stand_in(megatron_lm, name):
    *kind, layout = CPU_NEEDS[name].split()
    kind = "".join(kind) or "sft"
    processes, more = SIZES[layout]
    text = megatron_lm(kind, *more, processes=processes, env={"WITHOUT": name}, fails=True)
    if f"KeyError: '{name}'" in text:
        pytest.skip("another release has this name")
