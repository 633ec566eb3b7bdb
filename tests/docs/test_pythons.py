"""Which Pythons: metadata, workflows and pages say one thing, and ``make`` keeps them apart."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def read(name):
    return (ROOT / name).read_text()


def test_the_same_pythons_are_declared_tried_and_listed():
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    first, last = declared[0], declared[-1]
    assert f'requires-python = ">={first}"' in read("pyproject.toml")
    assert f'target-version = "py{first.replace(".", "")}"' in read("pyproject.toml")
    written = ", ".join(f'"{version}"' for version in declared)
    assert f"python: [{written}]" in read(".github/workflows/newest.yml")
    assert f"VERSIONS=({' '.join(declared)})" in read("launch/ci/machine.sh")
    for page in ("README.md", "CONTRIBUTING.md", "docs/evidence.md"):
        assert re.findall(r"Python (3\.\d+ to 3\.\d+)", read(page)) == [f"{first} to {last}"]
    tried = re.findall(
        r'python: "?\[?((?:"?3\.\d+"?(?:, )?)+)', read(".github/workflows/check.yml")
    )
    assert {*re.findall(r"3\.\d+", " ".join(tried))} == {*declared}
    rows = re.findall(r"^(3\.\d+)\.\d+\t", read("tests/ran/pythons.tsv"), re.M)
    assert rows
    assert {*rows} <= {*declared}


@pytest.mark.launches
def test_make_gives_each_python_environments_of_its_own():
    pythons = ["python3", "python3.12", "/a/bin/python3", "/b/bin/python3", "a/bin/python3.12"]
    made = {}
    for python in pythons:
        printed = subprocess.check_output(
            ["make", "--dry-run", "--always-make", "lint", "docs", f"PYTHON={python}"],
            cwd=ROOT, text=True,
        )  # fmt: skip
        made[python] = re.findall(rf"^{re.escape(python)} -m venv (\S+)$", printed, re.M)
    assert made["python3"] == [".venv", ".venv-docs"]
    environments = [path for paths in made.values() for path in paths]
    assert len(set(environments)) == len(environments) == 2 * len(pythons)
