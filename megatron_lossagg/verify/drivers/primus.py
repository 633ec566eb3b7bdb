"""AMD's Primus: ``train`` of its Megatron trainers, into Megatron-LM's ``train_step``.

``pretrain``, which a trainer calls last, is ours: it has a small GPT, the drawn batch, and calls
``train_step`` with what the trainer passed. Not run: its runtime, its patches, data sets, an
optimizer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._refusals import replaced
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.drawn import Drawn
from megatron_lossagg.verify.drivers.driver import Driver
from megatron_lossagg.verify.drivers.outcome import NotRunError
from megatron_lossagg.verify.parallelism import Parallelism

_WIDTH, _BATCH = 24, 2
"""Of a padded sequence; sequences of a microbatch."""
_OPTIONS = (
    f"--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length {_WIDTH} "
    f"--max-position-embeddings {_WIDTH} --micro-batch-size {_BATCH} --train-iters 1 --lr 1e-3 "
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --tokenizer-type NullTokenizer "
    "--no-create-attention-mask-in-dataloader --vocab-size 32"
)
_PRETRAIN, _SFT, _PER_TOKEN = "pretraining", "SFT", ", calculate_per_token_loss"
_BACKEND = "primus.backends.megatron"


class FrameworkDriver(Driver):
    """Primus's trainers around a small GPT."""

    function = f"{_BACKEND}.megatron_pretrain_trainer.MegatronPretrainTrainer.train"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        kind + scaling: Aggregation("token_mean")
        for kind in (_PRETRAIN, _SFT)
        for scaling in ("", _PER_TOKEN)
    }
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {"loss": ("nll", 1.0)}
    lacks = frozenset(("prompt_mean", "row_mean"))

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        from megatron_lossagg.cpu.training import install_training

        try:
            install_training()
        except ContractError as error:  # without the Megatron-LM that it trains with
            raise NotRunError(str(error)) from error
        self.training: Any = importlib.import_module("megatron.training")
        self.trainers = {
            _PRETRAIN: importlib.import_module(f"{_BACKEND}.megatron_pretrain_trainer"),
            _SFT: importlib.import_module(f"{_BACKEND}.megatron_sft_trainer"),
        }
        importlib.import_module("pretrain_gpt")

    def start(self) -> None:
        """Build a model for each loss scaling, and tell Megatron-LM its arguments."""
        from megatron.training import arguments, global_vars

        self.chunks = {one: self.wrapped(per_token=one) for one in (False, True)}
        size = f"--global-batch-size {len(self.drawn)} --context-parallel-size "
        given = f"{_OPTIONS} {size}{self.parallelism.cp}".split()
        with replaced(sys, argv=["pretrain_gpt.py", *given]):
            self.args = arguments.parse_args()
        self.args.padded_vocab_size = self.args.vocab_size
        arguments.validate_args(self.args)
        global_vars.set_global_variables(self.args, build_tokenizer=False)

    def listen(self, report: Any) -> None:
        """Weigh each step by itself."""
        self.report = report

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Run a trainer of Primus's to the end of a step."""
        import megatron.core.pipeline_parallel as schedules

        from megatron_lossagg.integrations import primus

        setting = _PRETRAIN if isinstance(trained, Aggregation) else trained
        self.args.calculate_per_token_loss = setting.endswith(_PER_TOKEN)
        kind = setting.removesuffix(_PER_TOKEN)
        logged: dict[str, float] = {}

        def pretrain(
            datasets: Any, model: Any, kind: Any, forward_step: Any, args_defaults: Any = None
        ) -> None:
            logged.update(self._step(forward_step))

        loop = self.training.training
        trainer = getattr(self.trainers[kind], _CLASSES[kind])
        with (
            replaced(self.training, pretrain=pretrain),
            replaced(loop, get_forward_backward_func=loop.get_forward_backward_func),
            replaced(schedules, get_forward_backward_func=schedules.get_forward_backward_func),
            replaced(trainer, train=trainer.train),
        ):
            if isinstance(trained, Aggregation):
                primus.install(trained)
            made = trainer(backend_args=self.args)
            made._patch_parse_args()
            made.train()
        return logged

    def _step(self, forward_step: Any) -> Mapping[str, float]:
        """Run Megatron-LM's step with what Primus passed to ``pretrain``."""
        from megatron_lossagg.integrations.weigh_script import ScriptWeighing

        loop, chunk = self.training.training, self.chunks[self.args.calculate_per_token_loss]
        weighing = ScriptWeighing(1, 1, stop=False, report=self.report)
        nothing = _Nothing()
        losses, *_ = loop.train_step(
            forward_step,
            self._batches(),
            [chunk],
            nothing,
            nothing,
            chunk.config,
            weighing.wrap(loop.get_forward_backward_func()),
            iteration=0,
        )
        return {"loss": float(losses["lm loss"])}

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's microbatches, under Megatron-LM's names and those of Primus's SFT."""
        from megatron.core import parallel_state

        mine = self.drawn[parallel_state.get_data_parallel_rank() :: self.parallelism.dp]
        for at in range(0, len(mine), _BATCH):
            tokens = torch.zeros(_BATCH, _WIDTH + 1, dtype=torch.long)
            mask = torch.zeros(_BATCH, _WIDTH + 1)
            for row, here, one in zip(tokens, mask, mine[at : at + _BATCH], strict=True):
                row[: len(one.tokens)] = one.tokens
                here[len(one.tokens) - len(one.mask) : len(one.tokens)] = torch.tensor(one.mask)
            yield {
                "tokens": tokens[:, :-1],
                "input_ids": tokens[:, :-1],
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": mask[:, 1:].contiguous(),
                "position_ids": torch.arange(_WIDTH).expand(_BATCH, -1),
            }


_CLASSES = {_PRETRAIN: "MegatronPretrainTrainer", _SFT: "MegatronSFTTrainer"}


class _Nothing:
    """An optimizer, and a scheduler: changes no weight."""

    param_groups = ()

    def zero_grad(self) -> None:
        """Do nothing."""

    def step(self, increment: int = 0) -> tuple[bool, float, int]:
        """Do nothing, well."""
        return True, 0.0, 0
