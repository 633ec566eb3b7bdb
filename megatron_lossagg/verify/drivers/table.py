"""The frameworks that have a driver: one row each, and where this machine has it.

The rows stand here and not in the drivers' files, since a driver is a class on torch, and
``lossagg verify --help`` names the frameworks, and those that are hooked, without importing torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lossagg.errors import ProofError

if TYPE_CHECKING:
    from megatron_lossagg.verify.drivers.driver import Driver


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework."""

    package: str
    imports: tuple[str, ...]
    """What its driver imports."""
    written_for: str
    """The commits and releases that the integration was tested with."""
    unused: tuple[str, ...] = ()
    """What it imports and its step never calls: placeholders stand there if it is not installed."""
    passed_by: tuple[str, ...] = ()
    """Modules of its own that load models, or of a newer Megatron-Core: placeholders, always."""
    is_hooked: bool = False
    """Whether its integration is around Megatron's schedule: verified by ``--hooked`` too."""


_SERVING = ("polars", "sglang", "sglang_router", "torch_memory_saver", "mooncake", "pylatexenc")
_ROLLOUTS = (
    *_SERVING,
    *("six", "wandb", "tensorboard", "PIL", "pandas", "pybase64", "msgspec", "zmq", "starlette"),
    *("transfer_queue", "aiohttp", "cachetools", "fastapi", "uvicorn", "openai", "datasets"),
)
_SWIFT = (
    *("aiohttp", "json_repair", "modelscope", "msgspec", "requests", "transformer_engine"),
    *("triton", "trl", "urllib3", "datasets"),
)

FRAMEWORKS: dict[str, Framework] = {
    "megatron-lm": Framework(
        package="megatron.training",
        imports=("megatron.training",),
        written_for="core_v0.16.1, core_v0.17.1, core_v0.19.0, d98e8a64",
        is_hooked=True,
    ),
    "megatron-rl": Framework(
        package="megatron.rl",
        imports=("megatron.training", "train_rl"),
        written_for="core_v0.16.1, core_v0.17.1, core_v0.19.0, d98e8a64",
        unused=("httpx", "fastapi", "uvicorn", "wandb"),
        is_hooked=True,
    ),
    "bridge": Framework(
        package="megatron.bridge",
        imports=("megatron.training", "megatron.bridge.training.train"),
        written_for="067f987d",
        unused=("transformer_engine", "modelopt", "nvidia_resiliency_ext", "datasets"),
        is_hooked=True,
    ),
    "ms-swift": Framework(
        package="swift.megatron",
        imports=("swift.megatron.trainers.trainer",),
        written_for="4.6.0",
        unused=_SWIFT,
        passed_by=("swift.rlhf_trainers.grpo_trainer",),
        is_hooked=True,
    ),
    "ms-swift-grpo": Framework(
        package="swift.megatron",
        imports=("swift.megatron.trainers.grpo_trainer",),
        written_for="4.6.0",
        unused=_SWIFT,
        passed_by=("swift.rlhf_trainers.grpo_trainer",),
        is_hooked=True,
    ),
    "llama-factory": Framework(
        package="llamafactory",
        imports=("llamafactory.train.mca.workflow", "mcore_adapter.trainer"),
        written_for="ff6d4d12",
        unused=("av", "datasets", "fire", "librosa", "torchaudio", "trl"),
    ),
    "slime": Framework(
        package="slime",
        imports=(
            "megatron.training",
            "ray",
            "slime.utils.arguments",
            "slime.backends.megatron_utils.actor",
            "slime.ray.rollout",
        ),
        written_for="624b824a",
        unused=_ROLLOUTS,
    ),
    "miles": Framework(
        package="miles",
        imports=(
            "megatron.training",
            "ray",
            "miles.utils.arguments",
            "miles.backends.megatron_utils.model",
            "miles.ray.rollout.train_data_conversion",
        ),
        written_for="31f1ca96",
        unused=_ROLLOUTS,
    ),
    "verl": Framework(
        package="verl",
        imports=("verl.workers.config", "verl.workers.engine.megatron.transformer_impl"),
        written_for="0.9.1, 1dda039b",
        unused=("ray", "hydra", "datasets", "peft"),
    ),
    "skyrl": Framework(
        package="skyrl",
        imports=(
            "skyrl.train.trainer",
            "skyrl.backends.skyrl_train.workers.megatron.megatron_worker",
        ),
        written_for="0.3.0, 0.4.0, a9564572",
        unused=(
            *("ray", "hydra", "datasets", "skyrl_gym", "aiohttp", "httpx", "requests", "urllib3"),
            *("cloudpathlib", "pybase64", "zstandard", "megatron.bridge", "nvidia_resiliency_ext"),
            *("megatron.core.models.hybrid.hybrid_model", "megatron.core.recompute"),
            "megatron.core.transformer.hyper_connection",
        ),
    ),
    "nemo-rl": Framework(
        package="nemo_rl",
        imports=(
            "transformers",
            "nemo_rl.algorithms.grpo",
            "nemo_rl.models.policy.lm_policy",
            "nemo_rl.models.policy.workers.megatron_policy_worker",
        ),
        written_for="7ea279ab",
        unused=(
            *("ray", "hydra", "datasets", "skyrl_gym", "aiohttp", "httpx", "requests", "urllib3"),
            *("nemo_automodel", "transformer_engine", "tensorstore", "decord", "zmq", "pynvml"),
            *("uvicorn", "fastapi", "mlflow", "swanlab", "wandb", "prometheus_client", "soundfile"),
            *(
                "megatron.bridge",
                "megatron.core.inference.config",
                "megatron.core.inference.shards",
            ),
            *("megatron.core.transformer.moe.moe_logging", "scipy"),
        ),
        passed_by=("nemo_rl.models.megatron.setup",),
    ),
    "areal": Framework(
        package="areal",
        imports=("areal.engine.megatron_engine", "areal.trainer.ppo.actor"),
        written_for="4aef98d8",
        unused=(
            *("ray", "hydra", "datasets", "mbridge", "megatron.bridge", "aiofiles", "aiohttp"),
            *("colorlog", "etcd3", "flask", "httpx", "lark", "numba", "openai", "pybase64"),
            *("requests", "swanlab", "tabulate", "tenacity", "tensorboardX", "trackio", "triton"),
            *("torch_memory_saver", "uvloop", "wandb"),
        ),
    ),
    "roll": Framework(
        package="roll",
        imports=("mcore_adapter.trainer", "roll.distributed.strategy.megatron_strategy"),
        written_for="8eb27cc2",
        unused=(
            *("ray", "datasets", "transfer_queue", "opentelemetry", "pybase64", "imageio"),
            *("modelscope",),
        ),
    ),
    "primus": Framework(
        package="primus",
        imports=(
            "megatron.training",
            "primus.backends.megatron.megatron_pretrain_trainer",
            "primus.backends.megatron.megatron_sft_trainer",
        ),
        written_for="fd1eeabb",
        unused=("datasets", "mlflow"),
    ),
    "open-instruct": Framework(
        package="open_instruct",
        imports=("open_instruct.grpo_fast", "open_instruct.finetune"),
        written_for="e6c3044a",
        unused=(
            *("ray", "vllm", "datasets", "olmo_core", "beaker", "wandb", "docker", "openenv"),
            *("aiohttp", "backoff", "deepspeed", "tiktoken", "langdetect", "immutabledict"),
            *("nltk", "peft", "openai", "uvicorn", "fastapi", "litellm", "mcp"),
        ),
        passed_by=(
            *("open_instruct.olmo_core_callbacks", "open_instruct.olmo_core_hybrid"),
            "open_instruct.vllm_utils",
        ),
    ),
}


def driver_of(framework: str) -> type[Driver]:
    """Return a framework's driver."""
    module = import_module(f"{__package__}.{framework.replace('-', '_')}")
    found: type[Driver] = module.FrameworkDriver
    return found


def check_installed(name: str) -> None:
    """Look for a framework without importing it; :class:`ProofError` if it is not installed.

    If the current folder is a checkout whose packages lie in ``src``, that is put on the path, of
    this process and of those that it starts.
    """
    package = FRAMEWORKS[name].package
    source = Path.cwd() / "src"
    if not _is_found(package) and source.joinpath(*package.split(".")).is_dir():
        sys.path.insert(0, str(source))
        on_path = filter(None, [str(source), os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(on_path)
        invalidate_caches()
    if not _is_found(package):
        raise ProofError(
            f"nothing to run: {package} is not installed here. Run this in the checkout of "
            f"{name}, put the folder that has the package on PYTHONPATH, or install it"
        )


def _is_found(package: str) -> bool:
    """Look for a package; ``find_spec`` of a dotted name imports what is before the dot."""
    outer, *inner = package.split(".")
    spec = find_spec(outer)
    if spec is not None and spec.origin is None:  # a namespace, such as megatron, has no code
        spec, inner = find_spec(package), []
    places = None if spec is None else spec.submodule_search_locations
    return any(Path(place, *inner).is_dir() for place in places or ())


def own_package(framework: str) -> str:
    """Return the package whose modules are all the framework's; several share ``megatron``."""
    package = FRAMEWORKS[framework].package
    return package if package.startswith("megatron.") else package.partition(".")[0]


def release(framework: str) -> str:
    """Say which releases its integration was written for."""
    written_for = FRAMEWORKS[framework].written_for
    return f"Use a release of {framework} that the integration was written for: {written_for}"
