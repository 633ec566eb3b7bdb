"""What the tests of frameworks share: recorded numbers, and the frameworks' own code if present."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_lossagg.verify import reference_loss

FRAMEWORKS_DIR = os.environ.get("FRAMEWORKS_DIR")
RECORDED = Path(__file__).parents[1] / "integrations" / "recorded"
PATCHES = Path(__file__).parents[2] / "docs" / "integrations" / "patches"
INSTALLED = Path(__file__).parents[2] / ".venv-frameworks"
"""What the frameworks import, by ``make test-frameworks``."""
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""DP and CP."""
CARRIED = {
    "token_mean": {},
    "sample_mean": {},
    "prompt_mean": {},
    "constant": {"divisor": 40.0},
    "sample_sum": {},
    "token_sum": {"divisor": 50.0},
}
CASES = [(mode, {**more, "mode": mode}) for mode, more in CARRIED.items()] + [
    (f"{mode}, empty ones do not count", {**CARRIED[mode], "mode": mode, "count_empty": False})
    for mode in ("sample_mean", "prompt_mean", "constant")
]


def needs(framework):
    """Skip a test where the checkout of a framework is missing, or what it imports."""
    reasons = [] if FRAMEWORKS_DIR else ["FRAMEWORKS_DIR is not set"]
    if FRAMEWORKS_DIR and not Path(FRAMEWORKS_DIR, framework).is_dir():
        reasons.append(f"FRAMEWORKS_DIR has no {framework}")
    modules = ("ray", "transformers", "httpx", "psutil", "wandb", "six", "regex", "pydantic")
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not reasons and missing:
        reasons.append(f"not installed: {', '.join(missing)}")
    reason = (
        f"{'; '.join(reasons)}: run tools/fetch_frameworks.sh; docs/integrations/{framework}.md"
    )
    return pytest.mark.skipif(bool(reasons), reason=reason)


def needs_checkout(framework):
    """Skip a test where the checkout of a framework is missing, or what ``make test-frameworks``
    installs.
    """
    reason = None
    if not FRAMEWORKS_DIR:
        reason = "FRAMEWORKS_DIR is not set: run tools/fetch_frameworks.sh"
    elif not Path(FRAMEWORKS_DIR, framework).is_dir():
        reason = f"FRAMEWORKS_DIR has no {framework}: run tools/fetch_frameworks.sh"
    elif not INSTALLED.is_dir():
        reason = "what the frameworks import is not installed: run make test-frameworks"
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def copy_of(framework, package, folder, *, patch=None):
    """Copy a package of a framework, or of a folder, to another, patched if wanted; returns that
    one.
    """
    shutil.copytree(Path(FRAMEWORKS_DIR or "", framework, package), folder / package)
    if patch is not None:
        # As if outside of any repository, which git would take the paths to be relative to.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        command = ["git", "apply", str(PATCHES / patch)]
        subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder


def in_float64(files):
    """Let a copied framework compute in float64 what it computes in float32."""
    for file in files:
        text = file.read_text()
        changed = text.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
        assert changed != text
        file.write_text(changed)


def recorded(framework):
    """Load what the framework's own code returned."""
    return json.loads((RECORDED / f"{framework}.json").read_text())


def flags(mode, divisor=None, count_empty=None):
    """Return the arguments that ask for an aggregation."""
    return {
        "loss_aggregation": mode,
        "loss_aggregation_divisor": divisor,
        "loss_aggregation_count_empty": count_empty,
    }


def trained(data, denominators, sequences, rollouts):
    """Compute a step's loss as the framework does: its recorded sums, clamped
    denominators, 1 / G.
    """
    of_ranks = data["sums"]["2"]
    total = sum(
        of_rank[sequence] / max(denominators[sequence], 1)
        for of_rank in of_ranks
        for sequence in sequences
    )
    return total / rollouts


def wanted(data, sequences, keywords):
    """Compute a step's loss by the reference, from masks and per-token losses."""
    steps_sequences = [
        {
            "x": [torch.tensor(x, dtype=torch.float64) for x in data["x"][sequence]],
            "counted": data["loss_masks"][sequence],
            "trained": data["loss_masks"][sequence],
            "sample": data["rollout_ids"][sequence],
            "prompt": data["prompts"][sequence],
        }
        for sequence in sequences
    ]
    return float(reference_loss.step_loss(sequences=steps_sequences, **keywords))


def check_reducer(make, data, at):
    """Compare the reducer with the framework's own token sums, on every rank; ``at``: sets CP."""
    masks = [torch.tensor(mask, dtype=torch.int32) for mask in data["loss_masks"]]
    for size, ranks in data["held"].items():
        for rank, held in enumerate(ranks):
            at(int(size), rank)
            reducer = make(data["total_lengths"], data["response_lengths"], masks, False)
            x = torch.tensor([loss for sequence in held for loss in sequence])
            want = sum(data["sums"][size][rank]) / 40
            assert reducer(x).item() == pytest.approx(want, rel=1e-6, abs=1e-7)
