"""LLaMA-Factory with mcore_adapter (``USE_MCA=1``): the collator of ``run_sft``, and its trainer.

With Megatron-Bridge LLaMA-Factory calls Bridge's own loop: ``--framework bridge``. Not run: the
trainer's constructor, which reads a model of Hugging Face's, and its optimizer.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.drawn import Drawn
from megatron_lossagg.verify.drivers.driver import Unchanging
from megatron_lossagg.verify.drivers.hooked import HookedDriver
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.step_data import VOCABULARY

_PER_TOKEN = "calculate_per_token_loss=True"
_WIDTH, _IGNORED = 64, -100


class FrameworkDriver(HookedDriver):
    """LLaMA-Factory's trainer around a small GPT."""

    function = "llamafactory.train.mca.trainer.CustomMcaTrainer.training_step"
    schedule = "mcore_adapter.trainer.trainer"
    settings: ClassVar[Mapping[str, Aggregation]] = {
        "the default": Aggregation("token_mean"),
        _PER_TOKEN: Aggregation("token_mean"),
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
        from megatron.core import parallel_state

        dp, rank = self.parallelism.dp, parallel_state.get_data_parallel_rank()
        batches = [*collated(self.workflow, self.drawn[rank::dp])]
        per_token = trained == _PER_TOKEN
        with self.trained_by(trained):
            trainer = trainer_of(
                self.workflow.CustomMcaTrainer,
                self.chunks[per_token],
                batches=batches,
                calculate_per_token_loss=per_token,
            )
            _, metrics, *_ = trainer.training_step(trainer.models_wrapped, iter(batches), _WIDTH)
        return {"loss": float(trainer.gather_metrics(metrics)["loss"])}


def collated(workflow: Any, drawn: Sequence[Drawn]) -> Iterator[dict[str, Any]]:
    """Collate sequences two by two, as ``run_sft`` does."""
    collator = collator_of(workflow)
    size = 1 + (len(drawn) % 2 == 0)
    for start in range(0, len(drawn), size):
        features = []
        for one in drawn[start : start + size]:
            mask = torch.tensor([0] * (len(one.tokens) - len(one.mask)) + one.mask)
            features.append(
                {
                    "input_ids": one.tokens.tolist(),
                    "labels": one.tokens.where(mask == 1, _IGNORED).tolist(),
                    "attention_mask": [1] * len(one.tokens),
                }
            )
        yield dict(collator(features))


def collator_of(workflow: Any, *, padding: int = VOCABULARY - 1) -> Any:
    """Make the collator as ``run_sft`` does, for a tokenizer whose words are numbers."""
    from llamafactory.data.template import TEMPLATES
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(number): number for number in range(padding + 1)}, str(padding))
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=Tokenizer(words), pad_token=str(padding), padding_side="right"
    )
    return workflow._data_collator_wrapper(
        workflow.SFTDataCollatorWith4DAttentionMask(
            template=TEMPLATES["default"],
            model=None,
            padding="longest",
            pad_to_multiple_of=_WIDTH,
            label_pad_token_id=_IGNORED,
            tokenizer=tokenizer,
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
