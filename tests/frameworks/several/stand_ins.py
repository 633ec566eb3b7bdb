"""Modules in place of what the frameworks import and their loss functions never call.

A stand-in has any attribute: ``megatron_lossagg/verify/drivers/imports.py``. Those of one framework
are what ``lossagg verify`` has placeholders for; the others are here, by what they are for.
"""

import sys

from megatron_lossagg.verify.drivers.imports import Placeholders
from megatron_lossagg.verify.drivers.table import FRAMEWORKS

RAY = ("ray",)
"""It starts workers; 240 MB."""
HYDRA = ("hydra",)
"""It reads configuration files; needs a source build of antlr4."""

DATA = ("datasets",)
"""pandas and pyarrow are this environment's."""

ENGINES = ("peft",)
"""Other engines than Megatron's import it."""

AGENT_LOOP = ("transfer_queue", "aiohttp", "cachetools", "fastapi", "uvicorn", "openai")
"""An agent loop talks to servers, and to its other workers."""

SERVERS = ("skyrl_gym", "aiohttp", "httpx", "requests", "urllib3")
"""Environments, and clients of inference servers."""

FORMATS = ("cloudpathlib", "pybase64", "zstandard")
"""Cloud paths, wire formats."""

SERVING = ("polars", "sglang", "sglang_router", "torch_memory_saver", "mooncake", "pylatexenc")
"""What serves rollouts, and reads their data."""


def of(framework, *, but=()):
    """Return what a framework imports and its step never calls, but for what is real here."""
    row = FRAMEWORKS[framework]
    return [name for name in (*row.unused, *row.passed_by) if name not in but]


def install(*groups):
    """Put stand-ins before everything else that is imported under their names."""
    sys.meta_path.insert(0, Placeholders(name for group in groups for name in group))


def older_transformers():
    """Tell of an older release of transformers, to a patch of a tokenizer that asserts it."""
    import transformers

    transformers.AutoProcessor  # noqa: B018  which loads transformers anew
    sys.modules["transformers"].__version__ = "5.11.0"
