"""The reference on a step whose sequences are assigned in turn to the microbatches."""

import torch

from megatron_lossagg.cli.explanation import EXPONENT
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.verify import reference_loss


def reference_value(
    mode,
    tokens,
    prompt,
    sample=None,
    losses=None,
    *,
    divisor,
    microbatches,
    dp,
    count_empty=True,
):
    """Compute the step's loss if every token of sequence i has the loss ``losses[i]``, or 1."""
    slots = [(rank, number) for number in range(microbatches) for rank in range(dp)]
    sequences = [
        {
            # A fully masked sequence has a token that does not count.
            "x": [torch.tensor(1.0 if losses is None else losses[i], dtype=torch.float64)]
            * max(n, 1),
            "counted": [1] * n or [0],
            "trained": [1] * n or [0],
            "sample": i if sample is None else sample[i],
            "prompt": prompt[i],
            "group": prompt[i],
            "microbatch": slots[i % len(slots)],
        }
        for i, n in enumerate(tokens)
    ]
    loss = reference_loss.step_loss(
        mode,
        sequences,
        divisor=divisor if MODES[mode].divisor != "none" else None,
        exponent=EXPONENT if MODES[mode].has_exponent else None,
        count_empty=count_empty,
        microbatches=[microbatches] * dp,
    )
    return float(loss)
