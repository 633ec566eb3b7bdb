"""Everything that needs a GPU, by one command: ``python benchmarks/gpu.py``.

From a bare checkout with torch and a megatron-core wheel on the path; nothing of this
repository has to be installed. Runs every test marked ``gpu`` (where pytest is installed),
``lossagg verify`` on NCCL with one rank, and the GPU rows: time by CUDA events against the
measured copy bandwidth, kernels by the profiler, host syncs. Output goes to ``--output``, by
default ``$OUT`` or ``runs/gpu``. Exit status: 0 all passed, 1 something failed, 2 no CUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PARTS = ("tests", "verify", "rows")
NO_CUDA = 2

TOKENS = {"64k": 2**16, "1M": 2**20, "4M": 2**22}
TOKENS_PER_ROW = 1024
WARMUP, REPEATS = 10, 50
COPIED_BYTES = 2**28
QUEUE_CYCLES = 10_000_000
"""About 5 ms of the device, longer than the host takes to launch a call."""
GOAL_AT_4M = 0.8
"""Of the copy bandwidth."""
BYTES_FUSED = 9 + 8
"""Per token, what a fused kernel moves: the dispatch trace does not see into it."""


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("OUT") or ROOT / "runs" / "gpu")
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER")
    parser.add_argument("--only", choices=PARTS, help="one part instead of all three")
    args = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        print("torch is not installed: put it on the path, built for CUDA", file=sys.stderr)
        return NO_CUDA
    if not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no CUDA device: run this on a machine with a GPU and "
            "a torch built for CUDA; `make bench` and `make test` need none",
            file=sys.stderr,
        )
        return NO_CUDA
    args.output.mkdir(parents=True, exist_ok=True)
    passed = {}
    for part in PARTS:
        if args.only in (None, part):
            print(f"== {part}", flush=True)
            passed[part] = globals()[f"run_{part}"](args.output.resolve())
    print("  ".join(f"{part}: {verdict}" for part, verdict in passed.items()))
    return 1 if "FAILED" in passed.values() else 0


def run_tests(output: Path) -> str:
    """Run every test marked ``gpu``; only the files that have one, for what they import."""
    if importlib.util.find_spec("pytest") is None:
        return "skipped, pytest is not installed"
    files = sorted((ROOT / "tests").glob("test_*.py"))
    marked = [str(file) for file in files if "mark.gpu" in file.read_text()]
    command = ["-m", "pytest", "-m", "gpu", "-W", "default", "-ra", "-p", "no:cacheprovider"]
    return logged([*command, *marked], output / "tests.txt")


def run_verify(output: Path) -> str:
    """Run ``lossagg verify`` as the only rank of a launcher: NCCL on the first GPU."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if importlib.util.find_spec("rich") is None:
        return run_verify_without_tables(output, {**rank, **address})
    report = ["--json", str(output / "verify.json"), "--html", str(output / "verify.html")]
    command = ["-m", "megatron_lossagg", "verify", "--dp", "1", *report]
    return logged(command, output / "verify.txt", {**rank, **address})


def run_verify_without_tables(output: Path, environment: dict[str, str]) -> str:
    """Run the same verification by its ranks' module, where rich is not installed."""
    from megatron_lossagg.verify.cases import CASES
    from megatron_lossagg.verify.job import Job
    from megatron_lossagg.verify.parallelism import Parallelism

    job = Job(layouts=[Parallelism(dp=1)], cases=CASES)
    job_file, events = output / "verify_job.json", output / "verify_events.jsonl"
    job_file.write_text(job.to_json())
    events.unlink(missing_ok=True)
    command = ["-m", "megatron_lossagg.verify", str(job_file), str(events)]
    ran = logged(command, output / "verify.txt", environment)
    lines = events.read_text().splitlines() if events.exists() else []
    verdicts = [v for event in map(json.loads, lines) for v in event.get("verdicts", [])]
    failed = [v for v in verdicts if not v["passed"]]
    print(f"{len(verdicts) - len(failed)} of {job.num_rows} cases pass")
    return ran if len(verdicts) == job.num_rows and not failed else "FAILED"


def run_rows(output: Path) -> str:
    """Measure, print and write the GPU rows."""
    import torch

    torch.cuda.set_device(0)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "copy_bytes_per_second": copy_bandwidth(),
        "rows": [],
    }
    for name, num_tokens in TOKENS.items():
        for dtype in ("float32", "bfloat16"):
            row = {"tokens": name, "dtype": dtype, **a_call(num_tokens, dtype)}
            bandwidth = row["bytes_per_token"] * num_tokens / row["call_seconds"]
            row["of_copy_bandwidth"] = bandwidth / found["copy_bytes_per_second"]
            found["rows"].append(row)
            print(
                f"{name} {dtype}: build {row['build_seconds'] * 1e6:.0f} us, call forward + "
                f"backward {row['call_seconds'] * 1e6:.0f} us, {row['of_copy_bandwidth']:.0%} of "
                f"the copy bandwidth at {row['bytes_per_token']:.1f} bytes per token, floor "
                f"{row['floor_seconds'] * 1e6:.0f} us; with the host's launches "
                f"{row['call_seconds_with_launches'] * 1e6:.0f} against "
                f"{row['floor_seconds_with_launches'] * 1e6:.0f} us; host syncs "
                f"{row['sync'] or 'none'}"
            )
    (output / "rows.json").write_text(json.dumps(found, indent=1) + "\n")
    at_4m = next(r for r in found["rows"] if (r["tokens"], r["dtype"]) == ("4M", "float32"))
    print(f"goal: {GOAL_AT_4M:.0%} at 4M fp32 tokens, got {at_4m['of_copy_bandwidth']:.0%}")
    synced = any(row["sync"] for row in found["rows"])
    reached = at_4m["of_copy_bandwidth"] >= GOAL_AT_4M
    if synced:
        return "FAILED"
    return "passed" if reached else "measured, the bandwidth goal was missed"


def a_call(num_tokens: int, dtype: str) -> dict[str, Any]:
    """Time building and a call on one microbatch; its kernels; whether anything waited."""
    import torch

    from benchmarks.counting import counted
    from megatron_lossagg import Aggregation, Layout, Sequences, plan_step

    num_rows = num_tokens // TOKENS_PER_ROW
    rows = range(num_rows)
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(num_tokens, generator=generator) < 0.8).int()
    active = mask.view(num_rows, TOKENS_PER_ROW).sum(1)
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=active))
    layout = Layout.local([TOKENS_PER_ROW] * num_rows, cp_size=1, cp_rank=0)
    mask = mask.cuda()
    x = torch.randn(num_tokens, generator=generator).to("cuda", getattr(torch, dtype))
    x.requires_grad_()
    w = (torch.rand(num_tokens, generator=generator)).cuda()
    reducer = plan.reducer(rows, mask, layout)

    def call() -> None:
        torch.autograd.grad(reducer(x), x)

    def floor() -> None:
        torch.autograd.grad((x * w).sum(), x)

    def build() -> None:
        plan.reducer(rows, mask, layout)

    times = {
        "build_seconds": seconds(build),
        "call_seconds": seconds(call),
        "floor_seconds": seconds(floor),
        "call_seconds_with_launches": seconds(call, queued=False),
        "floor_seconds_with_launches": seconds(floor, queued=False),
    }
    sync = ""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        build()
        call()
    except RuntimeError as error:
        sync = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with counted() as counts:
        call()
    traced = counts.bytes / num_tokens
    plan.check()
    return {
        **times,
        "sync": sync,
        "bytes_per_token": traced if traced > BYTES_FUSED / 2 else float(BYTES_FUSED),
        "kernels_call": kernels(call),
        "kernels_build": kernels(build),
    }


def seconds(piece: Callable[[], object], *, queued: bool = True) -> float:
    """Median time between CUDA events around a piece of code.

    ``queued``: behind a kernel that keeps the device busy while the host launches the rest, so
    that the device's time comes out; without, the host's launches count where they are slower.
    """
    import torch

    for _ in range(WARMUP):
        piece()
    pairs = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if queued:
            torch.cuda._sleep(QUEUE_CYCLES)
        began.record()
        piece()
        ended.record()
        pairs.append((began, ended))
    torch.cuda.synchronize()
    times = sorted(began.elapsed_time(ended) / 1e3 for began, ended in pairs)
    return float(times[len(times) // 2])


def copy_bandwidth() -> float:
    """Bytes per second that a copy on the device reads and writes."""
    import torch

    source = torch.ones(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds(lambda: target.copy_(source))


def kernels(piece: Callable[[], None]) -> dict[str, int]:
    """Names and counts of the kernels that a piece of code launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    piece()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        piece()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    counts: dict[str, int] = {}
    for event in profiled.events():
        if event.device_type == on_device:
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def logged(arguments: list[str], log: Path, environment: dict[str, str] | None = None) -> str:
    """Run a Python command of this checkout; print and keep what it says."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *given])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    log.write_text(done.stdout)
    print(done.stdout[-6000:], flush=True)
    return "passed" if done.returncode == 0 else "FAILED"


if __name__ == "__main__":
    sys.exit(main())
