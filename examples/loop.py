"""A whole loop of one's own on a laptop: Megatron-Core's GPT, schedule and Adam on the CPU.

::

    torchrun --nproc_per_node 2 examples/loop.py              # DP 2, packed sequences
    torchrun --nproc_per_node 2 examples/loop.py --cp 2       # CP 2
    torchrun --nproc_per_node 2 examples/loop.py --unpacked   # one sequence per batch entry

Prints loss and gradient norm of each step, the same in all of them. docs/own-loop.md shows a part.
"""

# ruff: noqa: E402  Megatron-Core binds CUDA's functions when it is imported: install() is first.
from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import megatron_lossagg.cpu as cpu

cpu.install()  # stand-ins for CUDA; not on GPUs

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_lossagg import Layout, LossAggregator

VOCABULARY, LONGEST, NUM_STEPS = 64, 32, 3
NUM_TEXTS, IN_MICROBATCH = 12, 3
"""Of all ranks in a step, and of one microbatch."""


class Microbatch(NamedTuple):
    """Sequences, and the tokens, labels and positions that this rank holds of them."""

    sequences: Sequence[int]
    mask: Tensor
    layout: Layout
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    packed: PackedSeqParams | None


def draw(step: int) -> list[tuple[Tensor, Tensor]]:
    """Draw texts of 6 to 32 tokens with their masks; entry i of a mask belongs to logit i."""
    random, texts = torch.Generator().manual_seed(step), []
    for number in range(NUM_TEXTS):
        length = int(torch.randint(6, LONGEST + 1, (), generator=random))
        mask = (torch.arange(length) + 1 >= length // (2 + number % 3)).int()  # after the prompt
        mask[-1] = 0  # nothing follows the last token
        texts.append((torch.randint(VOCABULARY, (length,), generator=random), mask))
    return texts


def cut(
    texts: Sequence[tuple[Tensor, Tensor]], aggregator: LossAggregator, *, packs: bool
) -> Iterator[Microbatch]:
    """Cut this rank's texts into microbatches."""
    for first in range(0, len(texts), IN_MICROBATCH):
        sequences = range(first, first + IN_MICROBATCH)
        lengths = [-(-len(texts[s][0]) // 4) * 4 if packs else LONGEST for s in sequences]  # 2 CP
        padded = [
            [torch.cat([x, x.new_zeros(n - len(x))]) for x in texts[s]]
            for s, n in zip(sequences, lengths, strict=True)
        ]
        token, mask = map(torch.cat, zip(*padded, strict=True))
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        sizes = {"cp_size": aggregator.cp_size, "cp_rank": aggregator.cp_rank}
        if packs:
            layout = Layout.thd_zigzag(offsets, **sizes)  # padded offsets
            packed = PackedSeqParams("thd", offsets, offsets, offsets, offsets, LONGEST, LONGEST)
        else:
            mask, packed = mask.view(IN_MICROBATCH, LONGEST), None
            layout = Layout.bshd_zigzag(*mask.shape, **sizes)  # a sequence per batch entry
        position = torch.cat([torch.arange(n) for n in lengths])
        here = layout.positions  # the tokens that this rank holds
        tokens, labels, positions = (
            x[here].view(1 if packs else IN_MICROBATCH, -1)
            for x in (token, token.roll(-1), position)
        )
        yield Microbatch(sequences, mask, layout, tokens, labels, positions, packed)


def build(cp_size: int) -> DistributedDataParallel:
    """Build a GPT whose weights do not depend on the parallelism."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        context_parallel_size=cp_size,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = GPTModel(
        config,
        cpu.gpt_layer_spec(config),  # on GPUs get_gpt_layer_with_transformer_engine_spec()
        vocab_size=VOCABULARY,
        max_sequence_length=LONGEST,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    cpu.initialize_weights([gpt], seed=1)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def main() -> None:
    """Train some steps on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--unpacked", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")  # on GPUs "nccl"
    parallel_state.initialize_model_parallel(context_parallel_size=args.cp)
    model_parallel_cuda_manual_seed(1)  # random states that layers ask for
    model = [build(args.cp)]  # in DistributedDataParallel
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), model)

    # Once, after wrapping; from flags: LossAggregator.from_args(model, args).
    aggregator = LossAggregator(model, "sample_mean")
    dp_rank, dp_size = dist.get_rank(aggregator.dp_group), dist.get_world_size(aggregator.dp_group)

    def train_step(texts: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        microbatches = [*cut(texts, aggregator, packs=not args.unpacked)]
        active = [int(mask.sum()) for _, mask in texts]  # per sequence; prompt_mean: prompt= too
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with aggregator.step(active_tokens=active, num_microbatches=len(microbatches)) as step:

            def forward_step(data_iterator, chunk):
                data = next(data_iterator)

                def loss_func(output):
                    mb = step.microbatch(data.sequences, data.mask, layout=data.layout)
                    loss = mb.reduce(output)  # a loss per token; in RL computed from output
                    return mb.outputs(loss, report={"lm loss": loss})

                losses = chunk(
                    data.tokens,
                    data.positions,
                    None,
                    labels=data.labels,
                    packed_seq_params=data.packed,
                )
                return losses, loss_func

            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(microbatches),
                model=model,
                num_microbatches=len(microbatches),
                seq_length=LONGEST,
                micro_batch_size=1,
                forward_only=False,
            )
        _, grad_norm, _ = optimizer.step()  # not if a sequence is missing or a loss not finite
        pair = torch.stack([report["lm loss"] for report in reports]).sum(0)
        dist.all_reduce(pair)  # of all ranks: there are no pipeline stages
        return float(pair[0] / pair[1]), float(grad_norm)

    for number in range(NUM_STEPS):
        loss, grad_norm = train_step(draw(number)[dp_rank::dp_size])
        if dist.get_rank() == 0:
            print(f"step {number + 1}: loss {loss:.6f}, gradient norm {grad_norm:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
