"""What the tests of frameworks share: the frameworks' own code if present, and a reference."""

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import launched, new_folder
from framework_folders import INSTALLED, ROOT

FRAMEWORKS_DIR = os.environ.get("FRAMEWORKS_DIR")
PATCHES = ROOT / "docs" / "integrations" / "patches"
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""DP and CP."""


def checkout_of(framework):
    """Return the path of a framework's checkout; it may not exist."""
    return Path(FRAMEWORKS_DIR or os.devnull, framework)


def needs(framework, *modules, installed=False):
    """Skip a test where :func:`lacks` finds something missing."""
    reason = lacks(framework, *modules, installed=installed)
    return pytest.mark.skipif(bool(reason), reason=reason)


def lacks(framework, *modules, installed=False):
    """Say what is missing; empty if nothing is.

    ``framework``: a folder of ``FRAMEWORKS_DIR``. ``modules``: what this Python imports for it.
    ``installed``: it imports what ``make test-frameworks`` installs, too.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not FRAMEWORKS_DIR:
        return "FRAMEWORKS_DIR is not set: run tools/fetch_frameworks.sh"
    if not checkout_of(framework).is_dir():
        return f"FRAMEWORKS_DIR has no {framework}: run tools/fetch_frameworks.sh"
    if missing:
        return f"not installed: {', '.join(missing)}"
    if installed and not INSTALLED.is_dir():
        return "what the frameworks import is not installed: run make test-frameworks"
    return ""


def copy_of(framework, package, folder, *, patch=None):
    """Copy a package of a framework to a folder, patched if wanted; returns the folder."""
    shutil.copytree(checkout_of(framework) / package, folder / package)
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
def reference(dtype, stages=1):
    """Compute losses and gradients of the step, of a model for ``stages``; returns the file."""
    file = new_folder() / "reference.pt"
    launched("frameworks/several/framework_step.py", dtype, file, stages, processes=1)
    return file


def assert_live(framework, *, cases, refused=0):
    """Each case is the reference at two numbers of microbatches; all refuse together so often."""
    arguments = (reference("float64"), framework)
    out = launched("frameworks/several/framework_worker.py", *arguments, processes=4)
    assert out.count(": the reference") == 2 * cases
    assert out.count("refused together") == refused
