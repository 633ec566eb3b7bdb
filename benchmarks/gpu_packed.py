"""A GPT of Megatron-Core over packed sequences in bf16: the gradient of one step under four losses.

A rank of a launcher (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``): ``python -m benchmarks.gpu_packed
FILE [--cp 2] [--cpu]``. The attention is Transformer Engine's, on a CPU this package's stand-in.
Rank 0 writes to FILE the whole gradient of each loss, float64, and what the step cost:

- ``sample_mean``: by :class:`LossAggregator`
- ``hand``: the same loss by dense weights, without this package
- ``rounded``: ``hand`` times 3.7, and the gradient over 3.7: how far bf16 rounds under any factor
  that is no power of two
- ``stock``: Megatron-LM's ``loss_func``

The sequences of the step are the same for any DP and CP.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PARSER = argparse.ArgumentParser()
PARSER.add_argument("file")
PARSER.add_argument("--cp", type=int, default=1)
PARSER.add_argument("--cpu", action="store_true")

# Uneven, of multiples of 2 CP; the first part of each sequence is its prompt.
MICROBATCHES = ((64, 16, 256, 48), (512, 32), (128, 124, 64), (8, 24, 448))
PROMPT = 0.3
VOCABULARY = 512
FACTOR = 3.7
LOSSES = ("sample_mean", "hand", "rounded", "stock")
REPEATS = 5
"""Steps whose host time is measured, after the first."""


def main() -> None:
    """Train each loss once and measure ours and stock's."""
    args = PARSER.parse_args()
    if args.cpu:
        import megatron_lossagg.cpu as cpu

        cpu.install()
    step = Step(cp=args.cp, on_cpu=args.cpu)
    gradients = {loss: step.gradient(loss) for loss in LOSSES}
    costs = {loss: step.cost(loss) for loss in ("stock", "sample_mean")}
    if dist.get_rank() == 0:
        torch.save({"gradients": gradients, "costs": costs, "attention": step.attention}, args.file)
    dist.barrier()
    dist.destroy_process_group()


class Step:
    """Model, data and schedule of one layout; DP is what is left of the ranks."""

    def __init__(self, *, cp: int, on_cpu: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        self.on_cpu = on_cpu
        if not on_cpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.device = torch.device("cpu" if on_cpu else "cuda")
        dist.init_process_group("gloo" if on_cpu else "nccl")
        parallel_state.initialize_model_parallel(context_parallel_size=cp)
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        self.cp = cp
        self.dp = parallel_state.get_data_parallel_world_size()
        self.chunk, self.attention = self._model()
        rank = parallel_state.get_data_parallel_rank()
        self.own = list(range(rank, len(MICROBATCHES), self.dp))
        self.num_sequences = sum(map(len, MICROBATCHES))
        self.seconds = 0.0

    def _model(self) -> tuple[Any, str]:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=2,
            hidden_size=128,
            num_attention_heads=4,
            context_parallel_size=self.cp,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=self.on_cpu,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            finalize_model_grads_func=finalize_model_grads,
        )
        spec, attention = self._spec(config)
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=1024,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        model = model.to(self.device, torch.bfloat16)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return DistributedDataParallel(config, ddp, model), attention

    def _spec(self, config: Any) -> tuple[Any, str]:
        if self.on_cpu:
            import megatron_lossagg.cpu as cpu

            return cpu.gpt_layer_spec(config), "this package's stand-in"
        import transformer_engine
        from megatron.core.models.gpt import gpt_layer_specs

        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        return spec, f"Transformer Engine {transformer_engine.__version__}"

    def batch(self, number: int) -> dict[str, Any]:
        """Return microbatch ``number`` of the step, sliced for this context-parallel rank."""
        from megatron.core import parallel_state

        from megatron_lossagg.verify.small_gpt import packed_at
        from megatron_lossagg.verify.step_data import zigzag

        lengths = MICROBATCHES[number]
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (offsets[-1] + 1,), generator=draw)
        masks = [(torch.arange(n) >= PROMPT * n).long() for n in lengths]
        weights = [m / (m.sum() * self.num_sequences) for m in masks]
        here = zigzag(offsets, self.cp, parallel_state.get_context_parallel_rank())
        position = torch.cat([torch.arange(n) for n in lengths])
        return {
            "tokens": tokens[:-1][here][None].to(self.device),
            "labels": tokens[1:][here][None].to(self.device),
            "positions": position[here][None].to(self.device),
            "mask": torch.cat(masks),
            "mask_here": torch.cat(masks)[here].to(self.device),
            "weight_here": torch.cat(weights)[here].to(self.device),
            "counts": [int(m.sum()) for m in masks],
            "offsets": offsets,
            "packed": packed_at(offsets),
        }

    def gradient(self, loss: str) -> Tensor:
        """Train a step of a loss; return the whole reduced gradient, on the CPU."""
        self.run(loss)
        factor = FACTOR if loss == "rounded" else 1.0
        gradients = [p.main_grad.double().flatten().cpu() for p in self.chunk.parameters()]
        return torch.cat(gradients) / factor

    def run(self, loss: str) -> None:
        """Run the schedule over this rank's microbatches, and add up the time in ``loss_func``."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batches = [self.batch(number) for number in self.own]
        self.chunk.zero_grad_buffer()
        with self._step(batches, loss) as step:
            loss_func = self._loss_func(step, loss)

            def forward_step(iterator: Any, model: Any) -> Any:
                index, batch = next(iterator)
                output = model(
                    batch["tokens"],
                    batch["positions"],
                    None,
                    labels=batch["labels"],
                    packed_seq_params=batch["packed"],
                )

                def timed(output: Tensor) -> Any:
                    begun = time.perf_counter()
                    returned = loss_func(index, batch, output.reshape(-1))
                    self.seconds += time.perf_counter() - begun
                    return returned

                return output, timed

            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=enumerate(batches),
                model=[self.chunk],
                num_microbatches=len(batches),
                seq_length=1024,
                micro_batch_size=1,
                forward_only=False,
            )

    def _step(self, batches: list[dict[str, Any]], loss: str) -> Any:
        from contextlib import nullcontext

        if loss != "sample_mean":
            return nullcontext()
        if not hasattr(self, "aggregator"):
            from megatron_lossagg import LossAggregator

            self.aggregator = LossAggregator([self.chunk], loss)
        counts = [n for batch in batches for n in batch["counts"]]
        numbers = [m for m, batch in enumerate(batches) for _ in batch["counts"]]
        return self.aggregator.step(counts, microbatch=numbers, num_microbatches=len(batches))

    def _loss_func(self, step: Any, loss: str) -> Callable[..., Any]:
        one = torch.ones((), dtype=torch.int32, device=self.device)
        k = len(self.own) * self.dp * self.cp

        def ours(index: int, batch: dict[str, Any], x: Tensor) -> Any:
            first = sum(len(MICROBATCHES[number]) for number in self.own[:index])
            sequences = range(first, first + len(batch["counts"]))
            mb = step.microbatch(list(sequences), batch["mask"], cu_seqlens=batch["offsets"])
            partial_loss = mb.reduce(x)
            return mb.outputs(partial_loss, report={"lm loss": partial_loss})

        def by_hand(index: int, batch: dict[str, Any], x: Tensor) -> Any:
            del index
            partial_loss = (x * batch["weight_here"]).sum()
            factor = FACTOR if loss == "rounded" else 1.0
            return partial_loss * (k * factor), one.clone(), {}

        def stock(index: int, batch: dict[str, Any], x: Tensor) -> Any:
            del index
            total, num_tokens = (x * batch["mask_here"]).sum(), batch["mask_here"].sum().int()
            report = torch.cat([total.detach().view(1), num_tokens.view(1)])
            return total, num_tokens, {"lm loss": report}

        return {"sample_mean": ours, "stock": stock}.get(loss, by_hand)

    def cost(self, loss: str) -> dict[str, float]:
        """Measure host time in ``loss_func``; on a GPU host syncs and kernels of a step too."""
        self.run(loss)
        self.seconds = 0.0
        for _ in range(REPEATS):
            self.run(loss)
        calls = REPEATS * len(self.own)
        found = {"loss_func_ms": 1e3 * self.seconds / calls}
        return found if self.on_cpu else {**found, **self._on_device(loss)}

    def _on_device(self, loss: str) -> dict[str, float]:
        from torch.profiler import ProfilerActivity, profile

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self.run(loss)
            torch.cuda.set_sync_debug_mode("default")
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.run(loss)
            torch.cuda.synchronize()
        syncs = sum("synchroniz" in str(warning.message) for warning in caught)
        kernels = sum(event.count for event in profiled.key_averages())
        return {"host_syncs": syncs, "kernels": kernels}


if __name__ == "__main__":
    main()
