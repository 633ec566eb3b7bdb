"""What of a training system is installed, and whether it has what its integration uses.

No module of it is imported (its parent packages are, to find it): most need a GPU. Its source
files are searched for the options, functions and fields that ``megatron_lossagg.integrations``
uses, at
the commits that each page of ``docs/integrations`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.environment import Fact

__all__ = ["FRAMEWORKS", "Framework", "framework_fact"]


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training system."""

    package: str
    uses: Mapping[str, tuple[str, ...]]
    """What its integration uses, by the file that has it, from the package's folder."""
    written_for: str
    """The commits and releases that the integration was tested with."""
    is_hooked: bool = False
    """Whether its integration is around Megatron's schedule: verified by ``--hooked``."""


_SCHEDULE = "get_forward_backward_func("

FRAMEWORKS: Mapping[str, Framework] = {
    "megatron-lm": Framework(
        package="megatron.training",
        uses={"training.py": (_SCHEDULE, "forward_step_func=", "data_iterator=")},
        written_for="core_v0.16.1, core_v0.17.1, core_v0.19.0, d98e8a64",
        is_hooked=True,
    ),
    "bridge": Framework(
        package="megatron.bridge",
        uses={"training/train.py": (_SCHEDULE,), "training/eval.py": (_SCHEDULE,)},
        written_for="067f987d",
        is_hooked=True,
    ),
    "slime": Framework(
        package="slime",
        uses={
            "utils/arguments.py": (
                "--rollout-data-postprocess-path",
                "--custom-pg-loss-reducer-function-path",
                "--custom-megatron-init-path",
                "--custom-config-path",
            ),
            "backends/megatron_utils/loss.py": ("rollout_mask_sums",),
        },
        written_for="624b824a",
    ),
    "miles": Framework(
        package="miles",
        uses={
            "utils/arguments.py": (
                "--custom-convert-samples-to-train-data-path",
                "--custom-pg-loss-reducer-function-path",
                "--custom-megatron-init-path",
                "--custom-config-path",
            ),
            "ray/rollout/train_data_conversion.py": (
                "def convert_samples_to_train_data(",
                "rollout_mask_sums",
            ),
        },
        written_for="31f1ca96",
    ),
    "verl": Framework(
        package="verl",
        uses={
            "__init__.py": ("verl.plugins",),
            "trainer/ppo/core_algos.py": ("def register_policy_loss(", "POLICY_LOSS_REGISTRY"),
            "workers/engine/base.py": ("class EngineRegistry",),
        },
        written_for="0.9.1, 1dda039b",
    ),
    "skyrl": Framework(
        package="skyrl",
        uses={
            "train/trainer.py": ("def _normalize_advantages(",),
            "train/entrypoints/main_base.py": ("override_entrypoint", "class BasePPOExp"),
        },
        written_for="0.3.0, a9564572",
    ),
    "nemo-rl": Framework(
        package="nemo_rl",
        uses={
            "algorithms/loss/interfaces.py": ("metric_normalizations", "global_valid_seqs"),
            "algorithms/loss/loss_functions.py": ("class ClippedPGLossFn",),
        },
        written_for="7ea279ab",
    ),
}


def framework_fact(name: str) -> Fact:
    """Find a framework and look for what its integration uses, without importing it.

    Raises :class:`ProofError` where the framework is not installed, or lacks something.
    """
    framework = FRAMEWORKS[name]
    folder = _folder(framework.package)
    if folder is None:
        raise ProofError(
            f"nothing to verify: {framework.package} is not installed here: install {name}, "
            f"or put its "
            "checkout on PYTHONPATH"
        )
    lacks = [
        f"{text!r} in {file}"
        for file, texts in framework.uses.items()
        for text in texts
        if text not in _text(folder / file)
    ]
    if lacks:
        raise ProofError(
            f"{name} in {folder} lacks {', '.join(lacks)}: the integration was written for "
            f"{framework.written_for} (docs/integrations); use such a release"
        )
    number = sum(map(len, framework.uses.values()))
    return Fact(
        name=name,
        state="found",
        version="has all",
        detail=f"{number} names that its integration uses, in {folder}",
    )


def _folder(package: str) -> Path | None:
    try:
        spec = find_spec(package)
    except ImportError:
        return None
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
