"""Each ``check_`` of ``ownership_worker.py`` passes on two context-parallel ranks."""

import re
from pathlib import Path

import pytest
from conftest import early, launched

CHECKS = re.findall(
    r"^def check_(\w+)\(", (Path(__file__).parent / "ownership_worker.py").read_text(), re.MULTILINE
)


@early
def output():
    return launched("ownership_worker.py", processes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_ownership(output, check):
    assert f"PASSED check_{check}" in output.splitlines()
