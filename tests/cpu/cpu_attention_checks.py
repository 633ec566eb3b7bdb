"""Checks of ``ContextParallelAttention`` that ``cpu_worker.py`` runs on one or two processes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from cpu_step import Layout, batches, build, cp_index, packed
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_lossagg.cpu import (
    ContextParallelAttention,
    UnsupportedModelError,
    initialize_weights,
    named_shards,
)

OFFSETS = torch.tensor([0, 8, 8, 24, 28], dtype=torch.int32)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
HEADS, GROUPS, WIDTH = 4, 2, 8


def run(directory):
    """Return what each check measured, by name."""
    if dist.get_world_size() == 1:
        with Layout() as layout:
            return {
                "errors against loops": {str(dtype): loops(layout, dtype) for dtype in DTYPES},
                "error against Megatron's attention": stock(layout),
                "finite with a tail": tail(layout),
                "refusals": refusals(layout),
                "saved logits": sampled_logits(layout, Path(directory)) is not None,
            }
    with Layout(cp=2) as layout:
        return {
            "errors against the whole": {str(dtype): whole(layout, dtype) for dtype in DTYPES},
            "error without context parallelism": without_cp(layout, Path(directory)),
            "refusals": [unpadded(layout)],
        }


def attention(config):
    module = ContextParallelAttention(config, 1, AttnMaskType.causal, "self")
    return module.train()


def drawn(dtype, num_tokens=int(OFFSETS[-1])):
    generator = torch.Generator().manual_seed(11)
    shapes = [(num_tokens, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def value_and_gradients(output, inputs):
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, seed)]


def largest(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def by_loops(query, key, value):
    """Attend one sequence, head and token at a time."""
    sequences = []
    for start, end in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True):
        for t in range(start, end):
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = key[start : t + 1, group] @ query[t, head] / WIDTH**0.5
                sequences.append(scores.softmax(0) @ value[start : t + 1, group])
    return torch.stack(sequences).view(len(query), HEADS * WIDTH)


def loops(layout, dtype):
    inputs = drawn(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = attention(layout.config(dtype))(*inputs, packed_seq_params=packed(OFFSETS))
    assert output.dtype == dtype
    found = value_and_gradients(output, inputs)
    return largest(found, value_and_gradients(by_loops(*exact), exact))


def stock(layout):
    config = layout.config(torch.float64)
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization=config.normalization)
    logits = []
    for model in (build(config), build(config, spec=spec)):
        model.double()  # PyTorch's norms are float32 in the stock spec
        initialize_weights([model], seed=5)
        tokens = batches()["sbhd"][0][0]
        logits.append(model(tokens, torch.arange(tokens.size(1)).expand_as(tokens), None))
    return largest(*([value] for value in logits))


def tail(layout):
    inputs = drawn(torch.float32, num_tokens=int(OFFSETS[-1]) + 3)
    output = attention(layout.config(torch.float32))(*inputs, packed_seq_params=packed(OFFSETS))
    return all(bool(x.isfinite().all()) for x in value_and_gradients(output, inputs))


def message(call):
    try:
        call()
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def refusals(layout):
    config = layout.config(torch.float32)
    windowed = copy.copy(config)
    windowed.window_size = (4, 0)
    ours, inputs, causal = attention(config), drawn(torch.float32), AttnMaskType.causal
    tied = SimpleNamespace(share_embeddings_and_output_weights=True)
    sbhd = PackedSeqParams(qkv_format="sbhd")
    return [
        message(lambda: ContextParallelAttention(config, 1, AttnMaskType.padding, "self")),
        message(lambda: ContextParallelAttention(config, 1, causal, "cross")),
        message(lambda: ContextParallelAttention(windowed, 1, causal, "self")),
        message(lambda: ours(*inputs, None, AttnMaskType.no_mask)),
        message(lambda: ours(*inputs, attention_bias=torch.zeros(1))),
        message(lambda: ours(*inputs, packed_seq_params=sbhd)),
        message(lambda: ours(*drawn(torch.float32, 20), packed_seq_params=packed(OFFSETS))),
        message(lambda: next(named_shards([tied]))),
        message(lambda: next(named_shards([build(config)])).cut(torch.zeros(3))),
    ]


def unpadded(layout):
    ours, inputs = attention(layout.config(torch.float32)), drawn(torch.float32, 7)
    odd = torch.tensor([0, 8, 14], dtype=torch.int32)
    return message(lambda: ours(*inputs, packed_seq_params=packed(odd)))


def whole(layout, dtype):
    """Compare this rank's part with the attention over all tokens; sum the ranks' gradients."""
    config, index = layout.config(dtype), cp_index(OFFSETS, 2)
    inputs = drawn(dtype)
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    output = attention(alone)(*inputs, packed_seq_params=packed(OFFSETS))
    expected = [x[index] for x in value_and_gradients(output, inputs)]

    parts = [tensor.detach()[index].requires_grad_() for tensor in inputs]
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(dtype)[index]
    part = attention(config)(*parts, packed_seq_params=packed(OFFSETS))
    return largest([part, *torch.autograd.grad(part, parts, seed)], expected)


def sampled_logits(layout, directory, **arguments):
    config = layout.config(torch.float64, context_parallel_size=1)
    model = build(config, **arguments)
    initialize_weights([model], seed=5)
    logits = []
    for form in ("thd", "sbhd"):
        tokens, _, _, offsets = batches()[form][1]
        position = torch.arange(tokens.size(1)).expand_as(tokens)
        with torch.no_grad():
            logits.append(model(tokens, position, None, packed_seq_params=packed(offsets)))
    if dist.get_world_size() == 1:
        torch.save(logits, directory / "logits.pt")
    return logits


def without_cp(layout, directory):
    from megatron.core.process_groups_config import ProcessGroupCollection  # from 0.15 on

    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp, _ = dist.new_subgroups(group_size=1)
    found = sampled_logits(layout, directory, pg_collection=groups)
    return largest(found, torch.load(directory / "logits.pt"))
