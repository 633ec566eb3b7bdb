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
    "Megatron-Bridge": "bridge",
    "open-instruct": "open[-_]instruct",
}
"""How a framework is written. Megatron-LM is where all of this runs."""
ROLLOUTS = "slime|miles|integrations/(?:_|weigh_)rollouts"
OWN = {"slime": ROLLOUTS, "miles": ROLLOUTS, "ROLL": "roll"}
"""The names of its own files, if they are others: slime and miles share most of theirs."""
MOST = {"slime": 14, "miles": 14, "verl": 26, "SkyRL": 14, "ms-swift": 10, "Megatron-Bridge": 34}
"""Where it is not the aim.

All frameworks stand in the tables of drivers, of newest mains, of what is weighed and of aliases,
in the tests of these, and in ``verify_checks.py``. Besides:

- slime, miles and verl: ``lossagg plot`` reads what they write, and ``reduction/layout.py`` has the
  layout of the first two; each has tests.
- verl, SkyRL and ms-swift: their releases are installed, and ``run.py``, ``ran.py`` and the drawing
  of a commit's part name the files of checks. verl's names are the examples of ``--help`` and of
  tests of names and of reports.
- Megatron-Bridge: other frameworks load models with it, which their drivers and workers say, and
  its integration is the hook of the tests in ``loop/``.
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
