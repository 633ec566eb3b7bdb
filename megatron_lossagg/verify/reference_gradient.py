"""The reference: each token's loss and its gradient, on one process in float64.

The model runs on single unpacked sequences through Megatron-Core's own attention. A step's loss
is a function of the token losses y (``reference_loss.py``), so its gradient is, by the chain rule,
a combination of the tokens' gradients::

    d loss / d theta = sum_t (d loss / d y_t) * (d y_t / d theta)

The second factor does not depend on aggregation, layout or loss scaling: it is computed once, and
it also gives the gradient that a fault would train.

Shape suffixes: Y = tokens of all sequences and a padding sequence, padded; P = parameters of the
model.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from megatron_lossagg.cpu.launch import tied
from megatron_lossagg.verify.environment import unlaunched
from megatron_lossagg.verify.parallelism import ModelShape
from megatron_lossagg.verify.sequences import TrainingSequence, make_sequences, padding_sequence

__all__ = ["Reference", "compute", "reference", "reference_file"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """Token losses and their gradients under one model shape."""

    sequences: list[TrainingSequence]
    """The step's sequences."""
    padded: int
    """Sequences are padded to a multiple of this; the last sequence is a padding sequence of this
    length.
    """
    losses_Y: Tensor
    """float64: negative log-probability of each label."""
    gradients_YP: Tensor
    """float64: its derivative by every parameter."""
    parameters: dict[str, tuple[int, ...]]
    """Global name and whole shape, in the order of P."""

    @property
    def starts(self) -> list[int]:
        """The index in Y where each sequence begins; the padding sequence is the last."""
        lengths = (-(-len(sequence) // self.padded) * self.padded for sequence in self.sequences)
        return [0, *accumulate(lengths)]

    def gradient(self, slope_Y: Tensor) -> dict[str, Tensor]:
        """Return every parameter's gradient of a loss whose derivatives by y are ``slope_Y``."""
        flat_P = slope_Y @ self.gradients_YP
        return {name: self.of_parameter(flat_P[None], name)[0] for name in self.parameters}

    def of_parameter(self, flat_HP: Tensor, name: str) -> Tensor:
        """Slice one parameter out of flat gradients ``[H, P]``: ``[H, *shape]``."""
        begin, end = self._places[name]
        return flat_HP[:, begin:end].reshape(-1, *self.parameters[name])

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        ends = list(accumulate(math.prod(shape) for shape in self.parameters.values()))
        return dict(zip(self.parameters, zip([0, *ends], ends, strict=False), strict=True))


def compute(shape: ModelShape, *, copies: int, padded: int) -> Reference:
    """Compute the reference in this process, which has Megatron's groups of size 1."""
    import megatron_lossagg.cpu as cpu
    from megatron_lossagg.verify.model import reference_model

    model = reference_model(shape)
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    sequences = make_sequences(copies)
    losses, gradients = [], []
    for sequence in [*sequences, padding_sequence(padded)]:
        fill = [0] * (-len(sequence) % padded)
        tokens, labels = torch.tensor(sequence.tokens + fill), torch.tensor(sequence.labels + fill)
        position = torch.arange(len(tokens))
        logits = model(tokens[None], position[None], None)[0]
        sequence_losses = -torch.log_softmax(logits, dim=-1)[position, labels]
        losses.append(sequence_losses.detach())
        for loss in sequence_losses:
            by_parameter = torch.autograd.grad(
                loss, list(named.values()), retain_graph=True, allow_unused=True
            )
            flat = [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for p, g in zip(named.values(), by_parameter, strict=True)
            ]
            gradients.append(torch.cat(flat))
    return Reference(
        sequences=sequences,
        padded=padded,
        losses_Y=torch.cat(losses),
        gradients_YP=torch.stack(gradients),
        parameters={name: tuple(p.shape) for name, p in named.items()},
    )


def reference_file(folder: Path, shape: ModelShape, *, copies: int, padded: int) -> Path:
    """Return where a folder keeps the reference for sequences padded to ``padded``, or a
    multiple.
    """
    return folder / f"{shape.name}-{copies}-{padded}.pt"


def reference(shape: ModelShape, *, copies: int, padded: int, folder: Path) -> Reference:
    """Compute the reference in a process of its own, on the CPU; keep it in ``folder``.

    The caller's process may already be a rank of a job, whose groups the model would use.
    """
    file = reference_file(folder, shape, copies=copies, padded=padded)
    if not file.exists():
        # A rank's own rendezvous, and its GPU, are not the reference's.
        ours = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        sizes = (shape.num_layers, shape.num_heads, shape.num_experts)
        command = [sys.executable, "-m", __name__, *map(str, (*sizes, copies, padded)), str(file)]
        done = subprocess.run(
            tied(command), env={**unlaunched(), **ours}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the reference was not computed:\n{done.stderr[-4000:]}")
    return Reference(sequences=make_sequences(copies), **torch.load(file, weights_only=True))


def _main(arguments: list[str]) -> None:
    import torch.distributed as dist

    import megatron_lossagg.cpu as cpu

    cpu.install()
    from megatron.core import parallel_state

    num_layers, num_heads, num_experts, copies, padded = map(int, arguments[:5])
    torch.set_default_dtype(torch.float64)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    shape = ModelShape(num_layers=num_layers, num_heads=num_heads, num_experts=num_experts)
    result = compute(shape, copies=copies, padded=padded)
    partial = Path(arguments[5] + ".partial")
    torch.save({k: v for k, v in vars(result).items() if k != "sequences"}, partial)
    partial.rename(arguments[5])
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1:])
