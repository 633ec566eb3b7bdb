"""Count the package's lines of code, and of those that make the loss.

``python tools/code_lines.py``. Blank lines, comments and docstrings are not counted.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_lossagg"
ONE_FILE = ROOT / "examples" / "one_file.py"
TRAINS = [
    *(file for file in (PACKAGE / "reduction").glob("*.py") if file.name != "checks.py"),
    PACKAGE / "contract" / "outputs.py",
    PACKAGE / "contract" / "scaling.py",
]
"""From counts to weights, from losses to a partial loss, and K; without ``reduction/checks.py``."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(file: Path) -> int:
    """Count the lines of a file that have code."""
    text = file.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def total(files: Iterable[Path]) -> int:
    """Count the lines of code of files."""
    return sum(map(code_lines, files))


def main() -> None:
    """Print the three numbers of README."""
    print(f"package        {total(PACKAGE.rglob('*.py')):6,}")
    print(f"makes the loss {total(TRAINS):6,}")
    print(f"one_file.py    {code_lines(ONE_FILE):6,}")


if __name__ == "__main__":
    main()
