"""README says how many lines make the loss, and that the rest checks: they are counted."""

import re
import sys

import pytest
from conftest import TESTS

ROOT = TESTS.parent
sys.path.insert(0, str(ROOT / "tools"))
import code_lines  # noqa: E402  of tools/


def test_the_numbers_of_the_first_screen_are_those_that_the_script_counts():
    first_screen = (ROOT / "README.md").read_text().split("\n## ")[0]
    pattern = r"([\d,]+) lines of code of ([\d,]+).*?in ([\d,]+) lines"
    (said,) = re.findall(pattern, first_screen, re.DOTALL)
    counted = (
        code_lines.total(code_lines.TRAINS),
        code_lines.total(code_lines.PACKAGE.rglob("*.py")),
        code_lines.code_lines(code_lines.ONE_FILE),
    )
    for number, count in zip(said, counted, strict=True):
        assert int(number.replace(",", "")) == pytest.approx(count, rel=0.1)


def test_only_lines_with_code_are_counted(tmp_path):
    file = tmp_path / "three.py"
    file.write_text('"""Two\nlines."""\n\n# comment\nx = [\n    1,\n]  # end\n')
    assert code_lines.code_lines(file) == 3
