"""Where a process finds what tests of frameworks import."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".venv-frameworks"
"""What the frameworks import, by ``make test-frameworks``."""
FOLDERS = sorted(path for path in (ROOT / "tests" / "frameworks").iterdir() if path.is_dir())
"""One for each framework, and ``several``; none has another's name for a module.

Not the folder above them: in it an import of a framework that is absent would find its folder.
"""
PATH = [ROOT, ROOT / "tests" / "support", *FOLDERS]
"""This checkout, and the modules of its tests of frameworks."""
