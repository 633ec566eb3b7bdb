"""``docs/testing.md`` names a test or a reason for every public failure, and the tests exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "testing.md").read_text()
TABLE = re.findall(r"^\| ([a-i]\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
NAMED = re.compile(r"`tests/([\w/]+\.py)::(\w+)`")


@functools.cache
def functions(file):
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}


def test_every_failure_is_listed_once():
    names = [name for name, *_ in TABLE]
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("row", "proof"), [(row, proof) for row, _, _, proof in TABLE])
def test_a_failure_has_a_test_that_exists_or_a_reason(row, proof):
    named = NAMED.findall(proof)
    for file, name in named:
        assert name in functions(TESTS / file), (row, file, name)
    assert named or len(proof.split()) >= 6, (row, proof)


def test_every_test_of_a_failure_is_listed_under_it():
    proven = {(row, name) for row, _, _, proof in TABLE for _, name in NAMED.findall(proof)}
    names = functions(TESTS / "core" / "test_failures.py")
    for name in sorted(name for name in names if name.startswith("test_")):
        assert (name.split("_")[1], name) in proven
