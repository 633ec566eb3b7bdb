"""A framework's own functions, on a drawn step, against the reference: ``verify --framework``.

One file per framework, named as it is, lists checks; ``drawn_step.py`` has the step, ``check.py``
compares. They run in a process of their own (``run_checks.py``): importing a framework may be slow,
may fail, and may end the process. The tests call the same checks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from megatron_lossagg.errors import ProofError

__all__ = ["FRAMEWORKS", "Framework", "check_installed"]


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework."""

    package: str
    imports: tuple[str, ...]
    """What its checks import."""
    written_for: str
    """The commits and releases that the integration was tested with."""
    is_hooked: bool = False
    """Whether its integration is around Megatron's schedule: verified by ``--hooked`` too."""
    needs_transformer_engine: bool = False
    """Whether it imports Transformer Engine, which a machine without CUDA cannot."""


FRAMEWORKS: dict[str, Framework] = {
    "megatron-lm": Framework(
        package="megatron.training",
        imports=("megatron.training",),
        written_for="core_v0.16.1, core_v0.17.1, core_v0.19.0, d98e8a64",
        is_hooked=True,
    ),
    "bridge": Framework(
        package="megatron.bridge",
        imports=("megatron.bridge.training.train", "megatron.bridge.training.eval"),
        written_for="067f987d",
        is_hooked=True,
        needs_transformer_engine=True,
    ),
    "slime": Framework(
        package="slime",
        imports=(
            "megatron.training",
            "slime.utils.arguments",
            "slime.backends.megatron_utils.loss",
        ),
        written_for="624b824a",
    ),
    "miles": Framework(
        package="miles",
        imports=(
            "megatron.training",
            "miles.utils.arguments",
            "miles.backends.training_utils.loss",
            "miles.ray.rollout.train_data_conversion",
        ),
        written_for="31f1ca96",
    ),
    "verl": Framework(
        package="verl",
        imports=("verl.workers.config", "verl.trainer.ppo.core_algos"),
        written_for="0.9.1, 1dda039b",
    ),
    "skyrl": Framework(
        package="skyrl",
        imports=(
            "skyrl.backends.skyrl_train.utils.ppo_utils",
            "skyrl.train.trainer",
            "skyrl.train.sft_trainer",
        ),
        written_for="0.3.0, 0.4.0, a9564572",
    ),
    "nemo-rl": Framework(
        package="nemo_rl",
        imports=("nemo_rl.algorithms.loss.loss_functions",),
        written_for="7ea279ab",
    ),
    "ms-swift": Framework(
        package="swift.megatron",
        imports=("swift.megatron.trainers.trainer", "swift.megatron.trainers.grpo_trainer"),
        written_for="4.6.0",
        is_hooked=True,
        needs_transformer_engine=True,
    ),
    "areal": Framework(
        package="areal",
        imports=("areal.engine.megatron_engine", "areal.trainer.ppo.actor"),
        written_for="4aef98d8",
    ),
    "llama-factory": Framework(
        package="llamafactory",
        imports=("llamafactory.train.mca.workflow", "mcore_adapter.trainer"),
        written_for="ff6d4d12",
    ),
}


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
            f"nothing to verify: {package} is not installed here. Run this in the checkout of "
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
