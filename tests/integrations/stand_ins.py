"""Modules in place of what the frameworks import and their loss functions never call.

A stand-in has any attribute: ``megatron_lossagg/verify/drivers/imports.py``. Each name says
which framework imports it, and what installing it would cost.
"""

import sys

from megatron_lossagg.verify.drivers.imports import Placeholders

RAY = ("ray",)
"""verl and skyrl start workers with it; 240 MB."""
HYDRA = ("hydra",)
"""verl reads its configuration files with it; needs a source build of antlr4."""

DATA = ("datasets",)
"""verl, skyrl and trl read data sets with it. pandas and pyarrow are this environment's."""

ENGINES = ("peft",)
"""verl's other engines import it beside its Megatron engine."""

AGENT_LOOP = ("transfer_queue", "aiohttp", "cachetools", "fastapi", "uvicorn", "openai")
"""verl's agent loop talks to servers, and to its other workers through TransferQueue and ray."""

SERVERS = ("skyrl_gym", "aiohttp", "httpx", "requests", "urllib3")
"""Environments, and clients of inference servers."""

SKYRL = ("cloudpathlib", "pybase64", "zstandard")
"""skyrl 0.4.0 imports them with its trainer: cloud paths, wire formats."""

MEGATRON_LM = ("six",)
"""A tokenizer of Megatron-LM's."""

BRIDGE = ("transformer_engine", "modelopt", "nvidia_resiliency_ext")
"""Megatron-Bridge's kernels for models that are not built here, distillation, restarts."""

SKYRL_WORKER = (
    *SKYRL,
    "megatron.bridge",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.recompute",
    "megatron.core.transformer.hyper_connection",
    "nvidia_resiliency_ext",
)
"""SkyRL's Megatron worker loads models with Bridge, some of a newer Megatron-Core."""

NEMO = (
    "nemo_automodel",
    "transformer_engine",
    "tensorstore",
    "decord",
    "zmq",
    "pynvml",
    "uvicorn",
    "fastapi",
    "mlflow",
    "swanlab",
    "wandb",
    "prometheus_client",
    "soundfile",
)
"""NeMo-RL's other backends and media."""

NEMO_WORKER = (
    "megatron.bridge",
    "megatron.core.inference.config",
    "megatron.core.inference.shards",
    "megatron.core.transformer.moe.moe_logging",
    "nemo_rl.models.megatron.setup",
    "scipy",
)
"""NeMo-RL's Megatron worker builds models with Bridge, and needs a newer Megatron-Core."""


SWIFT = (
    "aiohttp",
    "json_repair",
    "modelscope",
    "msgspec",
    "requests",
    "swift.rlhf_trainers.grpo_trainer",
    "transformer_engine",
    "triton",
    "trl",
    "urllib3",
)
"""ms-swift's hub, servers and kernels, and its trainers outside of Megatron."""

LLAMA_FACTORY = ("av", "datasets", "fire", "librosa", "peft", "torchaudio", "trl")
"""LLaMA-Factory's data and media, and its trainers outside of Megatron."""

SERVING = ("polars", "sglang", "sglang_router", "torch_memory_saver", "mooncake", "pylatexenc")
"""What serves rollouts of slime and miles, and reads their data."""

ROLLOUTS = (
    *("six", "wandb", "tensorboard", "PIL", "pandas", "pybase64", "msgspec", "zmq", "starlette"),
    *AGENT_LOOP,
)
"""What the whole of slime and miles imports besides."""

AREAL = (
    "mbridge",
    "megatron.bridge",
    "aiofiles",
    "aiohttp",
    "colorlog",
    "etcd3",
    "flask",
    "httpx",
    "lark",
    "numba",
    "openai",
    "pybase64",
    "requests",
    "swanlab",
    "tabulate",
    "tenacity",
    "tensorboardX",
    "torch_memory_saver",
    "trackio",
    "triton",
    "uvloop",
    "wandb",
)
"""AReaL's model loading, servers and clients, kernels of fp8, and compilers of its packing."""


def install(*groups):
    """Put stand-ins before everything else that is imported under their names."""
    sys.meta_path.insert(0, Placeholders(name for group in groups for name in group))


def older_transformers():
    """Tell NeMo-RL, whose patch of a tokenizer asserts it, of an older release."""
    import transformers

    transformers.AutoProcessor  # noqa: B018  which loads transformers anew
    sys.modules["transformers"].__version__ = "5.11.0"
