"""Runs of an unmodified Megatron-LM checkout's scripts under ``lossagg run``.

The checkout is ``$FRAMEWORKS_DIR/Megatron-LM`` (``tools/fetch_frameworks.sh``); its tests also need
what :data:`NEEDED` names. With ``-s`` they print the first step of every run; ``DATA_SEED=7`` draws
other conversations.
"""

import json
import os
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path

from conftest import TESTS, worker_path
from fork_server import ForkServer
from frameworks import checkout_of, needs
from laws import Run

HERE = Path(__file__).parent
WORKER = HERE / "megatron_lm_worker.py"
CHECKOUT = checkout_of("Megatron-LM")
NEEDED = ("six", "regex", "yaml", "pydantic", "pybind11", "transformers", "datasets", "tokenizers")
NEEDS = needs("Megatron-LM", *NEEDED)
# A small model on a CPU; the data is missing.
COMMON = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 3 --lr 1e-3 --lr-decay-style constant --split 90,5,5 --eval-iters 1 "
    "--eval-interval 3 --log-interval 1 --transformer-impl local --distributed-backend gloo "
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
FSDP = shlex.split(
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer "
    "--data-parallel-sharding-strategy"
)
INSTANCES = ["--num-distributed-optimizer-instances", "2"]
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
FSDP_SIZES = {
    "FSDP-DP2": (2, [*FSDP, "optim_grads_params"]),
    "FSDP-CP2": (2, [*CP2, *FSDP, "optim"]),
    "FSDP-DP2xCP2": (4, [*CP2, *FSDP, "optim_grads"]),
    # Only under a no_sync_func, which the script itself sets.
    "FSDP-instances": (4, [*FSDP, "optim_grads", "--overlap-grad-reduce", *INSTANCES]),
}
"""Of runs on Megatron-FSDP."""


def options_of_data(server, folder, environment, checkout):
    """Draw conversations into a folder; returns the script's options for each kind of data."""
    made = server.launch(
        [str(HERE / "make_sft_data.py"), str(folder), os.environ.get("DATA_SEED", "5")],
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
    options = (checkout / "megatron" / "training" / "arguments.py").read_text()
    older = [option for option in UNTIL_0_16 if option in options]
    sft = [*SFT, *older, *paths]
    varlen = [*VARLEN, *older, *paths]
    return {"mock": MOCK, "sft": sft, "rope": [*sft, *ROPE], "varlen": varlen}


@contextmanager
def runs_of(folder, checkout=CHECKOUT):
    """Return a function that runs a script of the checkout and returns what its worker wrote."""
    path = os.pathsep.join([*map(str, (checkout, TESTS / "loop")), worker_path()])
    server = ForkServer(["imports_megatron_lm"], path=path)
    release = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    environment = {
        "HF_HOME": str(folder / "hf"),
        # The checkout pins a Python of its own for pyenv; make builds its helpers for this one.
        "PYENV_VERSION": release,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    data = options_of_data(server, folder, environment, checkout)
    counter = iter(range(1000))

    def run(kind, *more, processes=1, before=(), env=None, script="pretrain_gpt.py", fails=False):
        file = folder / f"{next(counter)}.jsonl"
        command = [str(WORKER), str(file), *before, str(checkout / script)]
        # What `lossagg run --cpu` sets, before the fork server has set it for other engines.
        connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"} if FSDP[0] in more else {}
        done = server.launch(
            [*command, *COMMON, *data[kind], *more],
            processes=processes,
            timeout=300,
            env={**environment, **connections, **(env or {})},
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


def steps(events):
    return [event for event in events if "step" in event]


def run_of(events):
    """Return what was logged of a run, and the reference's steps if it has them."""
    trained = [event["step"] for event in steps(events)]
    evaluated = [event["evaluate"] for event in events if "evaluate" in event]
    wanted = [event for event in events if "wanted" in event]
    return Run(
        losses=[logged["lm loss"] for logged in (*trained, *evaluated)],
        gradients=[event["grad_norm"] for event in steps(events)],
        by_hand=[(event["wanted"], event["grad_norm"]) for event in wanted],
    )
