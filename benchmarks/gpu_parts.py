"""The parts of ``make gpu``: each runs in processes of its own, for at most its time limit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Json = dict[str, Any]
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"

LATE = "no result in"
LIMITS = {"tests": 90, "verify": 120, "packed": 120, "megatron_lm": 90, "rows": 60}
"""Seconds of one run of a part's command. On a CPU, whose cores are slower, four times as much."""
LAYOUTS = {
    "DP 2 x CP 2": ["--dp", "2", "--cp", "2"],
    "CP 2 x PP 2": ["--cp", "2", "--pp", "2"],
    "TP 2": ["--tp", "2", "--sequence-parallel"],
}
ON_CPU = ("TP 2",)
"""The layouts that are tried on a CPU."""
ROUNDINGS = 3
"""How many of bf16's roundings two gradients of one loss may be apart."""
SFT = shlex.split(
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 "
    "--lr 1e-3 --lr-decay-style constant --split 90,5,5 --eval-iters 1 --eval-interval 100 "
    "--log-interval 1 --num-workers 0 --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --no-gradient-accumulation-fusion --sft "
    "--no-create-attention-mask-in-dataloader --tokenizer-type SFTTokenizer "
    "--sft-tokenizer-prompt-format nemotron-h-aligned"
)
ON_A_CPU = shlex.split(
    "--transformer-impl local --distributed-backend gloo --no-persist-layer-norm "
    "--no-masked-softmax-fusion"
)
ON_A_GPU = shlex.split(
    "--transformer-impl transformer_engine --position-embedding-type rope --no-rope-fusion --bf16"
)


def run_tests(output: Path, *, on_cpu: bool) -> Json:
    """Run every test marked ``gpu``; only the files that have one, for what they import."""
    if on_cpu:
        return part(NOT_RUN, "needs a GPU")
    if not installed("pytest"):
        return part(NOT_RUN, "pytest is not installed: pip install pytest")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(file) for file in files if "mark.gpu" in file.read_text()]
    junit = output / "tests.xml"
    junit.unlink(missing_ok=True)
    command = ["-m", "pytest", "-m", "gpu", "-W", "default", "-ra", "-p", "no:cacheprovider"]
    ended = logged([*command, f"--junitxml={junit}", *marked], output / "tests.txt", "tests")
    return part(FAILED, ended) if LATE in ended else tests_of(junit, passed=not ended)


def tests_of(junit: Path, *, passed: bool) -> Json:
    """Read pytest's results; nothing passed means that nothing was tested."""
    if not junit.exists():
        return part(FAILED, "pytest ended before it had results: tests.txt")
    cases = []
    for case in ElementTree.parse(junit).iter("testcase"):
        ended = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        reason = "" if ended is None else ended.get("message", "")
        outcome = "passed" if ended is None else "skipped" if ended.tag == "skipped" else "failed"
        cases.append({"test": case.get("name"), "outcome": outcome, "reason": reason})
    counts = {o: sum(c["outcome"] == o for c in cases) for o in ("passed", "failed", "skipped")}
    reason = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    verdict = FAILED if not passed else PASSED if counts["passed"] else NOT_RUN
    return {**part(verdict, reason), **counts, "cases": cases, "partition": partition_of(cases)}


def partition_of(cases: list[Json]) -> str:
    """Say whether Transformer Engine's partition was compared with ``Layout``."""
    its = [case for case in cases if case["test"].startswith("test_transformer_engine_slices")]
    if any(case["outcome"] == "failed" for case in its):
        return "differs from Layout.thd_zigzag"
    if any(case["outcome"] == "passed" for case in its):
        return "equal to Layout.thd_zigzag"
    return f"not compared: {its[0]['reason'] if its else 'the test was not found'}"


def run_verify(name: str, output: Path, *, on_cpu: bool) -> Json:
    """Run ``lossagg verify`` in one layout, on ranks that share the GPUs of this machine."""
    if not installed("rich"):
        return part(NOT_RUN, "rich is not installed: pip install rich")
    if on_cpu and name not in ON_CPU:
        return part(NOT_RUN, "needs a GPU")
    file = output / f"verify_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
    file.unlink(missing_ok=True)
    command = ["-m", "megatron_lossagg", "verify", *LAYOUTS[name], *["--gpu"] * (not on_cpu)]
    command += ["--json", str(file), "--markdown", str(file.with_suffix(".md"))]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    ended = logged(command, file.with_suffix(".txt"), "verify", hidden, on_cpu=on_cpu)
    files = [file.with_suffix(suffix).name for suffix in (".json", ".md", ".txt")]
    if not file.exists():
        return {**part(FAILED, ended or "no report was written"), "files": files}
    report = json.loads(file.read_text())
    cases = sum(verdict["passed"] for verdict in report["verdicts"])
    reason = f"{', '.join(report['layouts'])}: {cases} of {report['num_verdicts']} cases"
    if report["ranks_per_gpu"] > 1:
        reason += f", up to {report['ranks_per_gpu']} ranks on one GPU"
    verdict = PASSED if report["passed"] and not ended else FAILED
    return {**part(verdict, reason), "files": files}


def run_packed(output: Path, *, on_cpu: bool) -> Json:
    """Compare the gradients of packed sequences at CP 1 and CP 2."""
    if not on_cpu and not installed("transformer_engine"):
        return part(NOT_RUN, "Transformer Engine is not installed")
    found = {}
    for cp in (1, 2):
        file = output / f"packed_cp{cp}.pt"
        file.unlink(missing_ok=True)
        command = ["-m", "benchmarks.gpu_packed", str(file), "--cp", str(cp)]
        command += ["--cpu"] * on_cpu
        log = file.with_suffix(".txt")
        ended = logged(command, log, "packed", ranks=2, on_cpu=on_cpu)
        if ended:
            return part(FAILED, f"CP {cp}: {ended}")
        import torch

        found[cp] = torch.load(file)
    return judged(found)


def judged(found: dict[int, Json]) -> Json:
    """Judge the gradients of CP 1 and CP 2: ``LOSSES`` of ``gpu_packed`` by layout."""
    one, two = found[1]["gradients"], found[2]["gradients"]
    rounding = max(apart(of["hand"], of["rounded"]) for of in (one, two))
    numbers = {
        "rounding": rounding,
        "by hand": max(apart(of["hand"], of["sample_mean"]) for of in (one, two)),
        "mode": apart(one["sample_mean"], two["sample_mean"]),
        "stock": apart(one["stock"], two["stock"]),
    }
    bound = ROUNDINGS * rounding
    is_right = numbers["mode"] <= bound and numbers["by hand"] <= bound < numbers["stock"]
    reason = (
        f"{found[1]['attention']}: CP 1 and CP 2 are apart by {numbers['mode']:.2%} under the mode "
        f"and {numbers['stock']:.1%} under stock; by hand {numbers['by hand']:.2%}; bf16 rounds by "
        f"{rounding:.2%}; host time in loss_func, ms: "
        + ", ".join(f"{n} {c['loss_func_ms']:.2f}" for n, c in found[1]["costs"].items())
    )
    costs = {f"CP {cp}": of["costs"] for cp, of in found.items()}
    return {**part(PASSED if is_right else FAILED, reason), "apart": numbers, "costs": costs}


def apart(one: Any, other: Any) -> float:
    """Return the norm of the difference of two gradients, relative to the first."""
    return float((one - other).norm() / one.norm())


def run_megatron_lm(output: Path, *, on_cpu: bool) -> Json:
    """Weigh ``pretrain_gpt.py --sft`` at DP 2 and CP 2, stock and under a mode."""
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout:
        return part(NOT_RUN, "MEGATRON_LM names no checkout of Megatron-LM")
    missing = [m for m in ("transformers", "tokenizers", "datasets") if not installed(m)]
    if missing:
        return part(NOT_RUN, f"not installed: {', '.join(missing)}")
    data = output / "sft"
    make = [str(ROOT / "tests" / "frameworks" / "megatron_lm" / "make_sft_data.py"), str(data), "5"]
    if ended := logged(make, output / "sft.txt", "megatron_lm", on_cpu=on_cpu):
        return part(FAILED, f"its data: {ended}")
    script = Path(checkout) / "pretrain_gpt.py"
    options = [*SFT, *(ON_A_CPU if on_cpu else ON_A_GPU)]
    if "--legacy-tokenizer" in (script.parent / "megatron/training/arguments.py").read_text():
        options.append("--legacy-tokenizer")
    options += ["--tokenizer-model", str(data / "tokenizer")]
    options += ["--data-path", str(data / "data.jsonl")]
    said, wrong = [], []
    for layout, sizes in {"DP 2": [], "CP 2": ["--context-parallel-size", "2"]}.items():
        for mode in (None, "sample_mean"):
            name = f"megatron_lm_{layout.replace(' ', '').lower()}_{mode or 'stock'}"
            file = output / f"{name}.json"
            file.unlink(missing_ok=True)
            command = ["-m", "megatron_lossagg", "weigh", "--json", str(file)]
            command += [*["--cpu"] * on_cpu, str(script), *options, *sizes]
            command += ["--loss-aggregation", mode] if mode else []
            paths = {"PYTHONPATH": os.pathsep.join([checkout, os.environ.get("PYTHONPATH", "")])}
            ended = logged(
                command, file.with_suffix(".txt"), "megatron_lm", paths, ranks=2, on_cpu=on_cpu
            )
            if ended or not file.exists():
                return part(FAILED, f"{layout}, {mode or 'stock'}: {ended or 'no report'}")
            (step,) = json.loads(file.read_text())["steps"]
            norm = re.search(r"grad norm: ([0-9.]+)", file.with_suffix(".txt").read_text())
            said.append(
                f"{layout} {mode or 'stock'} trains {step['trains'] or 'no mode'}, gradient norm "
                f"{norm[1] if norm else 'not logged'}"
            )
            if mode is not None and step["trains"] != mode:
                wrong.append(layout)
    return part(FAILED if wrong else PASSED, "; ".join(said))


def run_rows(output: Path, *, on_cpu: bool) -> Json:
    """Measure the GPU rows."""
    if on_cpu:
        return part(NOT_RUN, "needs a GPU")
    file = output / "rows.json"
    file.unlink(missing_ok=True)
    if ended := logged(["-m", "benchmarks.gpu_rows", str(file)], output / "rows.txt", "rows"):
        return part(FAILED, ended)
    found = json.loads(file.read_text())
    synced = [f"{row['tokens']} {row['dtype']}" for row in found["rows"] if row["sync"]]
    if synced:
        return {**part(FAILED, f"waits for the device: {', '.join(synced)}"), **found}
    reason = "" if found["goal_reached"] else "the bandwidth goal was missed"
    return {**part(PASSED, reason), **found}


def installed(package: str) -> bool:
    """Tell whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def part(verdict: str, reason: str = "") -> Json:
    """Start a part's result."""
    return {"verdict": verdict, "reason": reason}


def logged(
    arguments: list[str],
    log: Path,
    limit: str,
    environment: dict[str, str] | None = None,
    *,
    ranks: int = 0,
    on_cpu: bool = False,
) -> str:
    """Run a Python command of this checkout; print and keep its output; say why it failed, if so.

    ``limit``: the part whose ``LIMITS`` hold; after it the command is ended, with all that it
    started. ``ranks``: as many processes of it, that share this machine's GPUs.
    """
    seconds = LIMITS[limit] * (4 if on_cpu else 1)
    environment = environment or {}
    given = filter(None, [environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH"))])
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), *given])
    # Megatron-LM's make builds a helper by the first python3 that it finds.
    own = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = [sys.executable, *arguments]
    if ranks:
        command = [str(ROOT / "launch" / "shared_gpu.sh"), str(ranks), *command]
        environment |= {"NUM_GPUS": str(ranks), "GLOO_SOCKET_IFNAME": "lo"} if on_cpu else {}
    with log.open("w+") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "PATH": own,
                "PYTHONPATH": path,
                **environment,
            },
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            end(process)
        out.seek(0)
        print(out.read()[-6000:], flush=True)
    if late:
        return f"{LATE} {seconds} s: {log.name}"
    return f"exit status {process.returncode}: {log.name}" if process.returncode else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started: TERM, which launchers pass on, and KILL after 10 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


PARTS: dict[str, Callable[..., Json]] = {
    "tests": run_tests,
    **{f"verify {name}": partial(run_verify, name) for name in LAYOUTS},
    "packed": run_packed,
    "megatron_lm": run_megatron_lm,
    "rows": run_rows,
}
