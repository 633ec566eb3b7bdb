"""What the tests of frameworks share: the frameworks' own code if present, and a reference."""

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import launched, new_folder

FRAMEWORKS_DIR = os.environ.get("FRAMEWORKS_DIR")
PATCHES = Path(__file__).parents[2] / "docs" / "integrations" / "patches"
INSTALLED = Path(__file__).parents[2] / ".venv-frameworks"
"""What the frameworks import, by ``make test-frameworks``."""
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""DP and CP."""


def needs(framework):
    """Skip a test where the checkout of a framework is missing, or what it imports."""
    reasons = [] if FRAMEWORKS_DIR else ["FRAMEWORKS_DIR is not set"]
    if FRAMEWORKS_DIR and not Path(FRAMEWORKS_DIR, framework).is_dir():
        reasons.append(f"FRAMEWORKS_DIR has no {framework}")
    modules = ("ray", "transformers", "httpx", "psutil", "wandb", "six", "regex", "pydantic")
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not reasons and missing:
        reasons.append(f"not installed: {', '.join(missing)}")
    reason = (
        f"{'; '.join(reasons)}: run tools/fetch_frameworks.sh; docs/integrations/{framework}.md"
    )
    return pytest.mark.skipif(bool(reasons), reason=reason)


def needs_checkout(framework):
    """Skip a test where the checkout of a framework is missing, or what ``make test-frameworks``
    installs.
    """
    reason = None
    if not FRAMEWORKS_DIR:
        reason = "FRAMEWORKS_DIR is not set: run tools/fetch_frameworks.sh"
    elif not Path(FRAMEWORKS_DIR, framework).is_dir():
        reason = f"FRAMEWORKS_DIR has no {framework}: run tools/fetch_frameworks.sh"
    elif not INSTALLED.is_dir():
        reason = "what the frameworks import is not installed: run make test-frameworks"
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def copy_of(framework, package, folder, *, patch=None):
    """Copy a package of a framework to a folder, patched if wanted; returns the folder."""
    shutil.copytree(Path(FRAMEWORKS_DIR or "", framework, package), folder / package)
    if patch is not None:
        # As if outside of any repository, which git would take the paths to be relative to.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        command = ["git", "apply", str(PATCHES / patch)]
        subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder


def in_float64(files):
    """Let a copied framework compute in float64 what it computes in float32."""
    for file in files:
        text = file.read_text()
        changed = text.replace(".float32", ".float64").replace(".float()", ".double()")
        assert changed != text
        file.write_text(changed)


@functools.cache
def reference(dtype):
    """Compute the reference's losses and gradients of the step; returns the file of them."""
    file = new_folder() / "reference.pt"
    launched("integrations/framework_step.py", dtype, file, processes=1)
    return file
