"""The GPU rows of the benchmark: time against the measured copy bandwidth, kernels, host syncs.

Time is taken by CUDA events, kernels by the profiler; building, a call and its backward run under
``torch.cuda.set_sync_debug_mode("error")``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.counting import counted
from megatron_lossagg import Aggregation, Layout, Sequences, plan_step

TOKENS = {"64k": 2**16, "1M": 2**20, "4M": 2**22}
TOKENS_PER_ROW = 1024
WARMUP, REPEATS = 10, 50
COPIED_BYTES = 2**28
QUEUE_CYCLES = 10_000_000
"""About 5 ms of the device, longer than the host takes to launch a call."""
GOAL_AT_4M = 0.8
"""Of the copy bandwidth."""


def measure() -> dict[str, Any]:
    """Measure the rows on the first device, and print them."""
    torch.cuda.set_device(0)
    found: dict[str, Any] = {"copy_bytes_per_second": copy_bandwidth(), "rows": []}
    for name, num_tokens in TOKENS.items():
        for dtype in ("float32", "bfloat16"):
            row = {"tokens": name, "dtype": dtype, **a_call(num_tokens, dtype)}
            bandwidth = row["bytes_per_token"] * num_tokens / row["call_seconds"]
            row["of_copy_bandwidth"] = bandwidth / found["copy_bytes_per_second"]
            found["rows"].append(row)
            print(*(f"{name}: {value}" for name, value in row.items()), sep=", ", flush=True)
    at_4m = next(r for r in found["rows"] if (r["tokens"], r["dtype"]) == ("4M", "float32"))
    found["goal_reached"] = at_4m["of_copy_bandwidth"] >= GOAL_AT_4M
    print(f"goal: {GOAL_AT_4M:.0%} at 4M fp32 tokens, got {at_4m['of_copy_bandwidth']:.0%}")
    return found


def a_call(num_tokens: int, dtype: str) -> dict[str, Any]:
    """Time building and a call on one microbatch; its kernels; whether anything waited."""
    num_sequences = num_tokens // TOKENS_PER_ROW
    rows = range(num_sequences)
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(num_tokens, generator=generator) < 0.8).int()
    active = mask.view(num_sequences, TOKENS_PER_ROW).sum(1)
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=active))
    layout = Layout.local([TOKENS_PER_ROW] * num_sequences, cp_size=1, cp_rank=0)
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
    plan.check()
    return {
        **times,
        "sync": sync,
        "bytes_per_token": counts.bytes / num_tokens,
        "kernels_call": kernels(call),
        "kernels_build": kernels(build),
    }


def seconds(piece: Callable[[], object], *, queued: bool = True) -> float:
    """Median time between CUDA events around a piece of code.

    ``queued``: behind a kernel that keeps the device busy while the host launches the rest, so
    that the device's time comes out; without, the host's launches count where they are slower.
    """
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
    source = torch.ones(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds(lambda: target.copy_(source))


def kernels(piece: Callable[[], None]) -> dict[str, int]:
    """Names and counts of the kernels that a piece of code launches."""
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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure()))
