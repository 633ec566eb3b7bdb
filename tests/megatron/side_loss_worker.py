"""The gradient norm of each side loss alone, by loss scaling, at the CP size that is
given; JSON.
"""

import json
import sys

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from step_data import VOCABULARY, zigzag

import megatron_lossagg.cpu as cpu
from megatron_lossagg import LossAggregator
from megatron_lossagg.options import Options

LENGTH = 16
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
SIDE_LOSSES = {
    "aux": {**MOE, "moe_aux_loss_coeff": 0.1},
    "sequence aux": {
        **MOE,
        "moe_aux_loss_coeff": 0.1,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "z": {**MOE, "moe_z_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
    "MTP": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
}


def wrapped(config):
    """Wrap a model; a model of MTP is built here, because tiny_gpt has none."""
    if not config.mtp_num_layers:
        return tiny_gpt.wrapped(config)
    model = GPTModel(
        config,
        cpu.gpt_layer_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=cpu.gpt_mtp_spec(config),
    )
    cpu.initialize_weights([model], seed=3)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


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


def main():
    cp_size = int(sys.argv[1])
    tiny_gpt.start(cp=cp_size, dtype=torch.float32)
    cp_rank = parallel_state.get_context_parallel_rank()
    for name, options in SIDE_LOSSES.items():
        for per_token in (False, True):
            chunk = wrapped(tiny_gpt.config_of(per_token=per_token, **options))
            aggregator = LossAggregator(chunk, "token_mean", options=Options(probe=False))
            tiny_gpt.run_schedule(side_loss, chunk, list(batches(cp_size, cp_rank)))
            buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
            norm = torch.cat([buffer.grad_data for buffer in buffers]).norm().item()
            found = {"loss": name, "per_token": per_token, "norm": norm, "note": aggregator.note}
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
