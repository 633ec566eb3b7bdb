"""Train three seeds online, print their accuracies, and draw the pictures of the README.

``make figures`` runs this. Runs go to ``runs/figures``, pictures to ``examples/drgrpo/pictures``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import demo
import plots

HERE = Path(__file__).resolve().parent
SEEDS = (1, 2, 3)


def main() -> None:
    """Run every seed, then the replay and the gradient shares of the shipped rollouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/figures"), metavar="FOLDER")
    parser.add_argument("--pictures", type=Path, default=HERE / "pictures", metavar="FOLDER")
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    args.pictures.mkdir(parents=True, exist_ok=True)

    metrics = {}
    for seed in SEEDS:
        print(f"== seed {seed}", flush=True)
        folder = args.output / f"seed{seed}"
        demo.train_online(folder, "--seed", str(seed))
        metrics[f"seed {seed}"] = folder / "metrics.jsonl"
    plots.plot_training(list(metrics.values()), args.pictures / "training.png")
    for measure, picture in (
        (demo.replay_layouts, "layouts.png"),
        (demo.share_gradient, "gradient_share.png"),
    ):
        folder = args.output / Path(picture).stem
        measure(folder)
        shutil.copy(folder / picture, args.pictures / picture)

    print("greedy accuracy on 200 held-out problems")
    print(f"{'':8}{'before warm-up':>16}{'after warm-up':>16}{'after RL':>16}")
    sequences = {name: demo.accuracies(path) for name, path in metrics.items()}
    for name, sequence in sequences.items():
        print(f"{name:8}" + "".join(f"{value:16.1%}" for value in sequence))
    for label, of in (("lowest", min), ("highest", max)):
        columns = zip(*sequences.values(), strict=True)
        print(f"{label:8}" + "".join(f"{of(column):16.1%}" for column in columns))


if __name__ == "__main__":
    main()
