"""Checks of ``ContextParallelAttention`` that ``cpu_worker.py`` runs on one or two processes.

What it computes on real models is compared with Megatron-Core's own attention by
``tests/megatron/test_gradients.py``; here are grouped queries, the edges, and what is refused.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from tiny_gpt import packed_at

from megatron_lossagg import cpu
from megatron_lossagg.cpu.attention import ContextParallelAttention, UnsupportedModelError
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.small_gpt import config_of
from megatron_lossagg.verify.step_data import VOCABULARY
from megatron_lossagg.verify.world import split_world

OFFSETS = (0, 8, 8, 24, 28)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
HEADS, GROUPS, WIDTH = 4, 2, 8


def run(directory):
    """Return what each check measured, by name."""
    layout = Parallelism(cp=dist.get_world_size())
    with split_world(layout):
        config = config_of(layout, per_token=False)
        config.kv_channels = WIDTH
        if layout.cp == 1:
            torch.save(logits(config), directory / "logits.pt")
            return {
                "errors": {str(dtype): loops(config, dtype) for dtype in DTYPES},
                "finite with a tail": tail(config),
                "refusals": refusals(config),
            }
        return {
            "error without context parallelism": without_cp(config, directory),
            "error of a microbatch of one rank": loops(config, DTYPES[0], local_cp_size=1),
            "refusals": [unpadded(config)],
        }


def attention(config):
    return ContextParallelAttention(config, 1, AttnMaskType.causal, "self").train()


def drawn(dtype, num_tokens=OFFSETS[-1]):
    generator = torch.Generator().manual_seed(11)
    shapes = [(num_tokens, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def value_and_gradients(output, inputs):
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, seed)]


def by_loops(query, key, value):
    """Attend one sequence, head and token at a time."""
    sequences = []
    for start, end in pairwise(OFFSETS):
        for t in range(start, end):
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = key[start : t + 1, group] @ query[t, head] / WIDTH**0.5
                sequences.append(scores.softmax(0) @ value[start : t + 1, group])
    return torch.stack(sequences).view(len(query), HEADS * WIDTH)


def loops(config, dtype, **of_microbatch):
    inputs = drawn(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    packed = packed_at(OFFSETS)
    vars(packed).update(of_microbatch)
    output = attention(config)(*inputs, packed_seq_params=packed)
    assert output.dtype == dtype
    found = value_and_gradients(output, inputs)
    pairs = zip(found, value_and_gradients(by_loops(*exact), exact), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def tail(config):
    inputs = drawn(torch.float32, num_tokens=OFFSETS[-1] + 3)
    output = attention(config)(*inputs, packed_seq_params=packed_at(OFFSETS))
    return all(bool(x.isfinite().all()) for x in value_and_gradients(output, inputs))


def message(call):
    try:
        call()
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def refusals(config):
    windowed = copy.copy(config)
    windowed.window_size = (4, 0)
    ours, inputs, causal = attention(config), drawn(torch.float32), AttnMaskType.causal
    tied = SimpleNamespace(share_embeddings_and_output_weights=True)
    sbhd = PackedSeqParams(qkv_format="sbhd")
    no_group = SimpleNamespace(qkv_format="thd", local_cp_size=2)
    return [
        message(lambda: ContextParallelAttention(config, 1, AttnMaskType.padding, "self")),
        message(lambda: ContextParallelAttention(config, 1, causal, "cross")),
        message(lambda: ContextParallelAttention(windowed, 1, causal, "self")),
        message(lambda: ours(*inputs, None, AttnMaskType.no_mask)),
        message(lambda: ours(*inputs, attention_bias=torch.zeros(1))),
        message(lambda: ours(*inputs, packed_seq_params=sbhd)),
        message(lambda: ours(*inputs, packed_seq_params=no_group)),
        message(lambda: ours(*drawn(torch.float32, 20), packed_seq_params=packed_at(OFFSETS))),
        message(lambda: next(cpu.named_shards([tied]))),
        message(lambda: next(cpu.named_shards([model(config)])).cut(torch.zeros(3))),
    ]


def unpadded(config):
    ours, inputs = attention(config), drawn(torch.float32, 7)
    return message(lambda: ours(*inputs, packed_seq_params=packed_at((0, 8, 14))))


def model(config, **arguments):
    built = GPTModel(
        config,
        cpu.gpt_layer_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=OFFSETS[-1],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **arguments,
    )
    cpu.initialize_weights([built], seed=5)
    return built


def logits(config, **arguments):
    """Compute those of all tokens, packed and unpacked."""
    built = model(config, **arguments)
    tokens = torch.arange(OFFSETS[-1])[None] * 5 % VOCABULARY
    positions = torch.arange(OFFSETS[-1])[None]
    with torch.no_grad():
        return [
            built(tokens, positions, None, packed_seq_params=packed)
            for packed in (packed_at(OFFSETS), None)
        ]


def without_cp(config, directory):
    """A model whose context-parallel size is 1, in a job with 2."""
    from megatron.core.process_groups_config import ProcessGroupCollection  # from 0.15 on

    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp, _ = dist.new_subgroups(group_size=1)
    whole = copy.copy(config)
    whole.context_parallel_size = 1
    pairs = zip(
        logits(whole, pg_collection=groups), torch.load(directory / "logits.pt"), strict=True
    )
    return max((a - b).abs().max().item() for a, b in pairs)
