"""Errors of shares against float64, and of CP 8 against CP 1, over sum abs(w x)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import baselines
from benchmarks.workloads import AGGREGATION, TOKEN_MEAN, Workload
from megatron_lossagg import Layout, StepPlan

SIZES = {
    "64k": (64, 1024),
    "1M": (1024, 1024),
    "4M short": (32768, 128),
    "4M long": (128, 32768),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOOP_UP_TO = 2**21  # tokens; the loop over samples takes seconds beyond
CP_SIZE = 8


def errors(names: list[str]) -> dict[str, Any]:
    """Measure the worst of two aggregations and of losses around zero and above it."""
    found: dict[str, Any] = {}
    for name in names:
        num_sequences, mean_tokens = SIZES[name]
        workload = Workload(name=name, num_sequences=num_sequences, mean_tokens=mean_tokens, seed=7)
        for type_name, dtype in TYPES.items():
            worst = {"error": 0.0, "cp": 0.0}
            loop_error = 0.0
            for positive in (False, True):
                x_P = _losses(workload, positive).to(dtype)
                for aggregation in (AGGREGATION, TOKEN_MEAN):
                    plan = workload.plan.under(aggregation)
                    exact, scale = _exact(workload, plan, x_P)
                    whole = _share(workload, plan, x_P, 1, 0)
                    parts = [_share(workload, plan, x_P, CP_SIZE, r) for r in range(CP_SIZE)]
                    worst["error"] = max(worst["error"], abs(whole - exact) / scale)
                    worst["cp"] = max(worst["cp"], abs(sum(parts) - whole) / scale)
                if workload.num_positions <= LOOP_UP_TO:
                    exact, scale = _exact(workload, workload.plan, x_P)
                    loop = baselines.SampleLoop(workload, baselines.denominators_of(workload))
                    loop_error = max(loop_error, abs(float(loop.sample_mean(x_P)) - exact) / scale)
            found[f"{name} {type_name}"] = {**worst, "loop": loop_error or None}
    return found


def _losses(workload: Workload, positive: bool) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    x_P = torch.randn(workload.num_positions, generator=generator)
    return x_P.abs() if positive else x_P


def _exact(workload: Workload, plan: StepPlan, x_P: Tensor) -> tuple[float, float]:
    response_S = torch.from_numpy(workload.response_S)
    w_P = torch.repeat_interleave(plan.weights, response_S) * workload.mask_P
    terms_P = w_P * x_P.double()
    return float(terms_P.sum()), float(terms_P.abs().sum())


def _share(workload: Workload, plan: StepPlan, x_P: Tensor, cp_size: int, cp_rank: int) -> float:
    layout = Layout.response_zigzag(
        workload.total_S, workload.response_S, cp_size=cp_size, cp_rank=cp_rank
    )
    reducer = plan.reducer(range(workload.num_sequences), workload.mask_P, layout)
    return float(reducer(x_P[layout.positions]))
