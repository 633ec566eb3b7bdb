"""What is released: a wheel and an sdist that install into an empty environment, one version."""

import importlib.util
import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import megatron_lossagg

ROOT = Path(__file__).parents[2]
PARTS = ("megatron_lossagg", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE",
         "CHANGELOG.md", "CITATION.cff", "constraints.txt", "tests", ".gitignore")  # fmt: skip
VERSION = megatron_lossagg.__version__
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools changes sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
"""What `python -m build` calls, in this environment: it would fetch setuptools for its own."""


@pytest.fixture(scope="module")
def built(launches, tmp_path_factory):
    """Build from a copy, which stray files of the checkout cannot reach; return sdist, wheel."""
    for name in ("setuptools", "pip"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    folder = tmp_path_factory.mktemp("release")
    copy, dist = folder / "copy", folder / "dist"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=ignored)
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / part)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", BUILD, str(dist)],
        cwd=copy, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dist / f"megatron_lossagg-{VERSION}.tar.gz", next(dist.glob("*.whl"))


def test_the_version_is_in_one_place():
    for name in ("setup.py", "pyproject.toml", "CITATION.cff", "MANIFEST.in", "constraints.txt"):
        assert f'"{VERSION}"' not in (ROOT / name).read_text(), name
        assert f"version: {VERSION}" not in (ROOT / name).read_text(), name
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_has_every_module_the_license_and_nothing_else(built):
    _, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"megatron_lossagg-{VERSION}.dist-info/"
    package = [p for p in ROOT.glob("megatron_lossagg/**/*") if "__pycache__" not in p.parts]
    files = {str(path.relative_to(ROOT)) for path in package if path.is_file()}
    assert {name for name in names if not name.startswith(metadata)} == files
    assert f"{metadata}licenses/LICENSE" in names
    headers = HeaderParser().parsestr(zipfile.ZipFile(wheel).read(f"{metadata}METADATA").decode())
    assert headers["Version"] == VERSION
    assert [r for r in headers.get_all("Requires-Dist") if "extra" not in r] == [
        "torch>=2.6", "numpy>=1.26", "rich>=13",
    ]  # fmt: skip


def test_the_sdist_has_the_sources_and_no_tests(built):
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n} <= names
    assert {"constraints.txt", "CITATION.cff", "setup.py"} <= names
    assert not any(name.startswith("tests/") for name in names)


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_it_installs_into_an_empty_environment_and_the_command_works(built, tmp_path, kind):
    """Torch, numpy, rich, and setuptools for the sdist, are this environment's."""
    release = built[kind == "wheel"]
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    pip += ["--no-index", "--no-build-isolation", "--ignore-installed", release]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(pip, check=True, env=environment)

    def output(*command):
        return subprocess.check_output(command, text=True, cwd=tmp_path, env=environment)

    where = output(python, "-c", "import megatron_lossagg; print(megatron_lossagg.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    command = folder / "bin" / "lossagg"
    assert output(command, "--version") == f"megatron_lossagg {VERSION}\n"
    assert "w_s = 1/(B 4096)" in output(command, "explain", "constant", "--divisor", "4096")


@pytest.mark.skipif(
    importlib.util.find_spec("twine") is None, reason="twine is not installed: pip install twine"
)
def test_twine_finds_nothing_to_complain_of(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *built]
    subprocess.run(command, check=True)
