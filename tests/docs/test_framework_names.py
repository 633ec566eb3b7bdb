"""A framework is in its own files: how many others of the package and the tests name it."""

import re

import pytest
from conftest import TESTS

ROOT = TESTS.parent
AIM = 8
NAMES = {
    "slime": "slime",
    "miles": "miles",
    "verl": "verl",
    "SkyRL": "skyrl",
    "NeMo-RL": "nemo(?:[-_]?rl)?",
    "ms-swift": "(?:ms[-_])?swift",
    "AReaL": "areal",
    "LLaMA-Factory": "mcore[-_]adapter|llama[-_]?factory",
    "ROLL": "(?-i:ROLL)",
    "Primus": "primus",
    "Megatron-Bridge": r"(?<!mcore-)(?<!self\.)bridge",
    "open-instruct": "open[-_]instruct",
}
"""How a framework is written. Megatron-LM is where all of this runs. ms-swift's mcore-bridge, which
its trainers have as ``self.bridge``, is not Megatron-Bridge."""
ROLLOUTS = "slime|miles|integrations/(?:_|weigh_)rollouts"
OWN = {"slime": ROLLOUTS, "miles": ROLLOUTS, "ROLL": "roll"}
"""The names of its own files and of its folder of ``tests/frameworks``, if they are others: slime
and miles share most of theirs."""
MOST = {"Megatron-Bridge": 10}
"""Where it is not the aim.

All frameworks stand in the tables of drivers, of newest mains, of what is weighed and of aliases.
Megatron-Bridge is a part of other frameworks: LLaMA-Factory's first backend, which its driver, its
start, its page's and its test say; SkyRL's driver patches classes of it. Of its options one is
refused, and its name is in two messages.
"""
REFERENCE = re.compile(r"https?://\S+|[\w.-]+/[\w.-]+#\d+")
"""A link, or an issue: where something is told, not what is known of a framework."""


def named(pattern):
    return re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])", re.IGNORECASE)


def files_that_name(name):
    """Return the files outside of a framework's own in which its name stands."""
    own, pattern = named(OWN.get(name, NAMES[name])), named(NAMES[name])
    for folder in ("megatron_lossagg", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            is_counted = not own.search(path) and path != "tests/docs/test_framework_names.py"
            if is_counted and pattern.search(REFERENCE.sub("", file.read_text())):
                yield path


@pytest.mark.parametrize("name", NAMES)
def test_a_framework_is_named_in_few_files_but_its_own(name):
    found = [*files_that_name(name)]
    assert len(found) <= MOST.get(name, AIM), "\n".join(found)


def test_its_own_files_are_not_counted_and_a_link_is_none():
    names = [*files_that_name("verl")]
    assert "megatron_lossagg/verify/drivers/table.py" in names
    assert not [path for path in names if "verl" in path]
    assert "megatron_lossagg/verify/reference_loss.py" not in names  # it has a link
