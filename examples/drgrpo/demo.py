"""Train Dr.GRPO on two CPU processes, replay it at every layout, print tables, draw pictures.

``make demo`` runs this; everything goes to ``runs/demo``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import plots
import replay_layouts as replays

HERE = Path(__file__).resolve().parent
PROCESSES = 2


def train_online(output: Path, *flags: str) -> None:
    """Run the example online on two processes, its progress shown as it comes."""
    online = ["--mode", "online", "--output", str(output), "--num-microbatches", "2"]
    run_shown([*torchrun(PROCESSES), str(HERE / "train.py"), *online, *flags])


def replay_layouts(output: Path) -> None:
    """Replay the shipped rollouts at every layout; it launches its own processes."""
    run_shown([sys.executable, str(HERE / "replay_layouts.py"), "--output", str(output)])


def share_gradient(output: Path) -> None:
    """Measure which responses the gradient of the shipped rollouts comes from."""
    run_shown([*torchrun(1), str(HERE / "gradient_share.py"), "--output", str(output)])


def torchrun(num_processes: int) -> list[str]:
    """Return the command that starts a script on processes of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--local-addr=127.0.0.1", f"--nproc-per-node={num_processes}"]


def stage(number: int, what: str) -> None:
    """Begin a stage."""
    print(f"\n== {number} of 3, {what}", flush=True)


def run_shown(command: list[str]) -> None:
    """Run a command with this terminal; end with its exit status if it fails."""
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def accuracies(metrics: Path) -> tuple[float, float, float]:
    """Return greedy accuracy before the warm-up, after it, and after the RL."""
    of_phase = {
        phase: [
            line["accuracy"] for line in plots.read_metrics(metrics, phase) if "accuracy" in line
        ]
        for phase in ("start", "warmup", "rl")
    }
    return of_phase["start"][0], of_phase["warmup"][-1], of_phase["rl"][-1]


def seconds(metrics: Path, phase: str) -> float:
    """Return how long a phase's steps took."""
    return float(sum(line["seconds"] for line in plots.read_metrics(metrics, phase)))


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="FOLDER")
    output = parser.parse_args().output
    shutil.rmtree(output, ignore_errors=True)
    start = time.perf_counter()
    print("Two minutes on two idle cores, in three parts")

    stage(1, "train: warm-up, then Dr.GRPO with sampled rollouts, DP 2")
    train_online(output / "online")
    metrics = output / "online" / "metrics.jsonl"
    plots.plot_training([metrics], output / "training.png")

    before, after_warmup, after_rl = accuracies(metrics)
    print(
        f"Shows: it learns. Greedy accuracy on 200 held-out problems: {before:.1%} at the start, "
        f"{after_warmup:.1%} after the warm-up ({seconds(metrics, 'warmup'):.0f} s), "
        f"{after_rl:.1%} after Dr.GRPO ({seconds(metrics, 'rl'):.0f} s)"
    )

    stage(2, "replay: recorded rollouts at DP 2, CP 2, PP 2 with 1, 2, 4 microbatches")
    replay_layouts(output / "replay")
    print("Shows: the loss and the gradient do not depend on the layout; stock's rule does")

    stage(3, "attribute: which responses the gradient comes from")
    share_gradient(output / "share")
    print("Shows: a mode decides whether long or short responses have the gradient")

    print(f"\nAll in {time.perf_counter() - start:.0f} s; pictures:")
    for picture in ("training.png", "replay/layouts.png", "share/gradient_share.png"):
        print(f"  {output / picture}")
    print(replays.verdict(replays.read_all(output / "replay")))


if __name__ == "__main__":
    main()
