"""Messages that ``docs/troubleshooting.md`` quotes are those of the package's source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
BLOCKS = re.findall(r"^ *```text\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)
PHRASES = re.findall(r'"([^"]{12,})"', PAGE)
FILLED_IN = "..."


def text_of(node):
    """A string, or an f-string with ``...`` for what it fills in; None for another node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else FILLED_IN for part in node.values
        )
    return None


def one_line(text):
    return " ".join(text.replace("`", "").split())


SOURCE = "\n".join(
    one_line(text)
    for file in sorted((ROOT / "megatron_lossagg").rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text()))
    if (text := text_of(node)) is not None
)


@pytest.mark.parametrize("quote", [one_line(quote) for quote in [*BLOCKS, *PHRASES]])
def test_a_quoted_message_is_one_of_the_package(quote):
    # A message may be put together at a colon or a semicolon, and a hook fills in its flag.
    parts = re.split(r"\.\.\.|[:;] |--loss-aggregation(?= |$)", quote)
    for part in parts:
        assert part.strip(" ,.()") in SOURCE
