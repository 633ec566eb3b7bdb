"""Steps with the loss_func of Megatron-LM's pretrain_gpt.py on the model of ``lossagg verify``.

For launched workers: it installs the CPU stand-ins.
"""

import megatron_lossagg.cpu as cpu

cpu.install()

import torch  # noqa: E402

from megatron_lossagg.verify.reference_gradient import Reference  # noqa: E402
from megatron_lossagg.verify.small_gpt import (  # noqa: E402
    config_of,
    forward,
    run_schedule,
    token_losses,
    wrapped_chunks,
)
from megatron_lossagg.verify.step_data import make_sequences  # noqa: E402
from megatron_lossagg.verify.train_step import Run  # noqa: E402


def run_of(layout, *, per_token=False, sequences=None):
    """Make a run to compare with stock, whose reference has sequences only."""
    nothing = Reference(
        sequences=make_sequences() if sequences is None else sequences,
        padded=4,
        losses_Y=torch.zeros(0),
        gradients_YP=torch.zeros(0, 0),
        parameters={},
    )
    return Run(layout, nothing, per_token=per_token)


def stock_model(layout, *, per_token=False):
    """Build a model that this package has not seen."""
    return wrapped_chunks(layout, config_of(layout, per_token=per_token))


def stock_step(chunks, batches, layout, returns=lambda *both: both, *, counting=None):
    """Run a step in which loss_func returns ``returns(loss, num_tokens)`` and a report.

    ``returns``: by default as in Megatron-LM's own loss_func. ``counting``: the batches whose
    masks are counted, if not those trained. Returns what the schedule returned and every gradient
    buffer as finalize left it.
    """

    def forward_step(iterator, chunk):
        batch, counted = next(iterator)
        output = forward(chunk, batch, layout)

        def loss_func(output):
            losses = token_losses(output, batch, layout) * batch.coefficient
            loss = (losses * batch.mask_here).sum()
            num_tokens = counted.mask_here.sum().to(torch.int)
            report = torch.stack([loss.detach().clone(), num_tokens.to(loss.dtype)])
            return (*returns(loss, num_tokens), {"loss": report})

        return output, loss_func

    pairs = list(zip(batches, counting or batches, strict=True))
    return run_schedule(forward_step, chunks, pairs), gradients(chunks)


def gradients(chunks):
    """Copy every gradient buffer of the model, dense and experts'."""
    return [data.clone() for chunk in chunks for data in _buffers(chunk)]


def _buffers(chunk):
    if hasattr(chunk, "param_and_grad_buffer"):  # Megatron-FSDP, whose padding holds anything
        groups = chunk.param_and_grad_buffer.parameter_groups
        buffers = [group.main_grad_buffer for group in groups]
        items = [
            buffer.get_item(place, only_shard=True)
            for buffer in buffers
            for place in buffer.item_index_map
        ]
        return [torch.cat(items)]
    return [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
