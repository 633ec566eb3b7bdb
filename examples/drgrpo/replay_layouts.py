"""Replay recorded rollouts at several layouts: one loss, one curve; asserted, not only drawn.

::

    python examples/drgrpo/replay_layouts.py --output runs/replay

trains the first 20 recorded steps at DP 2, CP 2 and PP 2 (two processes each), with 1, 2 and
4 microbatches, in float32. Under ``constant`` the largest relative difference between any two
of the nine runs, over all steps, of loss and gradient norm must stay below 1e-5. Under
``microbatch_token_mean``, which depends on the layout, the same data must differ by more than
1e-2: the comparison is able to see a difference.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lossagg.cpu import launch

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"

PROCESSES = 2
LAYOUTS = {
    "DP 2": [],
    "CP 2": ["--context-parallel-size", "2"],
    "PP 2": ["--pipeline-model-parallel-size", "2"],
}
MICROBATCHES = (1, 2, 4)
LARGEST_DIFFERENCE = 1e-5
SMALLEST_DIFFERENCE = 1e-2
NAMES = ("loss", "grad_norm")
LAYOUT_DEPENDENT = "microbatch_token_mean"
AGREES = {"constant": True, LAYOUT_DEPENDENT: False}
"""Each mode that is replayed, and whether layouts agree under it."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One replay."""

    mode: str
    layout: str
    num_microbatches: int
    steps: dict[str, list[float]]
    """``loss`` and ``grad_norm`` of each step."""


class LayoutsDifferError(AssertionError):
    """Layouts that should agree differ, or layouts that should differ agree."""


def replay_all(
    output: Path,
    *,
    rollouts: Path,
    weights: Path | None,
    num_steps: int,
    train_flags: Sequence[str],
) -> list[Curve]:
    """Run every replay, one launch per layout, and read the curves back."""
    shutil.rmtree(output, ignore_errors=True)
    flags = ["--mode", "replay", "--rollouts", str(rollouts), "--steps", str(num_steps)]
    flags += ["--start-from", str(weights)] if weights is not None else []
    for layout, layout_flags in LAYOUTS.items():
        folder = str(_layout_folder(output, layout))
        worker = [str(Path(__file__).resolve()), "--worker", "--output", folder]
        done = launch(
            [*worker, *flags, *train_flags, *layout_flags], processes=PROCESSES, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"the replay at {layout} failed:\n{done.stdout}{done.stderr}")
    return read_all(output)


def largest_difference(curves: Sequence[Curve], name: str) -> float:
    """Return the largest over steps of (highest - lowest) / highest magnitude over curves."""
    differences = []
    for values in zip(*(curve.steps[name] for curve in curves), strict=True):
        differences.append((max(values) - min(values)) / max(map(abs, values)))
    return max(differences)


def check(curves: Sequence[Curve]) -> None:
    """Raise :class:`LayoutsDifferError` unless the layouts agree where they should."""
    for mode, expected_equal in AGREES.items():
        of_mode = [curve for curve in curves if curve.mode == mode]
        for name in NAMES:
            difference = largest_difference(of_mode, name)
            if expected_equal and difference >= LARGEST_DIFFERENCE:
                raise LayoutsDifferError(
                    f"{mode}: {name} differs by {difference:.1e} between layouts, expected below "
                    f"{LARGEST_DIFFERENCE:g}"
                )
            if not expected_equal and difference <= SMALLEST_DIFFERENCE:
                raise LayoutsDifferError(
                    f"{mode}: {name} differs by {difference:.1e} between layouts, expected above "
                    f"{SMALLEST_DIFFERENCE:g}: record rollouts that distinguish the layouts"
                )


def verdict(curves: Sequence[Curve]) -> str:
    """Write in one line what the replays show, of the quantity that the picture shows."""
    number = len(LAYOUTS) * len(MICROBATCHES)
    apart = {
        mode: largest_difference([curve for curve in curves if curve.mode == mode], "grad_norm")
        for mode in AGREES
    }
    return (
        f"Gradient norms at {number} layouts: constant, one curve, differs by at most "
        f"{apart['constant']:.1e}; a mean of microbatch means, stock's rule, by up to "
        f"{apart[LAYOUT_DEPENDENT]:.0%}"
    )


def read_all(output: Path) -> list[Curve]:
    """Read the curves that the replays wrote."""
    return [
        _read_curve(output, mode, layout, m)
        for layout in LAYOUTS
        for mode in AGREES
        for m in MICROBATCHES
    ]


def table(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield one line per replay, then the largest differences."""
    width = max(map(len, AGREES))
    columns = "  layout  M   loss, first    loss, last  grad norm, first   grad norm, last"
    yield " " * width + columns
    for curve in curves:
        loss, norm = (curve.steps[name] for name in NAMES)
        yield (
            f"{curve.mode:<{width}}  {curve.layout:<6}  {curve.num_microbatches}  "
            f"{loss[0]:12.8f}  {loss[-1]:12.8f}  {norm[0]:16.8f}  {norm[-1]:16.8f}"
        )
    for mode, expected_equal in AGREES.items():
        of_mode = [curve for curve in curves if curve.mode == mode]
        loss, norm = (largest_difference(of_mode, name) for name in NAMES)
        limit = f"< {LARGEST_DIFFERENCE:g}" if expected_equal else f"> {SMALLEST_DIFFERENCE:g}"
        yield (
            f"{mode:<{width}}  largest relative difference over {len(of_mode)} layouts and "
            f"{len(of_mode[0].steps['loss'])} steps: loss {loss:.1e}, grad norm {norm:.1e} "
            f"(expected {limit})"
        )


def _mode_flags(mode: str) -> list[str]:
    # constant is the example's default, with its divisor.
    return [] if mode == "constant" else ["--loss-aggregation", mode]


def _layout_folder(output: Path, layout: str) -> Path:
    return output / layout.replace(" ", "").lower()


def _folder(of_layout: Path, mode: str, num_microbatches: int) -> Path:
    return of_layout / f"{mode}_m{num_microbatches}"


def _read_curve(output: Path, mode: str, layout: str, num_microbatches: int) -> Curve:
    path = _folder(_layout_folder(output, layout), mode, num_microbatches) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Curve(
        mode=mode,
        layout=layout,
        num_microbatches=num_microbatches,
        steps={name: [line[name] for line in lines] for name in NAMES},
    )


def _work(output: Path, train_flags: Sequence[str]) -> None:
    """Run one layout's replays one after the other; a rank of a launched job."""
    import train

    first = train.parse_args(["--output", str(output), *train_flags])
    train.start_processes(train.processes_of(first), first.seed)
    for mode in AGREES:
        for m in MICROBATCHES:
            folder = _folder(output, mode, m)
            flags = ["--output", str(folder), "--num-microbatches", str(m), *_mode_flags(mode)]
            train.train(train.parse_args([*train_flags, *flags]))
    train.stop_processes()


def main() -> None:
    """Replay, print the table, draw the picture, and fail where layouts disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.worker:
        _work(args.output, rest)
        return
    parser.add_argument("--rollouts", type=Path, default=DATA / "rollouts.jsonl")
    parser.add_argument("--start-from", type=Path, default=DATA / "warmup_weights.pt")
    parser.add_argument("--steps", type=int, default=20)
    args, train_flags = parser.parse_known_args()
    curves = replay_all(
        args.output,
        rollouts=args.rollouts,
        weights=args.start_from,
        num_steps=args.steps,
        train_flags=train_flags,
    )
    print("\n".join(table(curves)))
    import plots

    plots.plot_layouts(curves, args.output / "layouts.png")
    print(args.output / "layouts.png")
    try:
        check(curves)
    except LayoutsDifferError as error:
        sys.exit(f"replay_layouts.py: {error}")


if __name__ == "__main__":
    main()
