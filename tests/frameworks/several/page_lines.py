"""Start a framework as its page says: the commands and files are those of the page's text.

What a line needs besides is what a user puts in place of ``...``: paths, sizes, a model. The
process runs the framework's own entry point until it would need a GPU or a model; there
``stop()`` of the framework's file, ``NAME_page.py``, writes what was reached. That file is imported
in each process of the framework, and so is this one: neither imports what tests share at its top.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from framework_folders import INSTALLED, PATH, ROOT

PAGES = ROOT / "docs" / "integrations"


def checkout_of(framework):
    """Return the path of a framework's checkout."""
    import frameworks

    return frameworks.checkout_of(framework)


def blocks(page, language):
    """Return the blocks of a page in a language, as they stand there."""
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def words(block, *more):
    """Return the words of a command, with others in place of ``...``."""
    typed = shlex.split(block.replace("\\\n", " "), comments=True)
    at = typed.index("...") if "..." in typed else len(typed)
    return [*typed[:at], *more, *typed[at + 1 :]]


def weighing(framework):
    """Return what the table of ``docs/weigh.md`` says of a framework, each code of its row."""
    text = (PAGES.parent / "weigh.md").read_text()
    return re.findall(r"`([^`]*)`", re.search(rf"^\| {framework} \|(.*?)\|", text, re.MULTILINE)[1])


def started(command, folder, page, *, paths=(), timeout=900, **environment):
    """Run a command in a folder until ``stop()`` of a framework's file, ``NAME_page.py``.

    Returns what the stop wrote, or None, and the ended process. ``paths``: of the framework.
    """
    reached = folder / "reached.json"
    reached.unlink(missing_ok=True)
    (folder / "sitecustomize.py").write_text(f"import {page}\n{page}.stop()\n")
    found = [folder, *PATH, *paths, INSTALLED]
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


def as_installed(folder, package):
    """Let what lies in a checkout be found as an installed package, whose version is asked for."""
    written = folder / f"{package.replace('-', '_')}-9.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9\n")
