"""``tests/public_failures.md`` names a test for every public failure, and the tests exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "public_failures.md").read_text()
ROWS = re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE)
TABLE = [row.split(" | ") for row in ROWS if "reported |" not in row]
NAMED = re.compile(r"`tests/([\w/]+\.py)::(\w+)`")


@functools.cache
def functions(file):
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize(("failure", "proof"), [(" ".join(row), proof) for *row, proof in TABLE])
def test_a_failure_has_a_test_that_exists(failure, proof):
    named = NAMED.findall(proof)
    for file, name in named:
        assert name in functions(TESTS / file), (failure, file, name)
    assert named, (failure, proof)


def test_every_test_of_a_failure_is_listed():
    proven = {name for *_, proof in TABLE for _, name in NAMED.findall(proof)}
    names = functions(TESTS / "reduction" / "test_failures.py")
    assert {name for name in names if name.startswith("test_")} <= proven


def test_the_map_of_the_tests_names_what_exists():
    """Files and folders of tests/, and functions that some file there defines."""
    page = (TESTS / "README.md").read_text()
    source = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    words = re.findall(r"`([^`\n]+)`", page)
    for path in (word for word in words if re.fullmatch(r"[\w/]+(\.py|/)", word)):
        root = TESTS.parent if path.startswith(("tests/", "tools/", "megatron_")) else TESTS
        assert (root / path).exists() or (root.parent / path).exists(), path
    for name in (found[1] for found in map(re.compile(r"(\w+)\(.*\)").fullmatch, words) if found):
        assert re.search(rf"^ *def {name}\(", source, re.MULTILINE), name
    assert {f"{path.name}/" for path in TESTS.iterdir() if any(path.glob("*.py"))} <= {*words}
