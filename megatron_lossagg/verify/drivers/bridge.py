"""Megatron-Bridge: ``train_step`` and ``gpt_step``, on packed conversations.

Not run: its data sets and loader, the model that it builds for CUDA, its optimizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import Drawn, HookedDriver, Unchanging, loss_of, packed
from megatron_lossagg.verify.parallelism import Parallelism

_PER_TOKEN = "calculate_per_token_loss=True"


class FrameworkDriver(HookedDriver):
    """Bridge's step around a small GPT."""

    function = "megatron.bridge.training.train.train_step"
    schedule = "megatron.bridge.training.train"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "the default": Aggregation("token_mean"),  # which its log has
        _PER_TOKEN: Aggregation("token_mean"),
    }

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        self.loop: Any = importlib.import_module(self.schedule)
        self.step: Any = importlib.import_module("megatron.bridge.training.gpt_step")
        # Of ModelOpt; None where a model is not distilled.
        vars(self.loop)["get_tensor_shapes_adjust_fn_for_distillation"] = lambda *_, **__: None

    def install(self, aggregation: Aggregation) -> None:
        """Install what its recipes call."""
        from megatron_lossagg.integrations import bridge

        bridge.install(aggregation)

    def start(self) -> None:
        """Build the models, and the state of a run."""
        super().start()
        from megatron.bridge.training.state import GlobalState
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

        m, dp = len(self.microbatches()), self.parallelism.dp
        init_num_microbatches_calculator(0, None, m * dp, 1, dp)
        self.state = GlobalState()
        self.state.cfg = configuration(self.parallelism, m * dp)
        self.state.cfg.data_parallel_size = dp

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Run ``train_step``, as its loop does."""
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.rerun_state_machine import RerunDataIterator

        chunk = self.chunks[trained == _PER_TOKEN]
        groups = ProcessGroupCollection.use_mpu_process_groups()
        with self.trained_by(trained) as get_schedule:
            returned = self.loop.train_step(
                partial(self.step.forward_step, self.state),
                RerunDataIterator(self._batches()),
                [chunk],
                Unchanging(),
                Unchanging(),
                self.state,
                groups,
                get_schedule(),
                None,
            )
        return loss_of(returned)

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        for drawn in self.microbatches():
            pack = packed(drawn, multiple=2 * self.parallelism.cp)
            longest = pack["offsets"].diff().max()
            yield {
                **{name: pack[name][None] for name in ("tokens", "labels")},
                "loss_mask": pack["loss_mask"][None].float(),
                "position_ids": pack["positions"][None],
                "cu_seqlens_q": pack["offsets"][None],
                "cu_seqlens_kv": pack["offsets"][None],
                "max_seqlen_q": longest[None],
                "max_seqlen_kv": longest[None],
            }


def configuration(parallelism: Parallelism, batch_size: int) -> Any:
    """Return Bridge's own defaults, and what it asks for."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config

    model = GPTModelProvider(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        context_parallel_size=parallelism.cp,
    )
    return config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(global_batch_size=batch_size, micro_batch_size=1),
        optimizer=config.OptimizerConfig(),
        scheduler=config.SchedulerConfig(),
        dataset=config.GPTDatasetConfig(
            seq_length=64, random_seed=1, reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False,
        ),
        logger=config.LoggerConfig(),
        tokenizer=config.TokenizerConfig(),
        checkpoint=config.CheckpointConfig(),
    )  # fmt: skip
