"""Each ``check_`` of ``contract_worker.py`` holds on live Megatron-Core, on two ranks."""

import re
from pathlib import Path

import pytest
from conftest import launched

CHECKS = re.findall(
    r"^def check_(\w+)\(", (Path(__file__).parent / "contract_worker.py").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def held():
    out = launched("contract_worker.py", processes=2)
    return set(re.findall(r"^HELD check_(\w+)$", out, re.MULTILINE))


@pytest.mark.parametrize("check", CHECKS)
def test_contract(held, check):
    assert check in held
