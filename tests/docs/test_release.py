"""A release in one command: what it refuses, and the address in the pages.

``tests/launch/test_publish.py`` makes one.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import addresses  # noqa: E402  of tools/

REPOSITORY = "https://code.example/o/megatron_lossagg"
PARTS = ("CHANGELOG.md", "pyproject.toml", *addresses.PAGES, "megatron_lossagg/__init__.py",
         "tools/addresses.py", "tools/release.py", ".gitignore")  # fmt: skip


def git(checkout, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.check_output(["git", *identity, *arguments], cwd=checkout, text=True)


@pytest.fixture
def checkout(launches, tmp_path):
    """A commit of what a release reads and writes."""
    for part in PARTS:
        (tmp_path / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, tmp_path / part)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        re.sub(r"(?m)^## .*", "## 9.0.0 (unreleased)", changelog.read_text(), count=1)
    )
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def release(checkout, version="9.0.0"):
    return subprocess.run(
        [sys.executable, "tools/release.py", version], cwd=checkout, capture_output=True, text=True
    )


def no_longer_unreleased(checkout):
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("(unreleased)", "(2026-01-01)"))
    git(checkout, "commit", "--quiet", "--all", "--message", "released")


@pytest.mark.parametrize(
    ("before", "version", "says"),
    [
        (lambda checkout: None, "9.0", "got VERSION=9.0, expected three numbers"),
        (lambda checkout: (checkout / "new.py").touch(), "9.0.0", "commit these first:\n?? new.py"),
        (no_longer_unreleased, "9.0.0", "CHANGELOG.md has 0 sections '## VERSION (unreleased)'"),
        (lambda checkout: git(checkout, "tag", "v9.0.0"), "9.0.0", "the tag v9.0.0 is there"),
    ],
)
def test_what_is_no_release_is_refused_and_changes_nothing(checkout, before, version, says):
    before(checkout)
    found = git(checkout, "log", "--oneline"), git(checkout, "status", "--porcelain")
    done = release(checkout, version)
    assert done.returncode == 1
    assert says in done.stderr
    assert (git(checkout, "log", "--oneline"), git(checkout, "status", "--porcelain")) == found


def test_a_release_that_cannot_be_built_leaves_the_checkout_as_it_was(checkout):
    """There is no LICENSE here, which pyproject.toml names."""
    done = release(checkout)
    assert done.returncode == 1
    assert "'-m', 'build'" in done.stderr
    assert git(checkout, "status", "--porcelain", "--ignored") in ("", "!! tools/__pycache__/\n")
    assert not git(checkout, "tag")


@pytest.mark.parametrize("page", addresses.PAGES)
def test_a_page_with_the_address_asks_for_none(page):
    text = (ROOT / page).read_text()
    written = addresses.addressed(text, REPOSITORY)
    assert addresses.PLACEHOLDER not in written
    if addresses.PLACEHOLDER in text:  # until pyproject.toml has an address
        assert f"git clone {REPOSITORY}" in written


def test_the_pages_have_the_address_of_pyproject_toml():
    repository = addresses.repository_of(ROOT)
    for page in addresses.PAGES:
        text = (ROOT / page).read_text()
        expected = addresses.addressed(text, repository) if repository else text
        assert text == expected, "run python tools/addresses.py"


def test_the_address_is_written_once_there_is_one(checkout):
    addresses.write(checkout)
    assert not git(checkout, "status", "--porcelain", "--", *addresses.PAGES)
    settings = checkout / "pyproject.toml"
    set_to = f'repository = "{REPOSITORY}"'
    settings.write_text(re.sub(r'(?m)^repository = "[^"]*"', set_to, settings.read_text()))
    addresses.write(checkout)
    for page in addresses.PAGES:
        assert addresses.PLACEHOLDER not in (checkout / page).read_text()
