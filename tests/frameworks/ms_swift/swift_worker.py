"""One run of ms-swift's own ``MegatronTrainer.train`` on the CPU, with the numbers tests compare.

``swift_worker.py FILE AGGREGATION CP LOSS_SCALING DATA [ARGUMENT=VALUE ...]``: three steps and an
evaluation on conversations, collated by ms-swift's template; ``DATA``: ``packed`` or ``padded``.
Its own: the trainer with its steps, its loss and its log, the collator, the slices for context
parallelism, the optimizer. Not its own: the model (Megatron-Core's on the CPU), its arguments'
defaults without their checks, a tokenizer, checkpoints. The last rank writes what ms-swift logs to
FILE as JSON, and rank 0, if it is the only one, each step's mean over conversations of their mean
token loss, with its gradient's norm, by loops. AGGREGATION ``stock``: ``install`` is left out;
``shadow``: it asks for a shadow only; ``MODE+weights``: ``loss_scale`` is counted. A refusal is
printed by every rank.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import imports_swift  # noqa: F401  first
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend
from ranks import leave
from swift.megatron.arguments.megatron_args import MegatronArguments
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.megatron.trainers import base
from swift.megatron.trainers.trainer import MegatronTrainer
from swift.megatron.utils import wrap_model
from swift.template.base import Template
from swift.utils import import_external_file

import megatron_lossagg.cpu as cpu
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.verify.drivers.imports import defaults
from megatron_lossagg.verify.step_data import VOCABULARY

STEPS, BATCH = 3, 4
PACKS = ((7, 9, 5), (14,), (4, 11), (6, 3, 8))
"""Tokens of the conversations of a step's packs; padded data has the same, one by one."""
PADDED = ((7,), (9,), (5,), (14,), (4,), (11,), (6,), (3,))


class Conversations(torch.utils.data.Dataset):
    """Encoded conversations as ms-swift's templates make them; one per step trains no token."""

    def __init__(self, first, steps, packs, *, is_packed):
        self.first, self.packs, self.is_packed = first, packs, is_packed
        self.size = steps * len(packs)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        lengths = self.packs[index % len(self.packs)]
        made = [self.encoded(index, part, length) for part, length in enumerate(lengths)]
        return made if self.is_packed else made[0]

    def encoded(self, index, part, length):
        draw = torch.Generator().manual_seed(10_000 * self.first + 100 * index + part)
        tokens = torch.randint(VOCABULARY, (length,), generator=draw).tolist()
        is_trained = torch.rand(length, generator=draw) < 0.6
        is_trained[0], is_trained[-1] = False, True
        if length == 4:
            is_trained[:] = False
        pairs = zip(tokens, is_trained.tolist(), strict=True)
        labels = [token if trained else -100 for token, trained in pairs]
        scale = [
            0.5 + (token % 3) if label >= 0 else 0.0
            for token, label in zip(tokens, labels, strict=True)
        ]
        return {"input_ids": tokens, "labels": labels, "loss_scale": scale, "length": length}


class Collator(Template):
    """ms-swift's template without a tokenizer: its collator."""

    is_training, use_megatron, task_type, mode = True, True, "causal_lm", "train"
    padding_side, remove_unused_columns = "right", True

    def __init__(self, *, is_packed, cp):
        self.padding_free = self.packing = is_packed
        self.sequence_parallel_size = cp
        self._processor = SimpleNamespace(pad_token_id=0)

    @property
    def tokenizer(self):
        return self._processor


class Trainer(MegatronTrainer):
    """ms-swift's trainer on a model for the CPU."""

    def prepare_model(self):
        config = tiny_gpt.config_of(per_token=self.args.calculate_per_token_loss)
        self.unwrapped_models = [tiny_gpt.gpt(config, cpu.gpt_layer_spec(config))]
        self.config, self.bridge = config, None
        self.wrapped_models = wrap_model(self.args, self.unwrapped_models)

    def save_checkpoint(self):
        """Keep nothing."""


class Watch(MegatronCallback):
    """Keeps what ms-swift logs, and computes each step by hand where a process is alone."""

    def on_train_begin(self):
        self.trainer.written = {"steps": [], "evaluated": [], "by_hand": [], "gradients": []}

    def on_step_begin(self):
        if dist.get_world_size() == 1:
            model, data = self.trainer.unwrapped_models[0], self.trainer.data
            is_dft = self.trainer.args.enable_dft_loss
            step, counts_weights = self.trainer.state.iteration, self.trainer.counts_weights
            hand = by_hand(model, data, step, counts_weights, is_dft=is_dft)
            self.trainer.written["by_hand"].append(hand)

    def on_log(self, logs):
        is_evaluation = any(name.startswith("eval_") for name in logs)
        self.trainer.written["evaluated" if is_evaluation else "steps"].append(
            {name: float(value) for name, value in logs.items()}
        )


megatron_callbacks_map["watch"] = Watch
base.warmup_jit_function = lambda *args: None  # it warms up kernels of CUDA


def by_hand(model, data, step, counts_weights, *, is_dft):
    """Return the mean over conversations of their mean token loss, and its gradient's norm.

    ``is_dft``: a token's loss is -p log p, with its probability p as a constant.
    """
    means, num_conversations = [], 0
    for index in range(step * len(data.packs), (step + 1) * len(data.packs)):
        entry = data[index]
        for one in entry if data.is_packed else [entry]:
            tokens, n = torch.tensor(one["input_ids"]), one["length"]
            num_conversations += 1
            losses = model(
                tokens[None, :-1], torch.arange(n - 1)[None], None, labels=tokens[None, 1:]
            )[0]
            if is_dft:
                losses = [x * math.exp(-x.item()) for x in losses]
            scale = one["loss_scale"]
            active = [t for t in range(1, n) if one["labels"][t] >= 0]
            if active:
                count = sum(scale[t] for t in active) if counts_weights else len(active)
                means.append(sum(losses[t - 1] * scale[t] for t in active) / count)
    loss = sum(means) / num_conversations
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = sum((g.double() ** 2).sum() for g in gradients) ** 0.5
    return {"loss": loss.item(), "grad_norm": norm.item()}


def arguments(cp, loss_scaling, data, more):
    """Return the defaults of ms-swift's arguments, and what a run sets."""
    given = vars(defaults(MegatronArguments))
    micro = 1 if data.is_packed else 2
    dp = parallel_state.get_data_parallel_world_size()
    batch = len(data.packs)
    given.update(
        micro_batch_size=micro,
        global_batch_size=batch,
        num_microbatches=batch // micro // dp,
        data_parallel_size=dp,
        context_parallel_size=cp,
        calculate_per_token_loss=loss_scaling == "per_token",
        train_iters=STEPS,
        eval_iters=1,
        eval_steps=STEPS,
        logging_steps=1,
        save_steps=None,
        padding_free=data.is_packed,
        packing=data.is_packed,
        task_type="causal_lm",
        seq_length=64,
        lr=1e-3,
        min_lr=1e-3,
        lr_decay_style="constant",
        weight_decay=0.0,
        start_weight_decay=0.0,
        end_weight_decay=0.0,
        attention_backend=AttnBackend.local,
        use_distributed_optimizer=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        bf16=False,
        fp16=False,
        train_dataloader_shuffle=False,
        dataloader_num_workers=0,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_pin_memory=False,
        main_grads_dtype=torch.float32,
        main_params_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        callbacks=["default_flow", "watch"],
        is_multimodal=False,
        data_seed=1,
        megatron_model_meta=SimpleNamespace(is_multimodal=False),
        new_special_tokens=[],
        streaming=False,
        check_model=False,
        fp8=None,
        fp4=None,
        output_dir=".",
    )
    given.update(more)
    return SimpleNamespace(**given)


PLUGIN = """
from megatron_lossagg import Aggregation
from megatron_lossagg.integrations import {0}
from megatron_lossagg.reduction.aggregation import Options

hook = {0}.install({1})
"""


def installed(path, integration, asked):
    """Import a plugin as ms-swift does for ``--external_plugins``; returns the hook.

    ``asked``: what the plugin gives to ``install``; None for stock, which has no plugin.
    """
    if asked is None:
        return None
    file = Path(path).with_suffix(f".{dist.get_rank()}.py")
    file.write_text(PLUGIN.format(integration, asked))
    return import_external_file(str(file)).hook


def run(train):
    """Train as the command line says; ``train`` returns the trainer and the hook."""
    path, aggregation, cp, loss_scaling, data, *more = sys.argv[1:]
    more = {name: json.loads(value) for name, value in (one.split("=") for one in more)}
    try:
        trainer, hook = train(path, aggregation, int(cp), loss_scaling, data, more)
    except LossAggregationError as error:
        print(f"REFUSED {error}", flush=True)
    else:
        numbers = {**trainer.written, "hooked": None if hook is None else hook.num_steps}
        if dist.get_rank() == dist.get_world_size() - 1:
            Path(path).write_text(json.dumps(numbers))
    leave()


def train(path, aggregation, cp, loss_scaling, data, more):
    """Train for SFT; returns the trainer and the hook."""
    tiny_gpt.start(cp=cp, dtype=torch.float32)
    is_packed = data == "packed"
    packs = PACKS if is_packed else PADDED
    conversations = Conversations(0, STEPS, packs, is_packed=is_packed)
    mode, _, count = aggregation.partition("+")
    asked = {"stock": None, "shadow": "None, options=Options(shadow='sample_mean')"}.get(
        aggregation, f"Aggregation({mode!r}, count={count or 'mask'!r})"
    )
    hook = installed(path, "ms_swift", asked)
    args = arguments(cp, loss_scaling, conversations, more)
    trainer = Trainer(args, Collator(is_packed=is_packed, cp=cp))
    trainer.data, trainer.counts_weights = conversations, aggregation.endswith("+weights")
    trainer.train(conversations, Conversations(1, 1, packs, is_packed=is_packed))
    return trainer, hook


if __name__ == "__main__":
    run(train)
