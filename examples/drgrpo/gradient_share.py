"""Measure which responses the gradient comes from, by length and by mode, on real gradients.

::

    torchrun --nproc_per_node 1 examples/drgrpo/gradient_share.py --output runs/share

The rollouts of a step are one step of training. For every mode, the step's gradient g is
taken once for each bucket of response lengths, with advantage 0 for all other sequences, which stay
counted: g_b.

    share of b = |g_b| / sum_c |g_c|        sums to 1 over buckets

It is the mean over the recorded steps; the weights are those that the file starts from, and the
loss is the policy term only. A bucket whose advantages in a step are all 0 has gradient 0. The
share of the active tokens that each bucket holds is printed below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
import train
from rollouts import Rollout, read_rollouts
from torch import Tensor

DATA = Path(__file__).resolve().parent / "data"
MODES = {
    "constant": [],
    "token_mean": ["--loss-aggregation", "token_mean"],
    "sample_mean": ["--loss-aggregation", "sample_mean"],
    "prompt_mean": ["--loss-aggregation", "prompt_mean"],
}
BUCKETS = ((1, 3), (4, 7), (8, 11), (12, 20))


def gradient(run: train.Run, rollouts: list[Rollout]) -> Tensor:
    """Return the whole gradient of a step, flat, in float64."""
    train.rl_step(run, rollouts)
    parts = [p.main_grad.detach().double().flatten() for p in run.model.parameters()]
    return torch.cat(parts)


def main() -> None:
    """Measure, print a table, write ``gradient_share.json`` and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rollouts", type=Path, default=DATA / "rollouts.jsonl")
    parser.add_argument("--start-from", type=Path, default=DATA / "warmup_weights.pt")
    parser.add_argument("--steps", type=int, default=20)
    own, train_flags = parser.parse_known_args()
    by_step = list(read_rollouts(own.rollouts).values())[: own.steps]
    flags = ["--mode", "replay", "--output", str(own.output), "--rollouts", str(own.rollouts)]
    flags += ["--start-from", str(own.start_from), "--kl-coefficient", "0", *train_flags]
    first = train.parse_args(flags)
    train.start_processes(train.processes_of(first), first.seed)
    runs = {
        mode: train.build_run(train.parse_args([*flags, *more])) for mode, more in MODES.items()
    }

    names = {bucket: f"{bucket[0]}-{bucket[1]}" for bucket in BUCKETS}
    shares = {mode: dict.fromkeys(names.values(), 0.0) for mode in MODES}
    for rollouts in by_step:
        for mode, run in runs.items():
            norms = {}
            for bucket in BUCKETS:
                only = [_only(rollout, bucket) for rollout in rollouts]
                if any(rollout.advantage for rollout in only):  # else all losses are constant
                    norms[names[bucket]] = float(gradient(run, only).norm())
            for name, norm in norms.items():
                shares[mode][name] += norm / sum(norms.values()) / len(by_step)
    train.stop_processes()

    tokens = token_shares([rollout for rollouts in by_step for rollout in rollouts])
    own.output.mkdir(parents=True, exist_ok=True)
    written = json.dumps({"norm": shares, "tokens": tokens}, indent=1) + "\n"
    (own.output / "gradient_share.json").write_text(written)
    print(f"{'length':<12}" + "".join(f"{name:>9}" for name in names.values()))
    for mode, by_bucket in shares.items():
        print(f"{mode:<12}" + "".join(f"{share:9.3f}" for share in by_bucket.values()))
    print(f"{'tokens':<12}" + "".join(f"{share:9.3f}" for share in tokens.values()))
    import plots

    plots.plot_gradient_share(shares, tokens, own.output / "gradient_share.png")
    print(own.output / "gradient_share.png")


def token_shares(rollouts: list[Rollout]) -> dict[str, float]:
    """Return the share of all active tokens that the responses of each bucket hold."""
    tokens = {
        f"{low}-{high}": sum(sum(r.mask) for r in rollouts if low <= len(r.mask) <= high)
        for low, high in BUCKETS
    }
    return {bucket: count / sum(tokens.values()) for bucket, count in tokens.items()}


def _only(rollout: Rollout, bucket: tuple[int, int]) -> Rollout:
    """Give a rollout of another length advantage 0: it stays counted and has no gradient."""
    low, high = bucket
    if low <= len(rollout.mask) <= high:
        return rollout
    return dataclasses.replace(rollout, advantage=0.0)


if __name__ == "__main__":
    main()
