"""Ways to pass a microbatch and its losses, all of which train the same."""

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from training_steps import microbatch, right

from megatron_lossagg.verify.parallelism import Parallelism


def kept(value):
    return value


def passing(*, sequences=kept, mask=kept, offsets=kept, losses=kept, after=None, tolerance=1e-10):
    """Return a loss_func that changes what it passes, and how exact its gradient is."""

    def loss_func(step, batch, x):
        given_mask, given_losses = mask(batch.mask.clone()), losses(x)
        given = {"cu_seqlens": offsets(batch.offsets)}
        mb = step.microbatch(sequences(batch.sequences), given_mask, **given)
        if after is not None:
            after(given_mask)
        return mb.outputs(mb.reduce(given_losses))

    return loss_func, tolerance


def zero_length(batch_sequences):
    return [*batch_sequences[:1], -1, *batch_sequences[1:]]


def with_zero_length(offsets):
    return torch.cat([offsets[:2], offsets[1:]])


def strided(value):
    """Return the same values in every second place of a storage."""
    return torch.stack([value, value], dim=1)[:, 0]


def whole_in_a_checkpoint(is_reentrant):
    def loss_func(step, batch, x):
        made = []

        def loss(y):
            made.append(right(step, batch, y * 1.0))
            return made[-1][0]

        checkpointed = checkpoint(loss, x, use_reentrant=is_reentrant)
        return checkpointed, made[0][1], made[0][2]

    return loss_func, 1e-10


def in_autocast(step, batch, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return right(step, batch, x)


def with_nonfinite_masked(step, batch, x):
    """Losses at masked positions are inf and NaN."""
    mb = microbatch(step, batch)
    is_masked = batch.mask_here == 0
    bad = torch.where(torch.arange(len(x)) % 2 == 0, torch.inf, torch.nan).to(x)
    return mb.outputs(mb.reduce(torch.where(is_masked, bad, x)))


def made_twice(step, batch, x):
    """As a retry after an error of the device's memory: microbatch made and reduced twice."""
    microbatch(step, batch).reduce(x)
    return right(step, batch, x)


def sliced_by_the_loop(step, batch, x):
    lengths = batch.offsets.diff() // step._groups.cp_size
    mb = step.microbatch(batch.sequences, batch.mask_here, lengths=lengths)
    return mb.outputs(mb.reduce(x))


def with_positions(step, batch, x):
    """Position ids by a split that shares no code with the layout."""
    groups = step._groups
    split = Parallelism(cp=groups.cp_size)
    here = torch.tensor(split.held(batch.offsets.tolist(), groups.cp_rank))
    given = {"cu_seqlens": batch.offsets, "positions": here}
    mb = step.microbatch(batch.sequences, batch.mask, **given)
    return mb.outputs(mb.reduce(x))


def without_the_tail(step, batch, x):
    mb = step.microbatch(batch.sequences[:-1], batch.mask, cu_seqlens=batch.offsets[:-1])
    return mb.outputs(mb.reduce(x))


def uint64_without_the_tail(step, batch, x):
    """The array's dtype has no -1 for a padding sequence."""
    sequences = np.array(batch.sequences[:-1], dtype=np.uint64)
    mb = step.microbatch(sequences, batch.mask, cu_seqlens=batch.offsets[:-1])
    return mb.outputs(mb.reduce(x))


def near_the_largest_half(x):
    """Return float16 losses of 60,000, whose sum overflows."""
    losses = (x + (60_000 - x).detach()).half()
    assert losses.isfinite().all()
    assert losses.sum().isinf()
    return losses


def num_tokens_of_another_dtype(step, batch, x):
    loss, num_tokens, report = right(step, batch, x)
    return loss, num_tokens.long(), report


def overwritten_after(step, batch, x):
    """As a logger that works in place."""
    losses = x * 1.0
    mb = microbatch(step, batch)
    partial_loss = mb.reduce(losses)
    losses.data.zero_()
    return mb.outputs(partial_loss)


VARIED = {
    "sequences: tensors in a list": passing(sequences=lambda s: [torch.tensor(i) for i in s]),
    "sequences: an int32 tensor": passing(sequences=lambda s: torch.tensor(s, dtype=torch.int32)),
    "sequences: a generator": passing(sequences=iter),
    "sequences: an int8 array": passing(sequences=lambda s: torch.tensor(s).char().numpy()),
    "sequences: a uint64 array, CP 1": (uint64_without_the_tail, 1e-10),
    "offsets: int16": passing(offsets=lambda o: o.short()),
    "offsets: int64": passing(offsets=lambda o: o.long()),
    "offsets: [1, n]": passing(offsets=lambda o: o[None]),
    "offsets: a list": passing(offsets=lambda o: o.tolist()),
    "a zero-length segment": passing(sequences=zero_length, offsets=with_zero_length),
    "position ids": (with_positions, 1e-10),
    "a tail that no segment has, CP 1": (without_the_tail, 1e-10),
    "mask: bool": passing(mask=lambda m: m.bool()),
    "mask: bool, of bytes that are 2": passing(mask=lambda m: (m.byte() * 2).view(torch.bool)),
    "mask: float32": passing(mask=lambda m: m.float()),
    "mask: bfloat16": passing(mask=lambda m: m.bfloat16()),
    "mask: uint8": passing(mask=lambda m: m.byte()),
    "mask: [1, n]": passing(mask=lambda m: m[None]),
    "mask: [n, 1]": passing(mask=lambda m: m[:, None]),
    "mask: strided": passing(mask=strided),
    "mask: labels other than -100": passing(mask=lambda m: torch.where(m > 0, 5, -100) != -100),
    "mask: overwritten": passing(after=lambda m: m.zero_()),
    "mask: bool, overwritten": passing(mask=lambda m: m.bool(), after=lambda m: m.zero_()),
    "mask: longer, zeros after, CP 1": passing(
        mask=lambda m: torch.cat([m, torch.zeros(3, dtype=m.dtype)])
    ),
    "mask: sliced by the loop": (sliced_by_the_loop, 1e-10),
    "losses: [1, n]": passing(losses=lambda x: x[None]),
    "losses: [n, 1]": passing(losses=lambda x: x[:, None]),
    "losses: strided": passing(losses=strided),
    "losses: float32": passing(losses=lambda x: x.float(), tolerance=1e-5),
    "losses: bfloat16": passing(losses=lambda x: x.bfloat16(), tolerance=1e-2),
    "losses: float16": passing(losses=lambda x: x.half(), tolerance=1e-2),
    "losses: float16, of 60,000": passing(losses=near_the_largest_half, tolerance=1e-2),
    "losses: overwritten": (overwritten_after, 1e-10),
    "losses: inf and NaN where masked": (with_nonfinite_masked, 1e-10),
    "losses: recomputed": passing(
        losses=lambda x: checkpoint(lambda y: y * 1.0, x, use_reentrant=False)
    ),
    "losses: recomputed, reentrant": passing(
        losses=lambda x: checkpoint(lambda y: y * 1.0, x, use_reentrant=True)
    ),
    "all recomputed": whole_in_a_checkpoint(False),
    "all recomputed, reentrant": whole_in_a_checkpoint(True),
    "autocast": (in_autocast, 1e-2),
    "made twice": (made_twice, 1e-10),
    "num_tokens of int64": (num_tokens_of_another_dtype, 1e-10),
}
"""A loss_func and the relative error that its gradient may have."""
