"""The gradient norm of each side loss without the main one, by loss scaling, at a CP size; JSON."""

import sys

import torch
import torch.distributed as dist
from ranks import print_row
from stock_step import gradients

from megatron_lossagg import LossAggregator
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.small_gpt import config_of, run_schedule, wrapped_chunks
from megatron_lossagg.verify.step_data import VOCABULARY, zigzag
from megatron_lossagg.verify.world import split_world

LENGTH = 16
SIDE_LOSSES = {
    "aux": {"moe_z_loss_coeff": None},
    "sequence aux": {
        "moe_z_loss_coeff": None,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "z": {"moe_router_load_balancing_type": "none"},
    "MTP": {},
}


def batches(cp_size, cp_rank):
    """Draw two microbatches of three sequences, and slice them as Megatron does unpacked
    sequences.
    """
    draw = torch.Generator().manual_seed(5)
    held = zigzag([0, LENGTH], cp_size, cp_rank)
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=draw)
        mask = (torch.rand((3, LENGTH), generator=draw) < 0.6).float()
        positions = torch.arange(LENGTH).expand(3, LENGTH)
        whole = (tokens[:, :-1], tokens[:, 1:], mask, positions)
        yield [values[:, held].contiguous() for values in whole]


def side_loss(iterator, model):
    """Make the main loss 0, so that the gradient is the side loss's."""
    tokens, labels, mask, positions = next(iterator)
    output = model(tokens, positions, None, labels=labels, loss_mask=mask)

    def loss_func(output):
        num_tokens = mask.sum().int()
        loss = (output.view(-1) * mask.view(-1)).sum() * 0
        return loss, num_tokens, {"x": torch.stack([loss.detach(), num_tokens.float()])}

    return output, loss_func


def main(cp_size):
    dist.init_process_group("gloo")
    own_batches = list(batches(cp_size, dist.get_rank()))
    for name, options in SIDE_LOSSES.items():
        kind = {"mtp" if name == "MTP" else "moe": True}
        layout = Parallelism(cp=cp_size, float32=True, **kind)
        with split_world(layout):
            for per_token in (False, True):
                config = config_of(layout, per_token=per_token)
                vars(config).update(options)
                chunks = wrapped_chunks(layout, config)
                note = LossAggregator(chunks, "token_mean", options=Options(probe=False)).note
                run_schedule(side_loss, chunks, own_batches)
                norm = torch.cat(gradients(chunks)).norm().item()
                print_row({"loss": name, "per_token": per_token, "norm": norm, "note": note})


if __name__ == "__main__":
    main(int(sys.argv[1]))
