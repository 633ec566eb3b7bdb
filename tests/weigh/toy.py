"""A toy whose loss of token t is parameter t, so that a token's gradient is its weight.

Each data-parallel rank has two microbatches of one or two sequences. Needs Megatron-Core: workers
import it.
"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import engines
import numpy as np
import tiny_gpt
import token_model
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.verify.small_gpt import whole_gradient
from megatron_lossagg.weigh.weighing import Weighing

LENGTHS = (((3, 5), (4,)), ((2,), (6, 1)), ((1, 2), (3,)), ((4,), (2, 2)))
"""Of the sequences of each microbatch of each data-parallel rank."""
M = 2


class Sequence(SimpleNamespace):
    """rank, microbatch and number; tokens, their positions in the parameter; n_mb, b_mb, n."""


def sequences(lengths=LENGTHS, size=None):
    """Return the sequences of all ranks."""
    size, found, first = size or parallel_state.get_data_parallel_world_size(), [], 0
    for rank, of_rank in enumerate(lengths[:size]):
        for microbatch, of_microbatch in enumerate(of_rank):
            for number, n in enumerate(of_microbatch):
                sizes = {"n": n, "n_mb": sum(of_microbatch), "b_mb": len(of_microbatch)}
                place = {"rank": rank, "microbatch": microbatch, "number": number}
                found.append(Sequence(**place, tokens=range(first, first + n), **sizes))
                first += n
    return found


def total(found):
    return sum(one.n for one in found)


def own(found, microbatch=None, rank=None):
    """Return the sequences of this rank, or of one of its microbatches."""
    rank = parallel_state.get_data_parallel_rank() if rank is None else rank
    return [s for s in found if s.rank == rank and microbatch in (None, s.microbatch)]


def by_hand(found, weight_of):
    """Return the weight of each token; ``weight_of``: that of a sequence's tokens."""
    weights = np.zeros(total(found))
    for one in found:
        weights[list(one.tokens)] = weight_of(one)
    return weights


def tokens_of(found):
    return torch.tensor([t for one in found for t in one.tokens], dtype=torch.long)


def lengths_of(found):
    return [one.n for one in found]


def chunk_of(num_tokens, *, per_token=False, finalize=finalize_model_grads, ddp=None, **config):
    made = tiny_gpt.config_of(per_token=per_token, **config)
    made.finalize_model_grads_func = finalize
    if "data_parallel_sharding_strategy" in (ddp or {}):
        model = Held(made, num_tokens)
        chunk = engines.wrapped(made, model, unit=token_model.OneWeightPerToken, **ddp)
        if chunk.ddp_config.overlap_grad_reduce:  # as megatron.training does
            made.no_sync_func = chunk.no_sync
    else:
        chunk = token_model.wrapped(made, num_tokens, **(ddp or {}))
    chunk.zero_grad_buffer()
    return chunk


class Held(MegatronModule):
    """The toy's weights in a submodule, which Megatron-FSDP gathers and frees as a whole."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config, num_tokens):
        super().__init__(config)
        self.unit = token_model.OneWeightPerToken(num_tokens)

    def set_input_tensor(self, tensor):
        """Take nothing: there is one stage."""

    def forward(self, tokens):
        return self.unit(tokens)


def schedule(chunk, found, loss_func, weighing=None, passed=lambda mine: {}):
    """Run Megatron's schedule over this rank's microbatches, and listen if there is a weighing.

    ``loss_func``: from the losses and the sequences of a microbatch. ``passed``: to the weighing,
    from these sequences.
    """
    numbers = sorted({one.microbatch for one in own(found)})

    def forward_step(iterator, model):
        mine = own(found, next(iterator))
        losses = model(tokens_of(mine))
        if weighing is not None:
            losses = weighing.losses(losses, **{"lengths": lengths_of(mine), **passed(mine)})
        return losses, partial(loss_func, mine)

    run_batches(chunk, forward_step, numbers)


def run_batches(chunk, forward_step, batches, wrap=lambda schedule: schedule):
    wrap(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[chunk],
        num_microbatches=len(batches),
        seq_length=16,
        micro_batch_size=1,
        forward_only=False,
    )


def stock(mine, losses):
    """As Megatron-LM's loss_func."""
    return losses.sum(), torch.tensor(len(losses), dtype=torch.int), {}


def gradient_of(chunk):
    """Return the reduced gradient of each token, whatever part of it each rank has."""
    ((_, parameter),) = engine_of(chunk).parameters()
    return whole_gradient(chunk, parameter).double().numpy().copy()


def weighed_step(chunk, found, loss_func=stock, weighing=None):
    """Weigh a schedule call; return the weighing and the gradient."""
    weighing = weighing or Weighing([chunk], num_microbatches=M)
    with weighing:
        schedule(chunk, found, loss_func, weighing)
    return weighing, gradient_of(chunk)


def torch_step(
    found,
    loss_of,
    *,
    wrap=None,
    prepare=lambda ddp: None,
    syncs=lambda m: m == M - 1,
    forward=lambda ddp: ddp,
    end=lambda model: None,
):
    """Weigh a step under torch's DDP; return the weighing and the gradient.

    ``loss_of``: from the sequences and losses of a microbatch. ``syncs``: whether a microbatch
    reduces. ``prepare``, ``end``: called before the step, and inside of the block at its end.
    """
    model = token_model.OneWeightPerToken(total(found))
    ddp = torch.nn.parallel.DistributedDataParallel(model, **(wrap or {}))
    prepare(ddp)
    weighing = Weighing(ddp, num_microbatches=M)
    with weighing:
        for m in range(M):
            with nullcontext() if syncs(m) else ddp.no_sync():
                mine = own(found, m)
                losses = forward(ddp)(tokens_of(mine))
                loss_of(mine, weighing.losses(losses, lengths=lengths_of(mine))).backward()
        gradient = model.weight.grad.double().numpy().copy()
        end(model)
    return weighing, gradient


def world():
    return dist.get_world_size()
