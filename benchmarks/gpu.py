"""Everything that needs a GPU, by one command: ``make gpu``.

From a bare checkout with torch, rich and a megatron-core wheel on the path; nothing of this
repository has to be installed. One card is enough: ranks share it. Each part has a time limit and
a verdict of its own (``PARTS``), so that one failure hides nothing:

- tests: every test marked ``gpu``, Transformer Engine's partition of packed sequences against
  ``Layout`` among them where it can be imported; needs pytest
- verify: ``lossagg verify`` at DP 2 x CP 2, CP 2 x PP 2, and TP 2 with sequence parallelism
- packed: a GPT with Transformer Engine's attention over packed sequences in bf16: under a mode the
  gradient at CP 2 is that at CP 1 within bf16's rounding, which is measured, and under stock not;
  the host time in ``loss_func`` next to stock's, host syncs and kernels of a step
- megatron_lm: ``pretrain_gpt.py --sft`` at DP 2 and CP 2, stock and under a mode, weighed; needs
  MEGATRON_LM, the folder of a checkout
- rows: time by CUDA events against the measured copy bandwidth, kernels, host syncs

Writes ``gpu.json`` and ``summary.md``, which state device, driver and versions, and the parts'
logs to ``--output``, by default ``$OUT`` or ``runs/gpu``. Exit status: 0 all passed, 1
a part failed or could not be run, 2 no CUDA. ``--cpu`` runs what a CPU can, with stand-ins and
gloo, to try the command: the rest is then reported as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.gpu_parts import FAILED, NOT_RUN, PARTS, PASSED, ROOT, Json

NO_CUDA = 2


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("OUT") or ROOT / "runs" / "gpu")
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER")
    parser.add_argument("--only", choices=[*PARTS], help="one part instead of all")
    parser.add_argument("--cpu", action="store_true", help="only what needs no GPU")
    args = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        print("torch is not installed: put it on the path, built for CUDA", file=sys.stderr)
        return NO_CUDA
    if not args.cpu and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no CUDA device: run this on a machine with a GPU and "
            "a torch built for CUDA; `make bench` and `make test` need none",
            file=sys.stderr,
        )
        return NO_CUDA
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Json] = {}
    for name, run in PARTS.items():
        if args.only in (None, name):
            print(f"== {name}", flush=True)
            parts[name] = run(output, on_cpu=args.cpu)
            print(f"{name}: {parts[name]['verdict']}: {parts[name]['reason']}", flush=True)
    verdict = overall(parts, on_cpu=args.cpu)
    write(output, verdict, parts, on_cpu=args.cpu)
    for name, found in parts.items():
        print(f"{name}: {found['verdict']}{', ' * bool(found['reason'])}{found['reason']}")
    print(f"{verdict}; {output / 'summary.md'}")
    return 0 if verdict == PASSED else 1


def overall(parts: dict[str, Json], *, on_cpu: bool) -> str:
    """Judge the run: a part that did not run is not a pass, but for those that need a GPU."""
    verdicts = {part["verdict"] for part in parts.values()}
    if FAILED in verdicts:
        return FAILED
    if on_cpu:
        return PASSED if PASSED in verdicts else NOT_RUN
    return NOT_RUN if NOT_RUN in verdicts else PASSED


def write(output: Path, verdict: str, parts: dict[str, Json], *, on_cpu: bool) -> None:
    """Write the result as JSON and in Markdown."""
    from benchmarks import gpu_result

    result = {
        "verdict": verdict,
        "on_cpu": on_cpu,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": gpu_result.machine(),
        "parts": parts,
    }
    (output / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "summary.md").write_text(gpu_result.markdown(result), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
