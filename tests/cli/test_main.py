"""The ``lossagg`` command in an environment that lacks what the package requires."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_required_package_that_is_missing_is_named_without_a_traceback(launches):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import megatron_lossagg.__main__"
    code += "; sys.exit(megatron_lossagg.__main__.main(['verify']))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("lossagg: rich is not installed: pip install torch numpy rich")
    assert "Traceback" not in done.stderr
