"""A real training step of the example, and the package's part of its CPU time.

``python -m benchmarks.live_step FILE`` under a launcher with one process replays the example's
recorded rollouts on stock Megatron-Core and writes FILE. The package's time is what passes in its
functions, called from the example or from autograd, by ``sys.setprofile``, whose own cost is on
both sides. Then the time of comparing a large live model with what was read of it, which every
step does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "drgrpo"
sys.path.insert(0, str(EXAMPLE))

import torch  # noqa: E402
import train  # noqa: E402  puts the stand-ins for CUDA in place, so it is imported first

import megatron_lossagg  # noqa: E402
from benchmarks.rank_step import a_chunk  # noqa: E402
from benchmarks.timing import spread  # noqa: E402
from benchmarks.workloads import TOKEN_MEAN  # noqa: E402
from megatron_lossagg import LossAggregator, Options  # noqa: E402

PACKAGE = str(Path(megatron_lossagg.__file__).parent)
STAND_INS = str(Path(PACKAGE, "cpu"))
"""They are what a GPU does, not what the package does to a loss."""
STEPS, WARMUP = 20, 2
"""The first steps are left out."""
MODULES, ROUTERS, CHECKS = 50_000, 128, 200
"""Of the model whose live check is timed, and how often."""


class Profile:
    """Adds up the time between the outermost calls of the package's functions and their ends."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._outermost: FrameType | None = None
        self._began = 0.0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take an event of ``sys.setprofile``."""
        if event == "call" and self._outermost is None:
            file = frame.f_code.co_filename
            if file.startswith(PACKAGE) and not file.startswith(STAND_INS):
                self._outermost, self._began = frame, time.thread_time()
        elif event == "return" and frame is self._outermost:
            self.seconds += time.thread_time() - self._began
            self._outermost = None


def share_of_time(run: Any) -> dict[str, Any]:
    """Replay under the profile; a step ends with the optimizer's."""
    profile, ends = Profile(), []
    step = train.OptimizerWithSchedule.step

    def step_and_look(self: Any) -> Any:
        result = step(self)
        ends.append((profile.seconds, time.thread_time()))
        return result

    with mock.patch.object(train.OptimizerWithSchedule, "step", step_and_look):
        sys.setprofile(profile)
        try:
            train.train_replay(run)
        finally:
            sys.setprofile(None)
    pairs = list(zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False))
    spent = [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]
    return {
        "share": spread([package / whole for package, whole in spent]),
        "package_ms": spread([package * 1e3 for package, _ in spent]),
        "step_ms": spread([whole * 1e3 for _, whole in spent]),
        "microbatches": run.args.num_microbatches,
    }


def live_check() -> dict[str, Any]:
    """Time reading a large model once, and often its check, which every step makes."""
    chunk = a_chunk()
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(MODULES - ROUTERS))
    for _ in range(ROUTERS):
        router = torch.nn.Identity()  # the flag is all that the check reads of a router
        router.calculate_per_token_loss = False
        layers.append(router)
    chunk.module.layers = layers
    started = time.thread_time()
    aggregator = LossAggregator(chunk, TOKEN_MEAN, options=Options(probe=False))
    read = time.thread_time() - started
    milliseconds = []
    for _ in range(CHECKS):
        started = time.thread_time()
        aggregator._run.frozen.check()
        milliseconds.append((time.thread_time() - started) * 1e3)
    return {"read_ms": read * 1e3, "check_ms": spread(milliseconds)}


def main(file: Path) -> None:
    """Replay some steps of the example, then time the live check."""
    with tempfile.TemporaryDirectory() as folder:
        args = train.parse_args(
            [
                *("--mode", "replay", "--steps", str(STEPS + WARMUP)),
                *("--num-microbatches", "2", "--output", f"{folder}/run"),
                *("--rollouts", str(EXAMPLE / "data" / "rollouts.jsonl")),
                *("--start-from", str(EXAMPLE / "data" / "warmup_weights.pt")),
            ]
        )
        train.start_processes(train.processes_of(args), args.seed)
        found = {"time": share_of_time(train.build_run(args)), "check": live_check()}
        train.stop_processes()
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
