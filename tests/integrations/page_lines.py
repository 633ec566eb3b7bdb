"""Start a framework as its page says: the commands and files are those of the page's text.

What a line needs besides is what a user puts in place of ``...``: paths, sizes, a model. The
process runs the framework's own entry point until it would need a GPU or a model; there
``page_stops.py`` writes what was reached.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import INSTALLED, checkout_of

HERE = Path(__file__).resolve().parent
PAGES = HERE.parents[1] / "docs" / "integrations"


def blocks(page, language):
    """Return the blocks of a page in a language, as they stand there."""
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def words(block, *more):
    """Return the words of a command, with others in place of ``...``."""
    typed = shlex.split(block.replace("\\\n", " "), comments=True)
    at = typed.index("...") if "..." in typed else len(typed)
    return [*typed[:at], *more, *typed[at + 1 :]]


def started(command, folder, stop, *, paths=(), timeout=900, **environment):
    """Run a command in a folder until a stop of ``page_stops.py``.

    Returns what the stop wrote, or None, and the ended process. ``paths``: of the framework.
    """
    reached = folder / "reached.json"
    reached.unlink(missing_ok=True)
    (folder / "sitecustomize.py").write_text(f"import page_stops\npage_stops.{stop}()\n")
    found = [folder, HERE.parents[1], HERE, HERE.parent / "support", *paths, INSTALLED]
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "PATH": os.pathsep.join(
                map(str, (Path(sys.executable).parent, INSTALLED / "bin", os.environ["PATH"]))
            ),
            "PYTHONPATH": os.pathsep.join(map(str, found)),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_raylet_start_wait_time_s": "300",  # on a machine with little left
            "REACHED": str(reached),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return (json.loads(reached.read_text()) if reached.exists() else None), done


def tiny_model(folder):
    """Write what a user has of a model without its weights: configuration and tokenizer."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    vocabulary = {word: n for n, word in enumerate([*marks.values(), "a", "b"])}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "torch_dtype": "bfloat16",
        "vocab_size": len(vocabulary),
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    said = {**marks, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    for name, text in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", said)):
        (model / f"{name}.json").write_text(json.dumps(text))
    return model


def check_skyrl(folder, path):
    """Start SkyRL; its trainer in Ray trains the page's ``prompt_mean``: 1 / (P n_p) by loops."""
    given = ["trainer.strategy=megatron", "trainer.logger=console", "trainer.eval_interval=-1"]
    command = words(blocks("skyrl", "sh")[0], *given, "trainer.placement.colocate_all=false")
    found, done = started(command, folder, "skyrl", paths=[path])
    assert found is not None, done.stderr[-4000:]
    line = re.search(r"It is on\*\* if step 1 prints `([^.`]*)", (PAGES / "skyrl.md").read_text())
    assert line[1] in done.stdout + done.stderr
    tokens = {prompt: 0 for prompt, _ in found["sequences"]}
    for prompt, n in found["sequences"]:
        tokens[prompt] += n
    for (prompt, n), weight in zip(found["sequences"], found["weights"], strict=True):
        assert weight == pytest.approx(1 / len(tokens) / tokens[prompt] if n else 0, rel=1e-6)


VERL = (
    "trainer.n_gpus_per_node=2",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
)


def verl(folder):
    """Start verl; return the engine of its workers and the aggregation."""
    model = tiny_model(folder)
    paths = [f"{part}.model.path={model}" for part in ("actor_rollout_ref", "critic")]
    found, done = started(words(blocks("verl", "sh")[0], *VERL, *paths), folder, "verl")
    assert found is not None, done.stderr[-4000:]
    return found


SWIFT = {
    "sft": ("ms_swift", []),
    "grpo": ("ms_swift_grpo", ["--use_vllm", "true", "--vllm_mode", "colocate"]),
    "gkd": ("ms_swift_gkd", ["--teacher_model", "model", "--teacher_model_type", "qwen2"]),
}
"""Our module of what ms-swift trains, and what that needs."""


def ms_swift(folder, trained, *, paths=()):
    """Start ms-swift; return what was reached, or None, and the ended process."""
    module, more = SWIFT[trained]
    (plugin,) = re.findall(r"^# (\w+\.py)$", text := blocks("ms-swift", "python")[0], re.MULTILINE)
    assert re.search(rf"\b{module}\b", text)
    (folder / plugin).write_text(re.sub(r"\bms_swift\b", module, text))
    sft, rlhf = blocks("ms-swift", "sh")[0].splitlines()
    line = sft if trained == "sft" else rlhf.replace(" grpo ", f" {trained} ")
    given = ["--model", tiny_model(folder), "--model_type", "qwen2", "--template", "default"]
    given += ["--dataset", "conversations.jsonl", "--ddp_backend", "gloo", *more]
    typed = words(line, *map(str, given))
    return started(typed, folder, "ms_swift", paths=paths, NPROC_PER_NODE="1")


def rollouts(folder, framework):
    """Start slime or miles from its checkout; return what was reached, and the ended process."""
    text = (PAGES / f"{framework}.md").read_text()
    option, file = re.search(r"`(--custom-config-path) (\S+\.yaml)`", text).groups()
    (folder / file).write_text(blocks(framework, "yaml")[0])
    checkout = checkout_of(framework)
    given = ["--debug-train-only", "--num-layers", "2", "--hidden-size", "32"]
    given += ["--num-attention-heads", "4", "--max-position-embeddings", "64", "--seq-length", "64"]
    given += ["--micro-batch-size", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
    given += ["--num-rollout", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    command = ["python", str(checkout / "train.py"), option, file, *given]
    paths = [checkout, checkout_of("Megatron-LM")]
    return started(command, folder, framework, paths=paths)


def of_bridge():
    """Return the paths of Megatron-Bridge, with the Megatron-LM that it pins."""
    return [checkout_of(f"Megatron-Bridge/{path}") for path in ("src", "3rdparty/Megatron-LM")]


def bridge(folder):
    """Start Megatron-Bridge; return what was reached, or None, and the ended process."""
    before = """
from bridge_worker import configuration
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

config = configuration(1, per_token=False, evaluation_cp=1)
config.checkpoint.pretrained_checkpoint = "."
"""
    (folder / "train.py").write_text(before + blocks("bridge", "python")[0])
    return started(["python", "train.py"], folder, "bridge", paths=of_bridge())


def as_installed(folder, package):
    """Let what lies in a checkout be found as an installed package, whose version is asked for."""
    written = folder / f"{package.replace('-', '_')}-9.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9\n")


LLAMA_FACTORY = {"bridge": "megatron-bridge", "mcore_adapter": "mcore-adapter"}
"""The packages of its two Megatron backends."""


def llama_factory(folder, backend):
    """Start LLaMA-Factory; return what was reached, or None, and the ended process."""
    as_installed(folder, LLAMA_FACTORY[backend])
    text, (line,) = blocks("llama-factory", "python")[0], blocks("llama-factory", "sh")
    paths = [checkout_of("LLaMA-Factory/src")]
    if backend == "bridge":
        paths += of_bridge()
    else:
        (switch,) = re.findall(r"# for (\w+=1): mcore_adapter$", text, re.MULTILINE)
        line = line.replace("USE_MEGATRON_BRIDGE=1", switch)
        text = re.sub(r"\bbridge\b", backend, text)
        paths += [checkout_of("ROLL/mcore_adapter/src")]
    (folder / "train.py").write_text(text)
    given = {
        "model_name_or_path": str(tiny_model(folder)),
        "stage": "sft",
        "do_train": True,
        "dataset": "conversations",
        "template": "default",
        "output_dir": str(folder / "out"),
    }
    (folder / "your.yaml").write_text(json.dumps(given))
    command = words(line.replace("--nproc_per_node 8", "--nproc_per_node 1"))
    # Its tests for versions refuse the transformers that is here.
    more = {"DISABLE_VERSION_CHECK": "1"}
    return started(["env", *command], folder, "llama_factory", paths=paths, **more)


def primus(folder):
    """Start what Primus's launcher starts, whose hooks install packages before.

    Returns what was reached, or None, and the ended process.
    """
    (folder / "train.py").write_text(blocks("primus", "python")[0])
    module = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": "llama2_7B.yaml",
        "overrides": {"mock_data": True},
    }
    given = {"work_group": "one", "user_name": "one", "exp_name": "one", "workspace": str(folder)}
    (folder / "your.yaml").write_text(json.dumps({**given, "modules": {"pre_trainer": module}}))
    megatron = checkout_of("Megatron-LM")
    command = ["torchrun", "train.py", "train", "pretrain", "--config", "your.yaml"]
    paths = [checkout_of("Primus"), megatron]
    return started(command, folder, "primus", paths=paths, BACKEND_PATH=str(megatron))


def areal(folder):
    """Start AReaL with its own file of arguments; return what was reached, and the process."""
    before = """
import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, SchedulingSpec, load_expr_config

config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
# omegaconf 2.4.0.dev2, which AReaL pins, makes them of a file's dicts.
config.actor.scheduling_spec = [SchedulingSpec(**one) for one in config.actor.scheduling_spec]
train_dataset = valid_dataset = [{"messages": []}] * 8
"""
    (folder / "train.py").write_text(before + blocks("areal", "python")[0])
    checkout, model = checkout_of("AReaL"), tiny_model(folder)
    file = checkout / "examples" / "math" / "gsm8k_grpo_megatron.yaml"
    command = ["python", "train.py", "--config", str(file), "scheduler.type=local"]
    command += [f"actor.path={model}", f"cluster.fileroot={folder}"]
    command += [f"cluster.name_resolve.nfs_record_root={folder}"]
    return started(command, folder, "areal", paths=[checkout])


def nemo_rl(folder):
    """Start NeMo-RL's GRPO script with the page's lines where the page says they go.

    Returns what was reached, or None, and the ended process.
    """
    checkout, model = checkout_of("NeMo-RL"), tiny_model(folder)
    script = (checkout / "examples" / "run_grpo.py").read_text()
    after_setup = '    rl_init_timer.record("total"'
    assert script.count(after_setup) == 1
    lines = "".join(f"    {line}\n" for line in blocks("nemo-rl", "python")[0].splitlines())
    (folder / "train.py").write_text(script.replace(after_setup, lines + after_setup))
    file = checkout / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
    command = ["python", "train.py", "--config", str(file), f"policy.model_name={model}"]
    command += [f"logger.log_dir={folder}", "checkpointing.enabled=false"]
    return started(command, folder, "nemo_rl", paths=[checkout])
