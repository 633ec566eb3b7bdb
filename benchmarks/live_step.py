"""A real training step of the example: the package's share of its time, its reads of a device.

And the time of comparing a large live model with what the contract has read of it.

``python -m benchmarks.live_step FILE [--steps N]`` under a launcher with one process replays
the example's recorded rollouts on stock Megatron-Core and writes FILE. The package's time is
that of its calls in a step and of their backward, taken between the gradient of a share and
the gradient of the losses that it was made of.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "drgrpo"
sys.path.insert(0, str(EXAMPLE))

import torch  # noqa: E402
import train  # noqa: E402  puts the stand-ins for CUDA in place, so it is imported first
from torch import Tensor  # noqa: E402

from benchmarks.counting import Counted, counted  # noqa: E402
from benchmarks.counts import tensors_of  # noqa: E402
from benchmarks.rank_step import a_chunk  # noqa: E402
from benchmarks.timing import Spread  # noqa: E402
from megatron_lossagg import (  # noqa: E402
    Aggregation,
    MegatronContract,
    Reducer,
    StepContract,
    StepPlan,
)

METHODS: dict[type, tuple[str, ...]] = {
    MegatronContract: ("step", "thd"),
    StepContract: ("returns", "close", "__enter__", "__exit__"),
    StepPlan: ("reducer", "under"),
    Reducer: ("__call__", "under"),
}
WARMUP = 2
"""First steps, which are left out."""
MODULES, ROUTERS, CHECKS = 50_000, 128, 200
"""Of the model whose live check is timed, and how often."""


class Clock:
    """Adds up the time of the outermost of nested calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps: list[tuple[float, float]] = []
        self._inside = False
        self._backward_began = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, started = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[name] += time.thread_time() - started

        return wrapped

    def with_backward(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a reducer's call so that its backward is timed too."""

        def began(gradient: Tensor) -> None:
            self._backward_began = time.thread_time()

        def ended(gradient: Tensor) -> None:
            self.seconds["backward"] += time.thread_time() - self._backward_began

        def wrapped(reducer: Reducer, x: Tensor) -> Tensor:
            share = call(reducer, x)
            if x.requires_grad and share.requires_grad:
                x.register_hook(ended)
                share.register_hook(began)
            return share

        return wrapped

    def whole_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what is one training step up to the optimizer's."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, started = sum(self.seconds.values()), time.thread_time()
            result = step(*args, **kwargs)
            taken = time.thread_time() - started
            self.steps.append((sum(self.seconds.values()) - before, taken))
            return result

        return wrapped


def share_of_time(run: Any) -> dict[str, Any]:
    """Replay with every call of the package timed."""
    clock = Clock()
    optimizer_seconds: list[float] = []
    with mock.patch.multiple(
        train,
        plan_step=clock.timed("plan_step", train.plan_step),
        rl_step=clock.whole_step(train.rl_step),
    ):
        patches = [
            mock.patch.object(kind, name, clock.timed(f"{kind.__name__}.{name}", method))
            for kind, names in METHODS.items()
            for name in names
            if (method := getattr(kind, name, None)) is not None
        ]
        for patch in patches:
            patch.start()
        timed_call = Reducer.__call__
        patches.append(mock.patch.object(Reducer, "__call__", clock.with_backward(timed_call)))
        patches[-1].start()
        step = train.OptimizerWithSchedule.step

        def optimizer_step(self: Any) -> Any:
            started = time.thread_time()
            result = step(self)
            optimizer_seconds.append(time.thread_time() - started)
            return result

        with mock.patch.object(train.OptimizerWithSchedule, "step", optimizer_step):
            train.train_replay(run)
        for patch in reversed(patches):
            patch.stop()
    pairs = zip(clock.steps, optimizer_seconds, strict=True)
    measured = [(package, taken + optimizer) for (package, taken), optimizer in pairs][WARMUP:]
    num_steps = len(clock.steps)
    return {
        "share": Spread.of([package / whole for package, whole in measured]).to_json(),
        "package_ms": Spread.of([package * 1e3 for package, _ in measured]).to_json(),
        "step_ms": Spread.of([whole * 1e3 for _, whole in measured]).to_json(),
        "steps": len(measured),
        "microbatches": run.args.num_microbatches,
        "ms_by_call": {k: v * 1e3 / num_steps for k, v in sorted(clock.seconds.items())},
    }


def reads(run: Any) -> dict[str, Any]:
    """Count reads and collectives in ``returns`` and ``close`` of one step, as on a device."""
    totals = {"returns": Counted(), "close": Counted()}
    calls = {"returns": 0, "close": 0}
    returns, close = StepContract.returns, StepContract.close

    def counted_returns(
        step: StepContract, share: Tensor, reducer: Reducer, *args: Any, **kwargs: Any
    ) -> Any:
        calls["returns"] += 1
        inputs = tensors_of([share, *tensors_of(reducer), *tensors_of((args, kwargs))])
        with counted(*inputs) as counts:
            result = returns(step, share, reducer, *args, **kwargs)
        _add(totals["returns"], counts)
        return result

    def counted_close(step: StepContract) -> Any:
        calls["close"] += 1
        with counted(*tensors_of(step.plan, depth=3)) as counts:
            result = close(step)
        _add(totals["close"], counts)
        return result

    with (
        mock.patch.object(StepContract, "returns", counted_returns),
        mock.patch.object(StepContract, "close", counted_close),
    ):
        train.train_replay(run)
    return {
        name: {
            "calls": calls[name],
            "reads": counts.num_reads,
            "collectives": counts.num_collectives,
            "operations_per_call": counts.num_operations / max(calls[name], 1),
        }
        for name, counts in totals.items()
    }


def live_check() -> dict[str, Any]:
    """Time ``MegatronContract.read`` once, and often its check, which every step makes."""
    chunk = a_chunk()
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(MODULES - ROUTERS))
    for _ in range(ROUTERS):
        router = torch.nn.Identity()  # the flag is all that the check reads of a router
        router.calculate_per_token_loss = False
        layers.append(router)
    chunk.module.layers = layers
    started = time.thread_time()
    contract = MegatronContract.read(chunk, aggregation=Aggregation("token_mean"), probe=False)
    read = time.thread_time() - started
    seconds = []
    for _ in range(CHECKS):
        started = time.thread_time()
        contract.check()
        seconds.append(time.thread_time() - started)
    return {
        "modules": MODULES,
        "read_ms": read * 1e3,
        "check_ms": Spread.of([second * 1e3 for second in seconds]).to_json(),
    }


def _add(total: Counted, counts: Counted) -> None:
    total.operations += counts.operations
    total.reads += counts.reads
    total.collectives += counts.collectives


def main() -> None:
    """Run the example twice: one step counted, ``--steps`` timed; then the live check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="0: count only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        def arguments(name: str, steps: int) -> argparse.Namespace:
            return train.parse_args(
                [
                    *("--mode", "replay", "--steps", str(steps), "--num-microbatches", "2"),
                    *("--output", f"{folder}/{name}"),
                    *("--rollouts", str(EXAMPLE / "data" / "rollouts.jsonl")),
                    *("--start-from", str(EXAMPLE / "data" / "warmup_weights.pt")),
                ]
            )

        args = arguments("count", 1)
        train.start_processes(train.processes_of(args), args.seed)
        found = {"counts": reads(train.build_run(args))}
        if options.steps:
            run = train.build_run(arguments("time", options.steps + WARMUP))
            found["time"] = share_of_time(run)
            found["check"] = live_check()
        train.stop_processes()
    options.file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
