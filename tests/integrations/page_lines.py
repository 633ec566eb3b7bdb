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
    "rlhf": (
        "ms_swift_grpo",
        ["--rlhf_type", "grpo", "--use_vllm", "true", "--vllm_mode", "colocate"],
    ),
}


def ms_swift(folder, command, *, paths=()):
    """Start ms-swift; return what was reached, or None, and the ended process."""
    module, more = SWIFT[command]
    (plugin,) = re.findall(r"^# (\w+\.py)$", text := blocks("ms-swift", "python")[0], re.MULTILINE)
    (folder / plugin).write_text(re.sub(r"\bms_swift\b", module, text))
    (line,) = [one for one in blocks("ms-swift", "sh")[0].splitlines() if f" {command} " in one]
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
