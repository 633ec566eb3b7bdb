"""A framework's own functions, on a drawn step, against the reference: ``verify --framework``.

One file per framework, named as it is, lists checks; ``drawn_step.py`` has the step, ``check.py``
compares. They run in a process of their own (``run_checks.py``): importing a framework may be slow,
may fail, and may end the process. The tests call the same checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from megatron_lossagg.errors import ProofError

__all__ = ["FRAMEWORKS", "Framework", "check_installed"]


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework."""

    package: str
    written_for: str
    """The commits and releases that the integration was tested with."""
    is_hooked: bool = False
    """Whether its integration is around Megatron's schedule: verified by ``--hooked`` too."""


FRAMEWORKS: Mapping[str, Framework] = {
    "megatron-lm": Framework(
        package="megatron.training",
        written_for="core_v0.16.1, core_v0.17.1, core_v0.19.0, d98e8a64",
        is_hooked=True,
    ),
    "bridge": Framework(package="megatron.bridge", written_for="067f987d", is_hooked=True),
    "slime": Framework(package="slime", written_for="624b824a"),
    "miles": Framework(package="miles", written_for="31f1ca96"),
    "verl": Framework(package="verl", written_for="0.9.1, 1dda039b"),
    "skyrl": Framework(package="skyrl", written_for="0.3.0, 0.4.0, a9564572"),
    "nemo-rl": Framework(package="nemo_rl", written_for="7ea279ab"),
    "ms-swift": Framework(package="swift.megatron", written_for="4.6.0", is_hooked=True),
}


def check_installed(name: str) -> None:
    """Look for a framework without importing it; :class:`ProofError` if it is not installed."""
    package = FRAMEWORKS[name].package
    with suppress(ImportError):
        if (spec := find_spec(package)) is not None and spec.submodule_search_locations:
            return
    raise ProofError(
        f"nothing to verify: {package} is not installed here. Install {name}, or put its "
        "checkout on PYTHONPATH"
    )
