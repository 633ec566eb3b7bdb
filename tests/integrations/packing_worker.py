"""Megatron-LM's packing scheduler and its own batch function under the hook; DP 2 x CP 2.

Of the development branch run ``wrap_data_iterator``, which packs and moves sequences between
data-parallel ranks, and ``get_batch_on_this_rank_for_sequence_packing``, which pads and splits
them, in both ``cp_partition_mode``. One weight per token is the model, without attention: which
rank holds which token, and with which weight, is all that matters. The contiguous mode itself asks
for attention that needs CUDA kernels.
"""

import argparse
import functools
import itertools

from megatron_lossagg.cpu.training import install_training

install_training()

import tiny_gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.datasets.data_schedule import (  # noqa: E402
    get_batch_on_this_rank_for_sequence_packing,
    wrap_data_iterator,
)
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.training import global_vars  # noqa: E402
from token_model import OneWeightPerToken  # noqa: E402

from megatron_lossagg import Aggregation  # noqa: E402
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration  # noqa: E402
from megatron_lossagg.options import Options  # noqa: E402
from megatron_lossagg.schedule import ScheduleHook  # noqa: E402

CP, DP = 2, 2
LENGTHS = ((6, 8), (3, 4), (12, 12), (1, 4), (5, 8), (4, 4), (16, 16), (7, 8), (2, 4), (9, 12))
"""Of each sequence of the step, without and with padding; the ranks read every other one."""
LONGEST = 12
"""Tokens of a pack on each context-parallel rank."""
PADDINGS = (
    (None, None),
    (8, "append_dummy_seq"),
    (8, "extend_last"),
    ("max", "append_dummy_seq"),
    ("max", "extend_last"),
)
TOKENS = 1 + sum(padded for _, padded in LENGTHS)
"""Token 0 fills a shape."""


def drawn():
    """Return each sequence as the branch's ``VarlenDataset`` gives it."""
    draw = torch.Generator().manual_seed(0)
    offsets = [1, *itertools.accumulate((padded for _, padded in LENGTHS), initial=1)][1:]
    for (length, padded), offset in zip(LENGTHS, offsets, strict=False):
        mask = (torch.rand(padded, generator=draw) < 0.6).float()
        mask[length:] = 0
        tokens = torch.arange(offset, offset + padded)
        yield {
            "tokens": tokens,
            "labels": tokens,
            "loss_mask": mask,
            "position_ids": torch.arange(padded),
            "original_seq_len": torch.tensor([length]),
            "padded_seq_len": torch.tensor([padded]),
        }


def gradient_by_hand():
    """Return the gradient of the mean over sequences of the mean over their trained tokens."""
    gradient = torch.zeros(TOKENS)
    for sequence in drawn():
        trained = sequence["tokens"][sequence["loss_mask"] != 0].tolist()
        for token in trained:
            gradient[token] = 1 / len(trained) / len(LENGTHS)
    return gradient


def framework_loss(mask, output):
    loss, num_tokens = (output * mask).sum(), mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.double()])}


def gradient(partition, padding, *, per_token):
    """Train one step; return its gradient and how many tokens each microbatch has here."""
    alignment, policy = padding
    options = {
        "pad_packed_seq_alignment": alignment,
        "thd_tail_padding_policy": policy,
        "thd_max_packed_sequences": None,
        "max_seqlen_per_dp_cp_rank": LONGEST,
        "cuda_graph_impl": "none",
        "sequence_packing_scheduler": "dp_balanced",
        "cp_partition_mode": partition,
    }
    config = tiny_gpt.config_of(per_token=per_token)
    vars(config).update(options)  # the class itself asks for Transformer Engine
    global_vars.set_args(argparse.Namespace(context_parallel_size=CP, sft=True, **options))
    chunk = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), OneWeightPerToken(TOKENS)
    )
    own = list(drawn())[parallel_state.get_data_parallel_rank() :: DP]
    packed, num_microbatches, *_ = wrap_data_iterator(iter([own]), config, 1)
    sizes = []

    def forward_step(iterator, model):
        tokens, _, mask, *_ = get_batch_on_this_rank_for_sequence_packing(iterator, config=config)
        sizes.append(tokens.numel())
        return model(tokens), functools.partial(framework_loss, mask)

    hook = ScheduleHook(
        Aggregation("sample_mean"), PretrainIntegration(), options=Options(probe=False)
    )
    hook.wrap(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=packed,
        model=[chunk],
        num_microbatches=num_microbatches,
        seq_length=LONGEST * CP,
        micro_batch_size=1,
    )
    return chunk.module.weight.main_grad, sizes


def main():
    tiny_gpt.start(cp=CP)
    wanted = gradient_by_hand()
    for partition in ("zigzag", "contiguous"):
        for padding in PADDINGS:
            for per_token in (False, True):
                found, sizes = gradient(partition, padding, per_token=per_token)
                error = ((found - wanted).norm() / wanted.norm()).item()
                case = f"{partition}, {padding}, per token {per_token}, packs of {sizes}"
                assert error < 1e-12, (case, error)
                assert len(sizes) > 1
                if dist.get_rank() == 0:
                    print(f"PACKED equals the loops: {case}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
