"""Megatron-LM: ``pretrain_gpt.py --sft``, from packed conversations through ``train_step``.

Its data set packs, its ``get_batch`` and ``loss_func`` run. Not run: a tokenizer, its loader, its
model and its optimizer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import Drawn, HookedDriver, Unchanging, cut, loss_of
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.step_data import VOCABULARY

PER_TOKEN = "--calculate-per-token-loss"
PAD, EOD = VOCABULARY - 2, VOCABULARY - 1
_LENGTH = 96


class FrameworkDriver(HookedDriver):
    """A step of the script around a small GPT."""

    function = "megatron.training.training.train_step"
    schedule = "megatron.training.training"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "the default": Aggregation("token_mean"),  # which its log has
        PER_TOKEN: Aggregation("token_mean"),
    }

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, [ended(one) for one in drawn])
        of_rank = len(cut(self.drawn[:: parallelism.dp]))
        begin(parallelism, micro_batch_size=1, global_batch_size=of_rank * parallelism.dp, sft=True)
        from megatron.training.datasets import sft_dataset

        self.script, self.data_set = import_module("pretrain_gpt"), sft_dataset.SFTDataset

    def install(self, aggregation: Aggregation) -> None:
        """Install the hook of ``lossagg run``."""
        from megatron_lossagg.integrations import megatron_lm

        megatron_lm.install(aggregation)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Run ``train_step``, as its loop does."""
        with self.trained_by(trained) as get_schedule:
            chunk = self.chunks[trained == PER_TOKEN]
            return train_step(self.script.forward_step, self._batches(), chunk, get_schedule())

    def _batches(self) -> Iterator[Any]:
        """Pack this rank's sequences as its data set does, and collate as its loader does."""
        packs = self.microbatches()
        config = SimpleNamespace(
            tokenizer=_Tokenizer(),
            sequence_length=_LENGTH,
            context_parallel_size=self.parallelism.cp,
            reset_position_ids=False,
            reset_attention_mask=False,
            create_attention_mask=False,
        )
        data = object.__new__(self.data_set)
        vars(data).update(
            dataset=[[{"role": "system", "content": one} for one in pack] for pack in packs],
            indices=range(len(packs)),
            num_samples=len(packs),
            config=config,
        )
        return iter(torch.utils.data.DataLoader(data))


class _Tokenizer:
    """Takes a drawn sequence for a message."""

    pad, eod = PAD, EOD

    def tokenize_conversation(self, conversation: Any, **_: Any) -> Any:
        """Return a sequence's tokens and targets."""
        one = conversation[0]["content"]
        return one.tokens, one.labels


def ended(one: Drawn) -> Drawn:
    """Return a sequence that ends as Megatron-LM's do, and has no padding's token."""
    tokens = one.tokens.clamp(max=PAD - 1)
    tokens[-1] = EOD
    return replace(one, tokens=tokens)


def begin(parallelism: Parallelism, **given: Any) -> Namespace:
    """Give Megatron-LM its arguments: its defaults, and what is given."""
    from megatron.training import arguments, initialize

    options = {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": _LENGTH,
        "max_position_embeddings": _LENGTH, "lr": 1.0, "train_iters": 1,
        "tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY,
        "context_parallel_size": parallelism.cp,
        "transformer_impl": "local", "distributed_backend": "gloo",
    }  # fmt: skip
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    off = ("gradient-accumulation-fusion", "create-attention-mask-in-dataloader")
    own, sys.argv = sys.argv, ["pretrain_gpt.py", *argv, *(f"--no-{name}" for name in off)]
    try:
        args: Namespace = arguments.parse_args()
        vars(args).update(given)
        initialize.initialize_megatron(
            parsed_args=args, allow_no_cuda=True, skip_mpu_initialization=True
        )
    finally:
        sys.argv = own
    return args


def train_step(
    forward_step: Any, batches: Iterator[Any], chunk: Any, schedule: Any
) -> dict[str, float]:
    """Run ``train_step``; return the loss that it logs."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import training

    iterator = RerunDataIterator(batches)
    returned = training.train_step(
        forward_step, iterator, [chunk], Unchanging(), Unchanging(), chunk.config, schedule
    )
    return loss_of(returned)
