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
