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

import hooked_loop  # noqa: E402
import pytest  # noqa: E402
import tiny_gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.datasets.data_schedule import (  # noqa: E402
    get_batch_on_this_rank_for_sequence_packing,
    wrap_data_iterator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.training import global_vars  # noqa: E402
from ranks import leave, of_ranks  # noqa: E402
from token_model import error_of, masked_sum, mean_by_hand, wrapped  # noqa: E402

from megatron_lossagg import Aggregation, LossAggregator  # noqa: E402
from megatron_lossagg.errors import ContractError  # noqa: E402
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration  # noqa: E402
from megatron_lossagg.loop.schedule_hook import ScheduleHook  # noqa: E402
from megatron_lossagg.reduction.aggregation import Options  # noqa: E402

CP, DP = 2, 2
LENGTHS = ((6, 8), (3, 4), (12, 12), (1, 4), (5, 8), (4, 4), (16, 16), (7, 8), (2, 4), (9, 12))
"""Of each sequence of the step, without and with padding; the ranks read every other one."""
LONGEST = {"dp_balanced": 12, "default_dynamic_cp": 8}
"""Tokens of a pack on each context-parallel rank."""
PADDINGS = (
    (None, None),
    (8, "append_dummy_seq"),
    (8, "extend_last"),
    ("max", "append_dummy_seq"),
    ("max", "extend_last"),
)
UNITS = {"dp_balanced": 2 * CP, "default_dynamic_cp": 2 * CP * DP}
"""What a sequence is padded to a multiple of: it may lie on all ranks of its group."""
TOKENS = 1 + sum(-(-padded // 8) * 8 for _, padded in LENGTHS)
"""Token 0 fills a shape."""


def drawn(scheduler):
    """Return each sequence as the branch's ``VarlenDataset`` gives it."""
    draw = torch.Generator().manual_seed(0)
    unit = UNITS[scheduler]
    lengths = [(length, -(-padded // unit) * unit) for length, padded in LENGTHS]
    offsets = itertools.accumulate((padded for _, padded in lengths), initial=1)
    for (length, padded), offset in zip(lengths, offsets, strict=False):
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


def trained_tokens(scheduler):
    return [one["tokens"][one["loss_mask"] != 0].tolist() for one in drawn(scheduler)]


def gradient(partition, padding, *, per_token, scheduler="dp_balanced", **made):
    """Train one step; return its gradient and how many ranks and tokens each microbatch has here.

    ``made``: how the hook is made.
    """
    alignment, policy = padding
    is_dynamic = scheduler == "default_dynamic_cp"
    options = {
        "pad_packed_seq_alignment": alignment,
        "thd_tail_padding_policy": policy,
        "thd_max_packed_sequences": None,
        "max_seqlen_per_dp_cp_rank": LONGEST[scheduler],
        "cuda_graph_impl": "none",
        "sequence_packing_scheduler": scheduler,
        "dynamic_context_parallel": is_dynamic,
        "min_dynamic_context_parallel_size": 1,
        "cp_partition_mode": partition,
    }
    config = tiny_gpt.config_of(per_token=per_token)
    vars(config).update(options)  # the class itself asks for Transformer Engine
    global_vars.set_args(argparse.Namespace(context_parallel_size=CP, sft=True, **options))
    chunk = wrapped(config, TOKENS)
    own = list(drawn(scheduler))[parallel_state.get_data_parallel_rank() :: DP]
    packed, num_microbatches, *_ = wrap_data_iterator(iter([own]), config, 1)
    sizes = []

    def forward_step(iterator, model):
        tokens, _, mask, _, _, packed, _ = get_batch_on_this_rank_for_sequence_packing(
            iterator, config=config, dynamic_cp=is_dynamic
        )
        sizes.append((packed.local_cp_size or CP, tokens.numel()))
        return model(tokens), functools.partial(masked_sum, mask)

    made = {"aggregation": Aggregation("sample_mean"), "options": Options(probe=False), **made}
    made = {"integration": PretrainIntegration(), **made}
    hook = ScheduleHook(**made)
    hook.wrap(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=packed,
        model=[chunk],
        num_microbatches=num_microbatches,
        seq_length=LONGEST[scheduler] * CP,
        micro_batch_size=1,
    )
    return chunk.module.weight.main_grad, sizes


def compare(case, found, wanted, sizes):
    error = error_of(found, wanted)
    assert error < 1e-12, (case, error)
    assert len(sizes) > 1
    if dist.get_rank() == 0:
        print(f"PACKED equals the loops: {case}, packs of {sizes}", flush=True)


def compare_dynamic():
    """Train sequences on groups of ranks of their own size, and see what is refused there."""
    train = functools.partial(
        gradient, padding=(None, None), per_token=True, scheduler="default_dynamic_cp"
    )
    seen = set()
    for partition in ("zigzag", "contiguous"):
        for mode in ("sample_mean", "token_mean"):
            found, sizes = train(partition, aggregation=Aggregation(mode), options=Options())
            seen |= {size for size, _ in sizes}
            wanted = mean_by_hand(trained_tokens("default_dynamic_cp"), TOKENS, mode)
            compare(f"dynamic, {partition}, {mode}", found, wanted, sizes)
    assert set.union(*of_ranks(seen)) == {1, 2, 4}
    with pytest.raises(ContractError, match="got microbatch_token_mean with dynamic_context_par"):
        train("zigzag", aggregation=Aggregation("microbatch_token_mean"))
    for padding in PADDINGS[1:]:
        with pytest.raises(
            ContractError, match=rf"^got .* --pad-packed-seq-alignment {padding[0]}, "
        ):
            train("zigzag", padding=padding)
    with pytest.raises(ContractError, match="dynamic_context_parallel is True, which is not"):
        train("zigzag", integration=hooked_loop.OfDicts())
    with pytest.raises(ContractError, match="got a record with dynamic_context_parallel"):
        train("zigzag", options=Options(probe=False, record="never"))
    config = tiny_gpt.config_of(per_token=True)
    config.dynamic_context_parallel = True
    with pytest.raises(ContractError, match="dynamic_context_parallel is True, which is not"):
        LossAggregator(wrapped(config, TOKENS), "token_mean")
    if dist.get_rank() == 0:
        print("refused with dynamic context parallelism", flush=True)


def main():
    tiny_gpt.start(cp=CP, dynamic_context_parallel=True)
    wanted = mean_by_hand(trained_tokens("dp_balanced"), TOKENS, "sample_mean")
    for partition in ("zigzag", "contiguous"):
        for padding in PADDINGS:
            for per_token in (False, True):
                found, sizes = gradient(partition, padding, per_token=per_token)
                case = f"{partition}, {padding}, per token {per_token}"
                compare(case, found, wanted, sizes)
    weighs = Aggregation("sample_mean", count="weights")
    for padding in PADDINGS[1:3]:  # the tail has no weight
        found, sizes = gradient("zigzag", padding, per_token=False, aggregation=weighs)
        compare(f"{padding}, count weights", found, wanted, sizes)
    compare_dynamic()
    leave()


if __name__ == "__main__":
    main()
