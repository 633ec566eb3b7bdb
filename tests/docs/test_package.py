"""What is released: a wheel and an sdist that install into an empty environment, one version."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from own_environment import make_environment

import megatron_lossagg

ROOT = Path(__file__).parents[2]
PARTS = ("megatron_lossagg", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE",
         "CHANGELOG.md", "CITATION.cff", "constraints.txt", "tests", ".gitignore")  # fmt: skip
VERSION = megatron_lossagg.__version__
REPOSITORY, SITE = "https://code.example/o/megatron_lossagg", "https://o.example/megatron_lossagg/"
BUILD = """
import os, shutil, sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools changes sys.argv
sdist = os.path.join(folder, build_meta.build_sdist(folder))
shutil.unpack_archive(sdist, folder)
os.chdir(sdist.removesuffix(".tar.gz"))
build_meta.build_wheel(folder)
"""
"""What `python -m build` does, in this environment: it would fetch setuptools for its own."""


@pytest.fixture(scope="module")
def built(launches, tmp_path_factory):
    """Build the sdist from a copy, which stray files of the checkout cannot reach, and the wheel
    from the sdist; return both.
    """
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip", reason="pip is not installed")
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
    for name in ("pyproject.toml", "CITATION.cff", "MANIFEST.in", "constraints.txt"):
        assert f'"{VERSION}"' not in (ROOT / name).read_text(), name
        assert f"version: {VERSION}" not in (ROOT / name).read_text(), name
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def addressed(launches, tmp_path_factory):
    """Return the metadata of a release, once ``pyproject.toml`` has the addresses."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("addressed")
    for part in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "megatron_lossagg/__init__.py",
    ):
        (copy / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, copy / part)
    settings = copy / "pyproject.toml"
    text = settings.read_text()
    for name, value in (("repository", REPOSITORY), ("site", SITE)):
        text = re.sub(rf'(?m)^{name} = "[^"]*"', f'{name} = "{value}"', text)
    settings.write_text(text)
    code = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (metadata,) = copy.glob("*.dist-info/METADATA")
    return HeaderParser().parsestr(metadata.read_text())


def metadata_of(wheel):
    """Return a wheel's metadata: headers, and the description as its body."""
    name = f"megatron_lossagg-{VERSION}.dist-info/METADATA"
    return HeaderParser().parsestr(zipfile.ZipFile(wheel).read(name).decode())


def links_of(page):
    """Return where the links and pictures of a page lead, but to anchors of it."""
    return re.findall(r"""(?:\]\(|(?:src|href)=")([^)"\s#]+)""", page)


def test_a_release_without_an_address_has_no_link_into_the_repository(built):
    headers = metadata_of(built[1])
    assert "Project-URL" not in headers
    assert headers["Author"] == "megatron_lossagg contributors"
    assert "Development Status :: 3 - Alpha" in headers.get_all("Classifier")
    description = headers.get_payload()
    assert description.startswith("# megatron_lossagg")
    assert not [link for link in links_of(description) if "://" not in link]
    assert "![" not in re.sub(r"!\[[^]]*\]\(https", "", description)


def test_the_readme_of_a_release_links_to_its_own_files(addressed):
    urls = dict(entry.split(", ") for entry in addressed.get_all("Project-URL"))
    assert urls == {
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Documentation": SITE,
    }
    links = links_of(addressed.get_payload())
    assert all("://" in link for link in links)
    ours = [link.removeprefix(REPOSITORY) for link in links if link.startswith(REPOSITORY)]
    written = [link for link in links_of((ROOT / "README.md").read_text()) if "://" not in link]
    assert len(ours) == len(written) > 0
    for link in ours:
        _, kind, version, path = link.split("/", 3)
        assert version == f"v{VERSION}"
        assert (ROOT / path).is_file()
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")


def test_the_wheel_has_every_module_the_license_and_nothing_else(built):
    _, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"megatron_lossagg-{VERSION}.dist-info/"
    package = [p for p in ROOT.glob("megatron_lossagg/**/*") if "__pycache__" not in p.parts]
    files = {str(path.relative_to(ROOT)) for path in package if path.is_file()}
    assert {name for name in names if not name.startswith(metadata)} == files
    assert f"{metadata}licenses/LICENSE" in names
    headers = metadata_of(wheel)
    assert headers["Version"] == VERSION
    assert [r for r in headers.get_all("Requires-Dist") if "extra" not in r] == [
        "torch>=2.6", "numpy>=1.26", "rich>=13",
    ]  # fmt: skip


def test_the_sdist_has_the_sources_and_no_tests(built):
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n} <= names
    assert {"constraints.txt", "CITATION.cff", "pyproject.toml"} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_the_sdist_installs_into_an_empty_environment_and_verifies(built, tmp_path):
    """Torch, numpy, rich and Megatron-Core are this environment's."""
    sdist, _ = built
    folder = tmp_path / "env"
    packages = make_environment(folder, "--without-pip")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    pip += ["--no-index", "--no-build-isolation", "--ignore-installed", sdist]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(pip, check=True, env=environment)

    def output(*command):
        return subprocess.check_output(command, text=True, cwd=tmp_path, env=environment)

    where = output(python, "-c", "import megatron_lossagg; print(megatron_lossagg.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    command = folder / "bin" / "lossagg"
    assert output(command, "--version") == f"megatron_lossagg {VERSION}\n"
    assert "w_s = 1/(B 4096)" in output(command, "explain", "constant", "--divisor", "4096")
    one_case = ["--cp", "2", "--loss-aggregation", "sample_mean", "--loss-scaling", "average"]
    assert "PASS: 1 of 1 case" in output(command, "verify", *one_case)


@pytest.mark.skipif(
    importlib.util.find_spec("twine") is None, reason="twine is not installed: pip install twine"
)
def test_twine_finds_nothing_to_complain_of(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *built]
    subprocess.run(command, check=True)
