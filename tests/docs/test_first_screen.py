"""README's first screen: a mode is explained, then installed and proven, and what make can do."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCREEN = (ROOT / "README.md").read_text().split("\n## ")[0]


def at(text):
    assert text in SCREEN
    return SCREEN.index(text)


def test_a_mode_is_explained_before_it_is_named_and_the_package_installed_before_it_is_run():
    assert at("A *mode* says what counts equally") < min(
        at("every mode"), at("no mode"), at("_mean")
    )
    assert at("pip install '.[megatron]'") < at("lossagg verify") < at("torchrun")
    assert at("5 GB") < at("lossagg verify")


@pytest.mark.launches
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_has_what_the_first_screen_types_with_what_it_does_its_time_and_its_end(target):
    ((line, comment),) = re.findall(rf"^(make {target}) +# (.*)$", SCREEN, re.M)
    assert re.search(r"\d+ minutes.*; ends with ", comment)
    typed = f"{line} --dry-run --always-make --no-print-directory"  # below a make too
    printed = subprocess.check_output(typed.split(), cwd=ROOT, text=True)
    runs = {"demo": "examples/drgrpo/demo.py", "test": "-m pytest"}
    assert printed.splitlines()[-1].endswith(f"python {runs[target]}")
