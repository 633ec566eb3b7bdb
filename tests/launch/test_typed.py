"""The commands of README and docs/start.md, typed as they stand, one after the other.

Those that make an environment of their own get this one instead.

In an empty folder and an environment of its own. Its packages are this environment's, so that
nothing is downloaded; the address of the clone leads to this checkout's last commit.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launching import ROOT
from own_environment import make_environment

pytestmark = pytest.mark.launches

PAGES = {"README.md": "44 of 44", "docs/start.md": "2 of 2"}
"""With the cases that pass."""
TORCHRUN = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"


def typed(page):
    """Return a page's commands; a block with ``...`` is a pattern and no command."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    return "".join(block for block in blocks if "..." not in block)


def address():
    """Return what the pages clone."""
    settings = (ROOT / "pyproject.toml").read_text()
    return (
        re.search(r'^repository = "([^"]*)"', settings, re.M)[1]
        or "https://ADDRESS/megatron_lossagg"
    )


@pytest.mark.parametrize("page", PAGES)
def test_a_page_clones_the_address_of_this_repository(page):
    assert re.findall(r"git clone (\S+)", typed(page)) == [address()]


@pytest.fixture
def environment(tmp_path):
    """Make an environment that finds torch and Megatron-Core, and not this package."""
    folder = tmp_path / "environment"
    make_environment(folder)
    torchrun = folder / "bin" / "torchrun"  # as pip would have put it there with torch
    torchrun.write_text(f"#!{folder}/bin/python\n{TORCHRUN}")
    torchrun.chmod(0o755)
    others = ("GIT_", "PYTHON", "MAKE", "MFLAGS")  # a make within make says where it is
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return inherited | {
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the other way round: no isolation
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": f"url.{ROOT}.insteadOf",
        "GIT_CONFIG_VALUE_0": address(),
        "GIT_CONFIG_KEY_1": "safe.directory",
        "GIT_CONFIG_VALUE_1": "*",
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
@pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_where_they_are_typed(page, environment, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        ["bash", "-e", "-c", typed(page)],
        cwd=empty, env=environment, capture_output=True, text=True, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = re.findall(r"^PASS: (\S+ of \S+) cases pass", done.stdout, re.M)
    assert set(results) == {PAGES[page]}
    assert len(results) == typed(page).count("verify")
    assert [path.name for path in empty.iterdir()] == ["megatron_lossagg"]


@pytest.fixture
def made(environment, tmp_path):
    """Return how a line of README's that begins with make ends in a clone, and the clone."""
    for program in ("git", "make"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    clone, folder = tmp_path / "a clone", environment["VIRTUAL_ENV"]
    subprocess.run(["git", "clone", "--quiet", address(), clone], env=environment, check=True)
    (packages,) = Path(folder).glob("lib/python*/site-packages")
    (packages / "clone.pth").write_text(str(clone))  # as an editable installation has it
    Path(folder, "installed").touch()

    def run(target, **more):
        (line,) = re.findall(rf"^(make {target}) +# ", (ROOT / "README.md").read_text(), re.M)
        done = subprocess.run(
            ["bash", "-c", line], cwd=clone, env={**environment, "VENV": folder, **more},
            capture_output=True, text=True, timeout=3000,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.splitlines(), clone

    return run


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
def test_make_demo_ends_with_its_pictures_and_what_they_show(made):
    printed, clone = made("demo")
    *pictures, last = printed[-4:]
    assert len({*pictures}) == len(list(clone.glob("runs/demo/**/*.png"))) == 3
    assert all((clone / picture.strip()).is_file() for picture in pictures)
    said = re.search(r'"(.*?): \.\.\."', (ROOT / "README.md").read_text())[1]
    assert last.startswith(f"{said}: constant")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
def test_make_test_runs_pytest_over_every_test(made):
    printed, _ = made("test", PYTEST_ADDOPTS="--collect-only --quiet")
    (number,) = re.findall(r"^(\d+)(?:/\d+)? tests collected", "\n".join(printed), re.M)
    assert int(number) > 5000
