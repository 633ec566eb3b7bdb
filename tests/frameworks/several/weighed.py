"""Runs ``lossagg weigh --framework`` on a checkout.

What a term trains is compared with loops over tokens in float64.
"""

import json
import os
import subprocess
import sys

from framework_folders import INSTALLED, ROOT

PAGE = ROOT / "docs" / "reference" / "what-frameworks-train.md"
PER_TOKEN = ", calculate_per_token_loss"


def weighed(name, folder, *paths, cp=1, more=("--setting", "all")):
    """Run the command in an empty folder; return its steps by setting, and what it printed."""
    report = folder / "report.json"
    size = ["--dp", "2", "--cp", str(cp), "--json", str(report)]
    status, printed = ended(name, folder, *paths, more=[*size, *more])
    assert status == 0, printed
    steps = json.loads(report.read_text())["steps"]
    return {step["trained"]: step["terms"] for step in steps}, printed


def ended(name, folder, *paths, more):
    """Run the command in an empty folder; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_lossagg", "weigh", "--framework", name, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, INSTALLED]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


def verdicts(steps):
    """Return of each setting and term what is trained, next to its coefficient."""
    return {
        setting: {
            name: (
                term["weighed"]["nearest"],
                round((term["weighed"]["factor"] or 0) / term["coefficient"], 6),
            )
            for name, term in terms.items()
            if term["coefficient"] is not None
        }
        for setting, terms in steps.items()
    }


def assert_the_page_says(name, *texts):
    section = PAGE.read_text().partition(f"\n## {name} ")[2].partition("\n## ")[0]
    for text in texts:
        assert text in section


def right(terms):
    """Whether every term that the driver knows has the weights that the setting's name promises."""
    return all(one["error"] < 1e-5 for one in terms.values() if one["coefficient"] is not None)
