"""``python own_environment.py FOLDER OPTIONS``: an environment that has the packages of this one.

All but this package, which is installed in place and therefore in no folder of packages.
"""

import subprocess
import sys
from pathlib import Path


def make_environment(folder, *options):
    """Make it; ``options`` are those of ``venv``. Returns its own folder of packages."""
    subprocess.run([sys.executable, "-m", "venv", *options, folder], check=True)
    (packages,) = Path(folder).glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others), encoding="utf-8")
    return packages


if __name__ == "__main__":
    make_environment(*sys.argv[1:])
