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


def run_shown(command: list[str]) -> None:
    """Run a command with this terminal; end with its exit status where it fails."""
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

    print("== Warm-up, then Dr.GRPO with sampled rollouts, DP 2", flush=True)
    train_online(output / "online")
    metrics = output / "online" / "metrics.jsonl"
    plots.plot_training([metrics], output / "training.png")

    print("== Recorded rollouts at DP 2, CP 2, PP 2 with 1, 2, 4 microbatches", flush=True)
    replay_layouts(output / "replay")

    print("== Which responses the gradient comes from", flush=True)
    share_gradient(output / "share")

    before, after_warmup, after_rl = accuracies(metrics)
    print("== Greedy accuracy on 200 held-out problems")
    print(f"before the warm-up      {before:6.1%}")
    print(f"after the warm-up       {after_warmup:6.1%}   {seconds(metrics, 'warmup'):5.0f} s")
    print(f"after Dr.GRPO           {after_rl:6.1%}   {seconds(metrics, 'rl'):5.0f} s")
    print(f"all in {time.perf_counter() - start:.0f} s; pictures:")
    for picture in ("training.png", "replay/layouts.png", "share/gradient_share.png"):
        print(f"  {output / picture}")


if __name__ == "__main__":
    main()
