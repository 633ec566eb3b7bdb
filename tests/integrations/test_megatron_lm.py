"""An unmodified Megatron-LM checkout under ``lossagg run``: its real loop, data and optimizer.

``FRAMEWORKS_DIR=... pytest tests/integrations/test_megatron_lm.py``, with the checkout in
``$FRAMEWORKS_DIR/Megatron-LM`` (``tools/fetch_frameworks.sh``) and the packages in ``NEEDS``;
without, these tests skip. With ``-s`` it prints the first step of every run; ``DATA_SEED=7``
draws other conversations. What the hook does without a checkout is in ``test_schedule.py``.
"""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from conftest import worker_path
from fork_server import ForkServer
from frameworks import checkout_of, needs

from megatron_lossagg.cli.main import main
from megatron_lossagg.verify.frameworks.megatron_lm import MOCK, OPTIONS

FRAMEWORKS = Path(__file__).parent
WORKER = FRAMEWORKS / "megatron_lm_worker.py"
CHECKOUT = checkout_of("Megatron-LM")
NEEDS = ("six", "regex", "yaml", "pydantic", "pybind11", "transformers", "datasets", "tokenizers")

pytestmark = needs("Megatron-LM", *NEEDS)

COMMON = [*OPTIONS, "--num-layers", "4", "--eval-interval", "3"]
SFT = shlex.split(
    "--sft --no-create-attention-mask-in-dataloader --tokenizer-type SFTTokenizer "
    "--sft-tokenizer-prompt-format nemotron-h-aligned"
)
# One conversation per entry, for a packing scheduler; of the development branch.
VARLEN = ["--use-varlen-dataset", *SFT[1:]]
# As Llama's, Qwen's and Nemotron's models.
ROPE = shlex.split(
    "--position-embedding-type rope --no-rope-fusion --swiglu --normalization RMSNorm "
    "--group-query-attention --num-query-groups 2 --disable-bias-linear"
)
UNTIL_0_16 = ["--legacy-tokenizer"]
SAMPLE_MEAN = ["--loss-aggregation", "sample_mean"]
PER_TOKEN = ["--calculate-per-token-loss"]
CP2, TP2, PP2 = (
    [f"--{name}-parallel-size", "2"] for name in ("context", "tensor-model", "pipeline-model")
)
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
SIZES = {
    "DP2": (2, []),
    "CP2": (2, CP2),
    "TP2": (2, TP2),
    "TP2-SP": (2, [*TP2, "--sequence-parallel"]),
    "PP2": (2, PP2),
    "PP2xVPP2": (2, [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "DP2xCP2": (4, [*CP2, *OVERLAP]),
}
"""Processes and options."""
LAYOUTS = [
    *(("mock", layout) for layout in SIZES),
    *(("sft", layout) for layout in ("DP2", "CP2", "PP2", "DP2xCP2")),
    *(("rope", layout) for layout in ("DP2", "CP2")),
]


@pytest.fixture(scope="module")
def megatron_lm(launches, tmp_path_factory):
    """Return a function that runs a script of the checkout and returns what its worker wrote."""
    folder = tmp_path_factory.mktemp("megatron_lm")
    schedule_worker = FRAMEWORKS.parent / "loop"
    path = os.pathsep.join([*map(str, (CHECKOUT, FRAMEWORKS, schedule_worker)), worker_path()])
    server = ForkServer(["imports_megatron_lm"], path=path)
    release = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    environment = {
        "HF_HOME": str(folder / "hf"),
        # The checkout pins a Python of its own for pyenv; make builds its helpers for this one.
        "PYENV_VERSION": release,
    }
    made = server.launch(
        [str(FRAMEWORKS / "make_sft_data.py"), str(folder), os.environ.get("DATA_SEED", "5")],
        processes=1,
        timeout=100,
        env=environment,
    )
    assert made.returncode == 0, made.stderr
    paths = [
        "--tokenizer-model",
        str(folder / "tokenizer"),
        "--data-path",
        str(folder / "data.jsonl"),
    ]
    options = (CHECKOUT / "megatron" / "training" / "arguments.py").read_text()
    older = [option for option in UNTIL_0_16 if option in options]
    sft = [*SFT, *older, *paths]
    varlen = [*VARLEN, *older, *paths]
    data = {"mock": MOCK, "sft": sft, "rope": [*sft, *ROPE], "varlen": varlen}
    counter = iter(range(1000))

    def run(kind, *more, processes=1, before=(), env=None, script="pretrain_gpt.py", fails=False):
        file = folder / f"{next(counter)}.jsonl"
        command = [str(WORKER), str(file), *before, str(CHECKOUT / script)]
        done = server.launch(
            [*command, *COMMON, *data[kind], *more],
            processes=processes,
            timeout=300,
            env={**environment, **(env or {})},
        )
        run.output, run.errors = done.stdout, done.stderr
        if fails is None:
            return None
        if fails:
            assert done.returncode != 0, done.stdout[-3000:]
            return done.stdout + done.stderr
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines]
        for event in (event for event in events[:2] if "step" in event or "wanted" in event):
            print(f"{kind:4} {processes} ranks {' '.join([*before, *map(str, more)])}: {event}")
        return events

    run.launch = server.launch
    yield run
    server.close()


@pytest.fixture(scope="module")
def alone(megatron_lm):
    """Return the runs on one process, with each step computed by the reference too."""
    kinds = ("sft", "rope", "mock")
    before = ["--wanted", "sample_mean"]
    return {kind: megatron_lm(kind, *SAMPLE_MEAN, before=before) for kind in kinds}


@pytest.fixture(scope="module")
def stock(megatron_lm):
    """Return the stock script's runs on packed conversations, without a flag of ours."""
    layouts = {name: SIZES[name] for name in ("DP2", "CP2")}
    return {name: megatron_lm("sft", *more, processes=n) for name, (n, more) in layouts.items()}


def steps(events):
    return [event for event in events if "step" in event]


def numbers(events):
    """Return loss and grad norm of each step, and the loss of each evaluation."""
    found = []
    for event in events:
        if "step" in event:
            found += [event["step"]["lm loss"], event["grad_norm"]]
        elif "evaluate" in event:
            found.append(event["evaluate"]["lm loss"])
    return found


def by_hand(events):
    """Return each step as the reference computes it."""
    return [event for event in events if "wanted" in event]


def assert_by_hand(events, wanted):
    """Assert that three steps have the reference's loss and gradient."""
    assert len(steps(events)) == len(wanted) == 3
    for step, hand in zip(steps(events), wanted, strict=True):
        assert step["step"]["lm loss"] == pytest.approx(hand["wanted"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(hand["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("kind", ["sft", "rope", "mock"])
def test_on_one_process_loss_and_gradient_are_the_references_of_each_conversation(alone, kind):
    wanted = by_hand(alone[kind])
    assert_by_hand(alone[kind], wanted)
    if kind != "mock":
        assert {want["sequences"] for want in wanted} != {4}, "every entry held one conversation"


@pytest.mark.parametrize("loss_scaling", ["average", "per_token"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_every_layout_and_loss_scaling_trains_and_evaluates_the_same_loss(
    megatron_lm, alone, kind, layout, loss_scaling
):
    processes, more = SIZES[layout]
    more = [*more, *(PER_TOKEN if loss_scaling == "per_token" else [])]
    events = megatron_lm(kind, *SAMPLE_MEAN, *more, processes=processes)
    assert len(steps(events)) == 3
    assert numbers(events) == pytest.approx(numbers(alone[kind]), rel=1e-6)


def test_stock_reports_one_loss_at_dp_2_and_cp_2_and_trains_two(stock):
    one, other = (steps(stock[name])[0] for name in ("DP2", "CP2"))
    assert one["step"]["lm loss"] == pytest.approx(other["step"]["lm loss"], rel=1e-6)
    assert abs(one["grad_norm"] / other["grad_norm"] - 1) > 1e-4


def test_microbatch_token_mean_at_dp_2_is_the_stock_loss(megatron_lm, stock):
    events = megatron_lm("sft", "--loss-aggregation", "microbatch_token_mean", processes=2)
    ours = [event["grad_norm"] for event in steps(events)]
    assert ours == pytest.approx([event["grad_norm"] for event in steps(stock["DP2"])], rel=1e-6)


def test_without_a_flag_the_script_runs_bit_for_bit_as_it_is(megatron_lm, stock):
    plain = megatron_lm("sft", processes=2, before=["--plain"])
    assert plain == stock["DP2"]


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
        assert "the same loss in 3 steps (steps 1 to 3 at DP 2 CP 1" in capsys.readouterr().out


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
    return [by_hand(events) for events in stages]


@pytest.mark.parametrize("layout", TWO_STAGES)
def test_two_stages_train_the_mean_over_tokens_and_then_over_conversations(
    megatron_lm, two_stages_by_hand, tmp_path, layout
):
    """The recipe of docs/recipes/nemotron-two-stage-sft.md."""
    found = two_stages(megatron_lm, tmp_path, *TWO_STAGES[layout])
    for events, wanted in zip(found, two_stages_by_hand, strict=True):
        assert_by_hand(events, wanted)
    first, second = (wanted[0]["wanted"] for wanted in two_stages_by_hand)
    assert abs(second / first - 1) > 0.01


SHADOW = ("sample_mean", "token_mean", "constant:64", "length_power:0.5")


# A checkpoint has Megatron's classes, which are imported when it is read.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_under_a_shadow_stock_trains_the_same_bits_and_every_mode_is_logged(megatron_lm, tmp_path):
    def run(name, *more, before=()):
        save = ["--save", str(tmp_path / name), "--save-interval", "3", "--ckpt-format", "torch"]
        return megatron_lm("sft", *CP2, *save, *more, processes=2, before=before)

    plain = run("plain", before=["--plain"])
    shadowed = run("shadowed", "--loss-aggregation-shadow", ",".join(SHADOW))
    trained = megatron_lm("sft", *SAMPLE_MEAN, *CP2, processes=2)
    assert len(plain) == len(shadowed)
    for one, other in zip(plain, shadowed, strict=True):
        kind = "step" if "step" in one else "evaluate"
        logged = {f"lossagg/shadow/{name}" for name in (*SHADOW, "stock")}
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


def has_scheduler():
    """Whether the checkout packs by a scheduler, as the development branch does (d48bd6be0a)."""
    file = CHECKOUT / "megatron" / "core" / "datasets" / "data_schedule.py"
    return file.exists() and "def wrap_data_iterator" in file.read_text()


def packed(longest):
    """Ask for packs of the scheduler, not as the data set packs them."""
    longest_here = ["--max-seqlen-per-dp-cp-rank", str(longest)]
    return ["--sequence-packing-scheduler", "dp_balanced", *longest_here]


@pytest.fixture(scope="module")
def alone_varlen(megatron_lm):
    """Return the run on one process of data that a scheduler has to pack."""
    return megatron_lm("varlen", *SAMPLE_MEAN, *packed(96), before=["--wanted", "sample_mean"])


@pytest.mark.skipif(not has_scheduler(), reason="this release has no packing scheduler")
@pytest.mark.parametrize("layout", ["DP2", "CP2", "PP2"])
@pytest.mark.parametrize("kind", ["sft", "varlen"])
def test_the_packing_scheduler_trains_the_loss_of_the_same_conversations(
    megatron_lm, alone, alone_varlen, kind, layout
):
    processes, more = SIZES[layout]
    if layout == "CP2":  # of the local implementation, the branch accepts this one
        more = [*more, "--cp-comm-type", "all_gather"]
    packs = packed(48 if layout == "CP2" else 96)
    events = megatron_lm(kind, *SAMPLE_MEAN, *packs, *more, processes=processes)
    one = {**alone, "varlen": alone_varlen}[kind]
    assert_by_hand(events, by_hand(one))
    assert numbers(events) == pytest.approx(numbers(one), rel=1e-6)  # evaluations too


@pytest.mark.skipif(not has_scheduler(), reason="this release has no packing scheduler")
@pytest.mark.parametrize("layout", ["DP2", "CP2", "DP2xCP2", "DP2xPP2"])
def test_the_scheduler_of_dynamic_context_parallelism_trains_the_same_loss(
    megatron_lm, alone_varlen, layout
):
    processes, more = {**SIZES, "DP2xPP2": (4, PP2)}[layout]
    longest = ["--max-seqlen-per-dp-cp-rank", "48", "--cp-comm-type", "all_gather"]
    dynamic = ["--dynamic-context-parallel", *PER_TOKEN, *longest]
    events = megatron_lm("varlen", *SAMPLE_MEAN, *dynamic, *more, processes=processes)
    assert_by_hand(events, by_hand(alone_varlen))
    assert numbers(events) == pytest.approx(numbers(alone_varlen), rel=1e-6)


@pytest.mark.skipif(not has_scheduler(), reason="this release has no packing scheduler")
def test_the_schedulers_own_batches_are_weighted_in_both_splits_and_with_each_padding(megatron_lm):
    done = megatron_lm.launch([str(FRAMEWORKS / "packing_worker.py")], processes=4, timeout=200)
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
    worker = [str(FRAMEWORKS / "train_rl_worker.py"), str(cp)]
    done = megatron_lm.launch(worker, processes=2, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    print(done.stdout)
    for kind in ("unpacked", "packed"):
        for mode in ("sample_mean", "prompt_mean"):
            assert f"TRAIN_RL equals the loops, {kind}, {mode}" in done.stdout
