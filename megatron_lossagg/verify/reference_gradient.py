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
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron_lossagg.verify.parallelism import ModelShape
from megatron_lossagg.verify.step_data import TrainingSequence, make_sequences, padding_sequence


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

    def of_parameter(self, flat_HP: Tensor, name: str) -> Tensor:
        """Slice one parameter out of flat gradients ``[H, P]``: ``[H, *shape]``."""
        sizes = [math.prod(shape) for shape in self.parameters.values()]
        parts = dict(zip(self.parameters, torch.split(flat_HP, sizes, dim=1), strict=True))
        return parts[name].reshape(-1, *self.parameters[name])

    def size_of_terms(self, slopes_HY: Tensor, name: str) -> Tensor:
        """Root of the sum of squares of a parameter's terms over tokens, ``[H]``.

        The rounding of the terms is relative to it, even if their sum is nearly 0.
        """
        return (slopes_HY.square() @ self._squared_norms_Y[name]).sqrt()

    def size_of_loss_terms(self, slope_Y: Tensor) -> float:
        """A tenth of the same of the loss: its rounding is so much smaller than a gradient's.

        Relative to the whole, half a loss would pass in bfloat16.
        """
        return 0.1 * float((slope_Y * self.losses_Y).norm())

    @cached_property
    def _squared_norms_Y(self) -> dict[str, Tensor]:
        names = self.parameters
        return {
            n: self.of_parameter(self.gradients_YP, n).flatten(1).square().sum(1) for n in names
        }


def compute(shape: ModelShape, *, copies: int, padded: int) -> Reference:
    """Compute the reference on this rank only, if Megatron's groups split no model."""
    import megatron_lossagg.cpu as cpu
    from megatron_lossagg.verify.small_gpt import reference_model
    from megatron_lossagg.verify.world import device

    model = reference_model(shape)
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    if shape.bf16:
        for parameter in named.values():
            parameter.data.copy_(parameter.data.bfloat16())
    sequences = make_sequences(copies)
    losses, gradients = [], []
    for sequence in [*sequences, padding_sequence(padded)]:
        fill = [0] * (-len(sequence) % padded)
        tokens = torch.tensor(sequence.tokens + fill, device=device())
        labels = torch.tensor(sequence.labels + fill, device=device())
        position = torch.arange(len(tokens), device=device())
        logits = model(tokens[None], position[None], None)[0]
        sequence_losses = -torch.log_softmax(logits, dim=-1)[position, labels]
        losses.append(sequence_losses.detach().cpu())
        # Row i of the identity selects the loss of token i.
        by_parameter = torch.autograd.grad(
            sequence_losses,
            list(named.values()),
            torch.eye(len(tokens), dtype=torch.float64, device=device()),
            is_grads_batched=True,
            materialize_grads=True,
        )
        gradients.append(torch.cat([of_one.flatten(1) for of_one in by_parameter], dim=1).cpu())
    return Reference(
        sequences=sequences,
        padded=padded,
        losses_Y=torch.cat(losses),
        gradients_YP=torch.cat(gradients),
        parameters={name: tuple(p.shape) for name, p in named.items()},
    )


def relative(got: float, want: float, terms: float = 0.0) -> float:
    """Return the error of a value, relative to it or to the size of its terms; inf if not finite.

    The rounding of the terms stays in their sum, even if that is nearly 0.
    """
    return abs(got - want) / max(abs(want), terms, 1e-30) if math.isfinite(got) else math.inf
