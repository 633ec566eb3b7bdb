"""An unmodified Megatron-LM checkout under ``lossagg run``: its real loop, data and optimizer.

``FRAMEWORKS_DIR=... pytest tests/integrations/test_megatron_lm.py``, with the checkout in
``$FRAMEWORKS_DIR/Megatron-LM`` (``tools/fetch_frameworks.sh``) and the packages in ``NEEDS``;
without, these tests skip. With ``-s`` it prints the first step of every run; ``DATA_SEED=7``
draws other conversations. What the hook does without a checkout is in ``test_schedule.py``.
"""

import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import worker_path
from fork_server import ForkServer

FRAMEWORKS = Path(__file__).parent
WORKER = FRAMEWORKS / "megatron_lm_worker.py"
CHECKOUT = Path(os.environ.get("FRAMEWORKS_DIR", "")) / "Megatron-LM"
NEEDS = ("six", "regex", "yaml", "pydantic", "pybind11", "transformers", "datasets", "tokenizers")
MISSING = [name for name in NEEDS if find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif("FRAMEWORKS_DIR" not in os.environ, reason="FRAMEWORKS_DIR is not set"),
    pytest.mark.skipif(
        "FRAMEWORKS_DIR" in os.environ and not (CHECKOUT / "pretrain_gpt.py").exists(),
        reason=f"no Megatron-LM checkout in {CHECKOUT}",
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

COMMON = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --lr-decay-style constant --split 90,5,5 --eval-iters 1 --eval-interval 3 "
    "--log-interval 1 --transformer-impl local --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--untie-embeddings-and-output-weights"
)
# Padded to 256 at every TP: the padding is a part of the model.
MOCK = shlex.split("--tokenizer-type NullTokenizer --vocab-size 250 --mock-data --eod-mask-loss")
SFT = shlex.split(
    "--sft --no-create-attention-mask-in-dataloader --tokenizer-type SFTTokenizer "
    "--sft-tokenizer-prompt-format nemotron-h-aligned"
)
# As Llama's, Qwen's and Nemotron's models.
ROPE = shlex.split(
    "--position-embedding-type rope --no-rope-fusion --swiglu --normalization RMSNorm "
    "--group-query-attention --num-query-groups 2 --disable-bias-linear"
)
UNTIL_0_16 = ["--legacy-tokenizer"]
SAMPLE_MEAN = ["--loss-aggregation", "sample_mean"]
PER_TOKEN = ["--calculate-per-token-loss"]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LAYOUTS = {
    ("sft", "DP2"): (2, []),
    ("sft", "CP2"): (2, ["--context-parallel-size", "2"]),
    ("sft", "PP2"): (2, ["--pipeline-model-parallel-size", "2"]),
    ("sft", "DP2xCP2"): (4, ["--context-parallel-size", "2", *OVERLAP]),
    ("rope", "DP2"): (2, []),
    ("rope", "CP2"): (2, ["--context-parallel-size", "2"]),
    ("mock", "DP2"): (2, []),
    ("mock", "CP2"): (2, ["--context-parallel-size", "2"]),
    ("mock", "TP2"): (2, ["--tensor-model-parallel-size", "2"]),
    ("mock", "TP2-SP"): (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    ("mock", "PP2"): (2, ["--pipeline-model-parallel-size", "2"]),
    ("mock", "PP2xVPP2"): (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    ("mock", "DP2xCP2"): (4, ["--context-parallel-size", "2", *OVERLAP]),
}


@pytest.fixture(scope="module")
def megatron_lm(launches, tmp_path_factory):
    """Return a function that runs a script of the checkout and returns what its worker wrote."""
    folder = tmp_path_factory.mktemp("megatron_lm")
    schedule_worker = FRAMEWORKS.parent / "megatron"
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
    data = {"mock": MOCK, "sft": sft, "rope": [*sft, *ROPE]}
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
    return {kind: megatron_lm(kind, *SAMPLE_MEAN, before=["--wanted"]) for kind in kinds}


@pytest.fixture(scope="module")
def stock(megatron_lm):
    """Return the stock script's runs on packed conversations, without a flag of ours."""
    layouts = {name: LAYOUTS["sft", name] for name in ("DP2", "CP2")}
    return {name: megatron_lm("sft", *more, processes=n) for name, (n, more) in layouts.items()}


def steps(events):
    return [event for event in events if "step" in event]


def numbers(events, name="lm loss"):
    """Return loss and grad norm of each step, and the loss of each evaluation."""
    return [
        value
        for event in events
        for value in (
            [event["step"][name], event["grad_norm"]]
            if "step" in event
            else [event["evaluate"][name]]
            if "evaluate" in event
            else []
        )
    ]


@pytest.mark.parametrize("kind", ["sft", "rope", "mock"])
def test_on_one_process_loss_and_gradient_are_the_references_of_each_conversation(alone, kind):
    wanted = [event for event in alone[kind] if "wanted" in event]
    assert len(wanted) == 3
    for want, event in zip(wanted, steps(alone[kind]), strict=True):
        assert event["step"]["lm loss"] == pytest.approx(want["wanted"], rel=1e-6)
        assert event["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-6)
    if kind != "mock":
        assert {want["sequences"] for want in wanted} != {4}, "every entry held one conversation"


@pytest.mark.parametrize("loss_scaling", ["average", "per_token"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_every_layout_and_loss_scaling_trains_and_evaluates_the_same_loss(
    megatron_lm, alone, kind, layout, loss_scaling
):
    processes, more = LAYOUTS[kind, layout]
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


def test_a_run_that_was_killed_resumes_with_the_same_losses(megatron_lm, tmp_path):
    keep = ["--save-interval", "1", "--ckpt-format", "torch", *SAMPLE_MEAN]
    whole = megatron_lm("mock", *keep, "--save", str(tmp_path / "whole"), processes=2)
    kept = ["--save", str(tmp_path / "killed"), "--load", str(tmp_path / "killed")]
    text = megatron_lm("mock", *keep, *kept, processes=2, env={"KILL_AFTER": "2"}, fails=True)
    assert "Signal 9" in text
    resumed = megatron_lm("mock", *keep, *kept, processes=2)
    assert steps(resumed) == steps(whole)[2:]


def test_a_finished_run_that_is_resumed_has_status_0_and_says_so(megatron_lm, tmp_path):
    kept = ["--save", str(tmp_path), "--load", str(tmp_path), "--ckpt-format", "torch"]
    options = ["--save-interval", "3", "--eval-iters", "0", *kept, *SAMPLE_MEAN]
    assert len(steps(megatron_lm("mock", *options))) == 3
    assert steps(megatron_lm("mock", *options)) == []
    assert "pretrain_gpt.py had no step left to do, so nothing was trained" in megatron_lm.errors


def test_an_error_of_the_data_set_keeps_its_traceback(megatron_lm):
    # 0.16.1 collates packs of one number of conversations alone.
    text = megatron_lm("sft", *SAMPLE_MEAN, "--micro-batch-size", "2", fails=True)
    if "the data iterator raised" not in text:
        pytest.skip("another release collates them")
    assert re.search(r'File ".*collate.py", line \d+, in default_collate', text)
    assert "lossagg: rank 0 of the data-parallel group: the data iterator raised Runt" in text


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
    assert "no step reached" not in text  # one error, not two


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
    processes, more = LAYOUTS[kind, layout]
    text = megatron_lm(kind, *more, processes=processes, env={"WITHOUT": name}, fails=True)
    if f"KeyError: '{name}'" in text:
        pytest.skip("another release has this name")


RL_NEEDS = [name for name in ("httpx", "fastapi", "uvicorn", "wandb") if find_spec(name) is None]


@pytest.mark.skipif(bool(RL_NEEDS), reason=f"train_rl.py imports {', '.join(RL_NEEDS)}")
def test_train_rls_own_rollout_data_and_loss_train_the_mean_over_rollouts_or_prompts(megatron_lm):
    done = megatron_lm.launch([str(FRAMEWORKS / "train_rl_worker.py")], processes=2, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    print(done.stdout)
    for kind in ("unpacked", "packed"):
        for mode in ("sample_mean", "prompt_mean"):
            assert f"TRAIN_RL equals the loops, {kind}, {mode}" in done.stdout
