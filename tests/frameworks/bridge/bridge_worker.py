"""One run of Megatron-Bridge's own ``pretrain`` on the CPU, with the numbers that tests compare.

``bridge_worker.py FILE AGGREGATION CP REGIME [EVALUATION_CP]``: three steps on packed conversations
and an evaluation; EVALUATION_CP is Bridge's ``eval_context_parallel_size``, and a refusal is
printed by every rank. The last rank writes each step's loss and gradient norm to FILE as JSON, and
rank 0, if it is the only one, ``sample_mean`` by the reference, or ``token_mean`` if that is
trained. AGGREGATION ``stock``: the recipe's call is left out; ``stock+MODES``: it asks for shadows
only. With a mode, the steps' numbers and hashes of their record are written too. Weights and data
do not depend on the layout. ``START=FILE`` begins with the weights that a run with ``KEEP=FILE``
ended with, in place of a checkpoint. ``FSDP=optim_grads``: on Megatron-FSDP with this sharding
strategy. ``PICTURES=inside``: Bridge's ``vlm_step`` on a model of
``bridge_pictures.py``. ``LLAMA_FACTORY=sft``: LLaMA-Factory's function of that name starts Bridge.
"""

import contextlib
import functools
import json
import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import bridge_pictures
import imports_bridge  # noqa: F401  first
import llama_factory
import torch
import torch.distributed as dist
from megatron.bridge.data.base import DatasetProvider
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import gpt_step, setup, vlm_step
from megatron.bridge.training.callbacks import CallbackManager
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.pretrain import pretrain
from megatron_lm_watch import own_weights_wrapped, wanted

import megatron_lossagg.cpu as cpu
from megatron_lossagg import Aggregation
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.integrations import bridge
from megatron_lossagg.reduction.aggregation import Options

VOCABULARY, LENGTH, BATCH, STEPS = 128, 32, 4, 3
PICTURES = os.environ.get("PICTURES", "")
"""Whether and where the model takes pictures in: ``inside`` the text, or ``in front`` of it."""
FSDP = os.environ.get("FSDP", "")
SHARDED = {
    "use_megatron_fsdp": True,
    "use_distributed_optimizer": True,
    "data_parallel_sharding_strategy": FSDP,
}
CUTS = ([0, 8, 32], [0, 4, 12, 32], [0, 32], [0, 20, 24, 32])
"""Where the conversations of each entry of a batch begin and end; multiples of 2 CP."""


class Conversations(torch.utils.data.Dataset):
    """Entries of packed conversations; one conversation per batch has no active tokens."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(1000 + self.first + index)
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=draw)
        mask = (torch.rand(LENGTH, generator=draw) < 0.6).float()
        cuts = CUTS[index % BATCH]
        mask[[start for start, _ in pairwise(cuts)]] = 1
        if index % BATCH == 1:
            mask[4:12] = 0
        offsets = torch.tensor(cuts, dtype=torch.int32)
        longest = max(end - start for start, end in pairwise(cuts))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": mask,
            "position_ids": torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)]),
            "cu_seqlens_q": offsets,
            "cu_seqlens_kv": offsets.clone(),
            "max_seqlen_q": torch.tensor(longest),
            "max_seqlen_kv": torch.tensor(longest),
        }


class WithPictures(Conversations):
    """Conversations some of whose tokens are a picture's."""

    collate_fn = staticmethod(bridge_pictures.collated)

    def __getitem__(self, index):
        return bridge_pictures.with_picture(super().__getitem__(index))


def drawn(first, size):
    """Return the data of this run."""
    return (WithPictures if PICTURES else Conversations)(first, size)


@dataclass
class Provider(DatasetProvider):
    """What Bridge asks for data."""

    seq_length: int = LENGTH

    def build_datasets(self, context):
        """Return training, validation and test data."""
        return drawn(0, STEPS * BATCH), drawn(100, 2 * BATCH), None


def configuration(cp, *, per_token, evaluation_cp):
    """Configure a small model, without what needs a GPU."""
    model = (bridge_pictures.Provider if PICTURES else GPTModelProvider)(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=LENGTH,
        position_embedding_type="rope",
        vocab_size=VOCABULARY,
        share_embeddings_and_output_weights=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        transformer_layer_spec=cpu.gpt_layer_spec,
        pipeline_dtype=torch.float32,
        context_parallel_size=cp,
        calculate_per_token_loss=per_token,
    )
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=STEPS, global_batch_size=BATCH, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=STEPS, eval_iters=1),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-3, weight_decay=0.0, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="constant",
            lr_decay_iters=STEPS,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
        ),
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            average_in_collective=False,
            overlap_grad_reduce=False,
            **(SHARDED if FSDP else {}),
        ),
        dataset=Provider(dataloader_type="single", num_workers=0),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
        checkpoint=CheckpointConfig(save=None, **({"ckpt_format": "fsdp_dtensor"} if FSDP else {})),
        rng=RNGConfig(seed=1),
        dist=DistributedInitConfig(
            distributed_backend="gloo", eval_context_parallel_size=evaluation_cp
        ),
    )


def by_reference(model, step, aggregation):
    """Return a step's mean over tokens or conversations and its gradient's norm."""
    data = drawn(0, STEPS * BATCH)
    items = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
    if PICTURES:
        model = bridge_pictures.Seen(model, [item.pop("visual_inputs") for item in items])
    batches = [{name: x[None] for name, x in item.items()} for item in items]
    mode = "token_mean" if aggregation == "token_mean" else "sample_mean"
    return wanted(model, batches, {"mode": mode})


def installed(aggregation, record):
    """Make the recipe's one call; returns the hook, None for stock."""
    if aggregation == "stock":
        return None
    if aggregation.startswith("stock+"):
        return bridge.install(None, options=Options(shadow=aggregation.removeprefix("stock+")))
    return bridge.install(Aggregation(aggregation), options=Options(record=record))


def main(path, aggregation, cp, loss_scaling, evaluation_cp):
    """Train, and write the numbers."""
    # Bridge's own option, which its pretrain does not pass on; warming up kernels is of CUDA's.
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    setup.set_jit_fusion_options = lambda *args, **kwargs: None
    record = Path(path).with_suffix(".jsonl")
    hook = installed(aggregation, record)
    trained, reference, evaluated = [], [], []

    def on_train_start(context):
        if not FSDP:
            cpu.initialize_weights(context.model, seed=5)
        if start := os.environ.get("START"):
            context.model[0].module.load_state_dict(torch.load(start))
            context.optimizer.reload_model_params()

    def on_train_end(context):
        if (keep := os.environ.get("KEEP")) and dist.get_rank() == 0:
            torch.save(context.model[0].module.state_dict(), keep)

    def on_train_step_start(context):
        if dist.get_world_size() == 1:
            model, step = context.model[0].module, context.state.train_state.step
            reference.append(by_reference(model, step, aggregation))

    def on_train_step_end(context):
        losses = {name: float(value) for name, value in (context.loss_dict or {}).items()}
        trained.append({**losses, "grad_norm": float(context.grad_norm)})

    def on_eval_end(context):
        losses = {name: float(value) for name, value in context.total_loss_dict.items()}
        evaluated.append(losses)

    callbacks = CallbackManager()
    events = (on_train_start, on_train_step_start, on_train_step_end, on_eval_end, on_train_end)
    for event in events:
        callbacks.register(event.__name__, event)
    per_token = loss_scaling == "per_token"
    config = configuration(cp, per_token=per_token, evaluation_cp=evaluation_cp)
    if stage := os.environ.get("LLAMA_FACTORY"):
        llama_factory.run(stage, config, callbacks)
    else:
        step = vlm_step.forward_step if PICTURES else gpt_step.forward_step
        with own_weights_wrapped() if FSDP else contextlib.nullcontext():
            pretrain(config, step, callbacks=callbacks)
    written = {"steps": trained, "reference": reference, "evaluated": evaluated}
    lines = record.read_text().splitlines() if record.exists() else []
    written["record"] = [[line["step"], line["weights"]] for line in map(json.loads, lines)]
    written["hooked"] = None if hook is None else hook.num_steps
    return written


if __name__ == "__main__":
    path, aggregation, cp, loss_scaling, *evaluation_cp = sys.argv[1:]
    try:
        numbers = main(path, aggregation, int(cp), loss_scaling, *(map(int, evaluation_cp or [cp])))
    except LossAggregationError as error:
        print(f"REFUSED {error}", flush=True)
    else:
        if numbers["steps"] and numbers["steps"][0]:
            Path(path).write_text(json.dumps(numbers))
