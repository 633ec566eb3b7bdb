"""``make release VERSION=0.1.0``: write, build, try, commit and tag a release; nothing is pushed.

1. The checkout has no uncommitted change, and CHANGELOG one section ``## VERSION (unreleased)``.
2. The version into ``megatron_lossagg/__init__.py``, the date into CHANGELOG, and the address of
   ``[tool.lossagg]``, if there is one, into the pages that clone it.
3. Wheel and sdist into ``dist/``. twine, if it is here, checks their metadata. The wheel is
   installed into an empty environment, without torch, and says the version.
4. One commit and its tag. What fails before leaves the checkout as it was, without ``dist/``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import addresses  # next to this file

ROOT = Path(__file__).resolve().parent.parent
_VERSION = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")
_IN_PACKAGE = re.compile(r'^__version__ = ".*"$', re.MULTILINE)
_UNRELEASED = re.compile(r"^## \S+ \(unreleased\)$", re.MULTILINE)


def released(version: str) -> None:
    """Make the release; raise ``SystemExit`` that says what was found and what was expected."""
    tag, files = f"v{version}", _files(version)
    if _git("tag", "--list", tag):
        raise SystemExit(f"the tag {tag} is there already: choose the next version")
    try:
        for path, text in files.items():
            path.write_text(text)
        addresses.write(ROOT)
        _build()
        _try(version)
        _git("commit", "--all", "--message", f"Release {version}")
    except BaseException:
        _git("restore", ".")
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        raise
    _git("tag", "--annotate", tag, "--message", f"megatron_lossagg {version}")
    print(f"\ncommitted and tagged {tag}; dist/ has its files. To publish it:\n"
          "    git push origin HEAD\n"
          f"    git push origin {tag}    # once the check has passed: publish.yml does the rest\n"
          "    twine upload dist/*       # instead of the tag's workflow")  # fmt: skip
    if not addresses.repository_of(ROOT):
        print("repository under [tool.lossagg] of pyproject.toml is empty: publish.yml refuses "
              "the tag, and the pages keep their placeholder")  # fmt: skip


def _files(version: str) -> dict[Path, str]:
    """Return what the version and its date are written into; refuse what is no release."""
    if not _VERSION.fullmatch(version):
        raise SystemExit(f"got VERSION={version}, expected three numbers, such as 0.1.0")
    if changed := _git("status", "--porcelain"):
        raise SystemExit(f"expected a checkout without changes; commit these first:\n{changed}")
    package, changelog = ROOT / "megatron_lossagg" / "__init__.py", ROOT / "CHANGELOG.md"
    dated = f"## {version} ({datetime.date.today()})"
    text, found = _UNRELEASED.subn(dated, changelog.read_text())
    if found != 1:
        raise SystemExit(
            f"CHANGELOG.md has {found} sections '## VERSION (unreleased)', expected one"
        )
    return {
        package: _IN_PACKAGE.sub(f'__version__ = "{version}"', package.read_text()),
        changelog: text,
    }


def _build() -> None:
    """Build wheel and sdist as publish.yml does, into an empty ``dist/``."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", "dist")
    if importlib.util.find_spec("twine"):
        _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, _dist("*")))
    else:
        print("twine is not installed: the metadata is not checked")


def _try(version: str) -> None:
    """Install the wheel where nothing else is: its version needs neither torch nor Megatron."""
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, "-m", "venv", folder)
        (wheel,) = _dist("*.whl")
        _run(f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
        code = "import megatron_lossagg; print(megatron_lossagg.__version__)"
        for command in (
            [f"{folder}/bin/python", "-c", code],
            [f"{folder}/bin/lossagg", "--version"],
        ):
            says = subprocess.check_output(command, text=True, cwd=folder).split()
            if says[-1] != version:
                raise SystemExit(f"the wheel says {' '.join(says)}, expected {version}")


def _dist(pattern: str) -> list[Path]:
    return sorted((ROOT / "dist").glob(pattern))


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).rstrip()


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="such as 0.1.0")
    released(parser.parse_args().version)
