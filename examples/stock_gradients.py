"""The gradient of stock Megatron-Core over DP, CP and the number of microbatches, on a CPU.

::

    python examples/stock_gradients.py

One step of two batches, under the loss_func of ``pretrain_gpt.py``, in both loss scalings. *One
token*: a sequence of 64 tokens whose loss mask selects its third one. *Unequal*: four sequences,
whose masks select 2, 60, 7 and 31 tokens. Prints by how much a gradient differs from that of the
mean over all tokens of the step, which one process computes without a schedule, and the ratio of
their norms. No loss aggregation of this package runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import packed_sft
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from packed_sft import Pack, by_hand, norm, run_schedule, set_weights, stock

import megatron_lossagg.cpu as cpu

LENGTH = 64
BATCHES = {"one token": [(2, 3)], "unequal": [(60, 62), (3, 63), (20, 27), (32, 63)]}
"""The trained tokens of each sequence: from, to."""
LAYOUTS = {1: [1], 2: [1, 2], 4: [1, 2, 4]}
"""The sizes of CP for each number of processes; the rest is data parallel."""


def packs_of(name: str, size: int) -> list[Pack]:
    """Draw a batch, ``size`` sequences in each microbatch."""
    random = torch.Generator().manual_seed(4)
    sequences = BATCHES[name]
    text = torch.randint(0, packed_sft.VOCABULARY, (len(sequences), LENGTH + 1), generator=random)
    mask = torch.zeros(len(sequences), LENGTH)
    for row, (begin, end) in enumerate(sequences):
        mask[row, begin:end] = 1
    return [
        Pack(
            token=text[first : first + size, :-1].flatten(),
            label=text[first : first + size, 1:].flatten(),
            mask=mask[first : first + size].flatten(),
            cu_seqlens=torch.arange(0, (size + 1) * LENGTH, LENGTH).int(),
        )
        for first in range(0, len(sequences), size)
    ]


def measured(name: str, size: int, *, per_token: bool) -> dict[str, Any] | None:
    """Run a step on this rank; None if its ranks would have no microbatch."""
    packs = packs_of(name, size)
    dp_size = parallel_state.get_data_parallel_world_size()
    if len(packs) % dp_size:
        return None
    plain = packed_sft.gpt(per_token=per_token)
    cpu.initialize_weights([plain], seed=1)
    (wanted,) = by_hand(plain, packs, ["token_mean"]).values()
    model = packed_sft._wrapped(packed_sft.gpt(per_token=per_token))
    set_weights(model, [parameter.detach() for parameter in plain.parameters()])
    model.zero_grad_buffer()
    run_schedule(model, packs[parallel_state.get_data_parallel_rank() :: dp_size], stock)
    found = [parameter.main_grad for parameter in model.parameters()]
    difference = [one - other for one, other in zip(found, wanted, strict=True)]
    return {
        "batch": name,
        "DP": dp_size,
        "CP": parallel_state.get_context_parallel_world_size(),
        "M": len(packs) // dp_size,
        "per_token": per_token,
        "differs": norm(difference) / norm(wanted),
        "norm": norm(found) / norm(wanted),
    }


def work(output: Path) -> None:
    """Measure every layout of this number of processes; rank 0 writes the rows."""
    dist.init_process_group("gloo")
    rows = []
    for cp_size in LAYOUTS[dist.get_world_size()]:
        parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
        model_parallel_cuda_manual_seed(1)
        for name, sequences in BATCHES.items():
            for size in sorted({1, len(sequences)}):
                rows += [measured(name, size, per_token=scaling) for scaling in (False, True)]
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        output.write_text(json.dumps([row for row in rows if row is not None]))
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write a line for each batch and layout."""
    lines = [
        f"{'batch':<11}{'DP':>3}{'CP':>3}{'M':>3}   {'default':>17}   "
        f"{'--calculate-per-token-loss':>26}",
        f"{'':<20}   {'differs':>9}{'norm':>8}   {'differs':>18}{'norm':>8}",
    ]
    by_layout: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        key = (row["batch"], row["DP"], row["CP"], row["M"])
        by_layout.setdefault(key, []).append(f"{row['differs']:9.1%}{row['norm']:8.4f}")
    for (name, *layout), (default, per_token) in sorted(by_layout.items()):
        numbers = "".join(f"{size:3}" for size in layout)
        lines.append(f"{name:<11}{numbers}   {default}   {'':>9}{per_token}")
    return "\n".join(lines)


def main() -> None:
    """Launch one, two and four processes, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for processes in LAYOUTS:
            output = Path(folder) / f"{processes}.json"
            command = [str(Path(__file__).resolve()), "--worker", str(output)]
            done = cpu.launch(command, processes=processes, timeout=600)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            rows += json.loads(output.read_text())
    print(table(rows))


if __name__ == "__main__":
    main()
