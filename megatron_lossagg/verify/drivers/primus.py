"""AMD's Primus: ``train`` of its Megatron trainers, into Megatron-LM's ``train_step``.

``pretrain``, which a trainer calls last, is ours: it has a small GPT and the drawn batch, and calls
``train_step`` with what the trainer passed and bound. Not run: its runtime, its patches, data sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lossagg.integrations._shared import HOOK, replaced
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import Drawn, HookedDriver, cut
from megatron_lossagg.verify.drivers.megatron_lm import begin, train_step
from megatron_lossagg.verify.parallelism import Parallelism

_BACKEND = "primus.backends.megatron"
_PRETRAIN, _SFT, _PER_TOKEN = "pretraining", "SFT", ", calculate_per_token_loss"
_TRAINERS = {
    _PRETRAIN: ("megatron_pretrain_trainer", "MegatronPretrainTrainer"),
    _SFT: ("megatron_sft_trainer", "MegatronSFTTrainer"),
}
_WIDTH = 24
"""Of a padded sequence."""


class FrameworkDriver(HookedDriver):
    """Primus's trainers around a small GPT."""

    function = f"{_BACKEND}.megatron_pretrain_trainer.MegatronPretrainTrainer.train"
    schedule = "megatron.training.training"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        kind + scaling: Aggregation("token_mean")  # which the log has
        for kind in _TRAINERS
        for scaling in ("", _PER_TOKEN)
    }

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        of_rank = len(cut(drawn[:: parallelism.dp]))
        self.args = begin(
            parallelism, micro_batch_size=1, global_batch_size=of_rank * parallelism.dp
        )
        self.trainers = {
            kind: getattr(import_module(f"{_BACKEND}.{module}"), name)
            for kind, (module, name) in _TRAINERS.items()
        }

    def install(self, aggregation: Aggregation) -> None:
        """Install the hook of its trainers."""
        from megatron_lossagg.integrations import primus

        primus.install(aggregation)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Run a trainer of Primus's to the end of a step."""
        import megatron.core.pipeline_parallel as schedules
        from megatron import training

        setting = _PRETRAIN if isinstance(trained, Aggregation) else trained
        trainer = self.trainers[setting.removesuffix(_PER_TOKEN)]
        chunk = self.chunks[setting.endswith(_PER_TOKEN)]
        loop, stock = import_module(self.schedule), schedules.get_forward_backward_func
        logged: dict[str, float] = {}

        def pretrain(
            datasets: Any, model: Any, kind: Any, forward_step: Any, args_defaults: Any = None
        ) -> None:
            schedules.get_forward_backward_func = stock  # which a hook's measurement looks up
            schedule = getattr(loop, HOOK)()
            logged.update(train_step(forward_step, self._batches(), chunk, schedule))

        with (
            # MegatronPretrainTrainer binds what it finds here in the loop.
            replaced(schedules, get_forward_backward_func=getattr(loop, HOOK)),
            replaced(training, pretrain=pretrain),
            replaced(trainer, train=trainer.train),
            self.trained_by(trained),
        ):
            self.args.calculate_per_token_loss = setting.endswith(_PER_TOKEN)
            made = trainer(backend_args=self.args)
            made._patch_parse_args()
            made.train()
        return logged

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's microbatches, under Megatron-LM's names and those of Primus's SFT."""
        for part in self.microbatches():
            tokens = torch.zeros(len(part), _WIDTH + 1, dtype=torch.long)
            mask = torch.zeros(len(part), _WIDTH + 1)
            for row, here, one in zip(tokens, mask, part, strict=True):
                end = len(one.tokens)
                row[:end], here[:end] = one.tokens, one.token_mask
            yield {
                "tokens": tokens[:, :-1].contiguous(),
                "input_ids": tokens[:, :-1],
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": mask[:, 1:].contiguous(),
                "position_ids": torch.arange(_WIDTH).repeat(len(part), 1),
            }
