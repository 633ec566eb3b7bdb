"""LLaMA-Factory with mcore_adapter (``USE_MCA=1``): the collator of ``run_sft``, and its trainer.

With Megatron-Bridge LLaMA-Factory calls Bridge's own loop: ``--framework bridge``. Not run: the
trainer's constructor, which reads a model of Hugging Face's, and its optimizer.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from megatron_lossagg.cpu.training import _indices
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import (
    IGNORED,
    Drawn,
    HookedDriver,
    Unchanging,
    cut,
    word_tokenizer,
)
from megatron_lossagg.verify.parallelism import Parallelism

_PER_TOKEN, _PACKS = "calculate_per_token_loss=True", "neat_packing=True"
_WIDTH = 64


class FrameworkDriver(HookedDriver):
    """LLaMA-Factory's trainer around a small GPT."""

    function = "llamafactory.train.mca.trainer.CustomMcaTrainer.training_step"
    schedule = "mcore_adapter.trainer.trainer"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "the default": Aggregation("token_mean"),
        _PER_TOKEN: Aggregation("token_mean"),
        _PACKS: Aggregation("token_mean"),
        f"{_PACKS}, {_PER_TOKEN}": Aggregation("token_mean"),
    }

    def __init__(self, parallelism: Parallelism, drawn: Sequence[Drawn]) -> None:
        super().__init__(parallelism, drawn)
        self.workflow = importlib.import_module("llamafactory.train.mca.workflow")
        use_cpu()

    def install(self, aggregation: Aggregation) -> None:
        """Install mcore_adapter's hook."""
        from megatron_lossagg.integrations import mcore_adapter

        mcore_adapter.install(aggregation)

    def train(self, trained: str | Aggregation, prepared: Any) -> Mapping[str, float]:
        """Run the trainer's step; it takes the schedule when it is constructed."""
        own = trained if isinstance(trained, str) else ""
        per_token, packs = _PER_TOKEN in own, _PACKS in own
        batches = [*self._batches(packs=packs)]
        with self.trained_by(trained):
            trainer = trainer_of(
                self.workflow.CustomMcaTrainer,
                self.chunks[per_token],
                batches=batches,
                calculate_per_token_loss=per_token,
                sequence_packing=packs,
            )
            _, metrics, *_ = trainer.training_step(trainer.models_wrapped, iter(batches), _WIDTH)
        return {"loss": float(trainer.gather_metrics(metrics)["loss"])}

    def _batches(self, *, packs: bool) -> Iterator[dict[str, Any]]:
        """Collate sequences two by two, or packs of unequal sizes, as ``run_sft`` does."""
        own = self.mine()
        collator, size = collator_of(self.workflow), 1 + (len(own) % 2 == 0)
        for pack in cut(own) if packs else []:
            one = entry(pack, multiple=2 * self.parallelism.cp)
            for name, padding in (("input_ids", 0), ("labels", IGNORED), ("attention_mask", 0)):
                one[name].append(padding)  # to the cutoff length
            yield dict(collator([one]))
        for start in range(0, 0 if packs else len(own), size):
            yield dict(collator([entry([one]) for one in own[start : start + size]]))


def entry(drawn: Sequence[Drawn], *, multiple: int = 1) -> dict[str, list[int]]:
    """Write conversations as ``neat_packing`` does: numbered in ``attention_mask`` from 1."""
    made: dict[str, list[int]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for number, one in enumerate(drawn, 1):
        padding = -len(one.tokens) % multiple
        made["input_ids"] += one.tokens.tolist() + [0] * padding
        made["labels"] += one.labels.tolist() + [IGNORED] * padding
        made["attention_mask"] += [number] * (len(one.tokens) + padding)
    return made


def collator_of(workflow: Any) -> Any:
    """Make the collator as ``run_sft`` does."""
    from llamafactory.data.template import TEMPLATES

    return workflow._data_collator_wrapper(
        workflow.SFTDataCollatorWith4DAttentionMask(
            template=TEMPLATES["default"],
            model=None,
            padding="longest",
            pad_to_multiple_of=_WIDTH,
            label_pad_token_id=IGNORED,
            tokenizer=word_tokenizer(),
        )
    )


class _Pinless:
    """torch, whose tensors are not pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *values: Any, pin_memory: bool = False, **options: Any) -> Any:
        """Make a tensor."""
        return torch.tensor(*values, **options)


def _reduced(values: Any, group: Any = None, op: Any = dist.ReduceOp.SUM) -> Any:
    """Reduce as mcore_adapter's function; gloo has no average."""
    if isinstance(values, dict):
        return {name: _reduced(one, group, op) for name, one in sorted(values.items())}
    total = values.reshape(-1).contiguous()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group) if op == dist.ReduceOp.AVG else total


def use_cpu() -> None:
    """Let mcore_adapter slice and reduce on a CPU."""
    factory: Any = importlib.import_module("mcore_adapter.models.model_factory")
    trainer: Any = importlib.import_module("mcore_adapter.trainer.trainer")
    factory.torch, trainer.distributed_reduce = _Pinless(), _reduced
    engine = SimpleNamespace(thd_get_partitioned_indices=_indices)
    sys.modules.setdefault("transformer_engine", cast(Any, SimpleNamespace()))
    sys.modules.setdefault("transformer_engine_torch", cast(Any, engine))


def trainer_of(kind: Any, chunk: Any, *, batches: Sequence[Any], **options: Any) -> Any:
    """Make a trainer without its constructor, with what that sets, for a step of some batches."""
    from mcore_adapter.models import model_factory
    from mcore_adapter.trainer import trainer as module

    model = chunk.module
    cut = model_factory.PretrainedModel.get_batch_on_this_cp_rank
    model.main_input_name = "input_ids"
    model.get_batch_on_this_cp_rank = types.MethodType(cut, model)
    model.config.num_moe_experts = model.config.mtp_num_layers = None
    models = object.__new__(model_factory.VirtualModels)
    models.models, models.config = [model], model.config
    size = len(batches[0]["labels"])
    trainer: Any = object.__new__(kind)
    vars(trainer).update(
        args=SimpleNamespace(
            gradient_accumulation_steps=len(batches),
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
            device=torch.device("cpu"),
            prediction_loss_only=True,
            overlap_param_gather=False,
            use_distributed_optimizer=False,
            **{"sequence_packing": False, **options},
        ),
        model=models,
        model_impl="transformer_engine",
        models_wrapped=[chunk],
        forward_backward_func=module.get_forward_backward_func(),
        optimizer=Unchanging(),
        lr_scheduler=Unchanging(),
        state=SimpleNamespace(global_step=0),
        _pad_batched_inputs=lambda inputs, length: inputs,
    )
    return trainer
