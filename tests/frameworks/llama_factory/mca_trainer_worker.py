"""mcore_adapter's own ``McaTrainer`` on a small GPT on the CPU, with our hook and without.

``mca_trainer_worker.py FILE``: a training step, its log and an evaluation for every DP and CP of
this number of processes, both loss scalings, padded and packed batches; rank 0 writes a row for
each. The trainer's constructor, which reads a model of Hugging Face's, does not run. gloo has no
average, a CPU no pinned memory.
"""

import functools
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import tiny_gpt
import torch
import torch.distributed as dist
from mcore_adapter.trainer import DPOTrainer, McaTrainer
from mcore_adapter.trainer import trainer as module
from megatron.core import parallel_state as mpu
from ranks import leave

import megatron_lossagg.cpu as cpu
from megatron_lossagg import Aggregation
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import mcore_adapter
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.drivers import llama_factory
from megatron_lossagg.verify.step_data import VOCABULARY

WIDTH, BATCH, MICROBATCHES = 16, 2, 4
PADDED = [(16,), (8,), (12,), (4,), (16,), (12,), (4,), (8,)]
PACKED = [(4, 12), (8,), (8, 4), (16,), (4, 4, 8), (12,), (12, 4), (4,)]
"""Lengths of the conversations of each entry of the step's batches."""
STOCK = module.get_forward_backward_func


llama_factory.use_cpu()


def conversations():
    """Draw the step's conversations: by entry, tokens and labels of each."""
    return {
        is_packed: [
            [one(f"{is_packed}{entry}{part}", n) for part, n in enumerate(lengths)]
            for entry, lengths in enumerate(PACKED if is_packed else PADDED)
        ]
        for is_packed in (False, True)
    }


def one(name, length):
    """Draw a conversation; its labels are moved to the logit that predicts them already."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)) * 31 + length)
    text = torch.randint(VOCABULARY, (length + 1,), generator=draw)
    labels = text[1:].clone()
    labels[torch.rand(length, generator=draw) < 0.4] = -100
    labels[0] = text[1]
    return text[:-1], labels


def microbatches(entries):
    """Make the batches of this data-parallel rank, as a collator of LLaMA-Factory's does."""
    made = []
    for first in range(0, len(entries), BATCH):
        shape = (BATCH, WIDTH)
        tokens, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
        number = torch.zeros(shape, dtype=torch.long)
        for row, entry in enumerate(entries[first : first + BATCH]):
            begin = 0
            for part, (text, label) in enumerate(entry):
                here = slice(begin, begin + len(text))
                tokens[row, here], labels[row, here], number[row, here] = text, label, part + 1
                begin += len(text)
        made.append({"input_ids": tokens, "labels": labels, "attention_mask": number})
    return made[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def by_hand(model, entries):
    """Compute loss and gradient of each mode, one conversation at a time."""
    found = {}
    for mode in ("token_mean", "sample_mean"):
        sums, counts = [], []
        for text, label in itertools.chain(*entries):
            where = torch.arange(len(text))[None]
            losses = model(text[None], where, None, labels=label.clamp(min=0)[None])[0]
            sums.append((losses * (label != -100)).sum())
            counts.append(int((label != -100).sum()))
        loss = sum(sums) / sum(counts)
        if mode == "sample_mean":
            loss = sum(x / n for x, n in zip(sums, counts, strict=True)) / len(sums)
        found[mode] = (loss.item(), torch.autograd.grad(loss, list(model.parameters())))
    return found


def trainer_of(kind, chunk, *, is_packed, per_token):
    """Make a trainer without its constructor, with what that sets."""
    logged = []
    trainer = llama_factory.trainer_of(
        kind,
        chunk,
        batches=[{"labels": [None] * BATCH}] * (MICROBATCHES // mpu.get_data_parallel_world_size()),
        calculate_per_token_loss=per_token,
        sequence_packing=is_packed,
    )
    vars(trainer).update(
        control=SimpleNamespace(should_evaluate=False, should_save=False, should_log=True),
        logged=logged,
        log=logged.append,
        store_flos=lambda: None,
        _get_learning_rate=lambda: 0.0,
        _globalstep_last_logged=0,
        _total_loss_scalar=0.0,
    )
    return trainer


def stepped(trainer, batches):
    """Train a step and evaluate it; returns what was logged."""
    chunks = trainer.models_wrapped
    loss, metrics, *_ = trainer.training_step(chunks, iter(batches), WIDTH)
    gradients = [parameter.main_grad.clone() for parameter in chunks[0].parameters()]
    trainer.state.global_step += 1
    trainer._maybe_log_save_evaluate(
        loss, 1.0, trainer.model, None, 0, None, metrics_tensors=metrics
    )
    evaluated = trainer.evaluation_loop(batches, "evaluation").metrics
    return gradients, trainer.logged[-1], evaluated


def installed(how):
    """Leave mcore_adapter as it is, or hook it."""
    module.get_forward_backward_func, McaTrainer.metrics_keys = STOCK, ["loss"]
    if how == "shadow":
        return mcore_adapter.install(None, options=Options(shadow="sample_mean"))
    return None if how == "stock" else mcore_adapter.install(Aggregation(how))


def difference(found, wanted):
    """Return the norm of found next to that of wanted, and how far they differ."""
    pairs = list(zip(found, wanted, strict=True))
    norm = sum((w**2).sum() for _, w in pairs).sqrt()
    return {
        "norm": (sum((f**2).sum() for f, _ in pairs).sqrt() / norm).item(),
        "differs": (sum(((f - w) ** 2).sum() for f, w in pairs).sqrt() / norm).item(),
    }


def rows_of(cp):
    """Return the rows of a parallelism."""
    entries = conversations()
    sizes = {"DP": mpu.get_data_parallel_world_size(), "CP": cp}
    for per_token, is_packed in itertools.product((False, True), (False, True)):
        alone = mpu.get_data_parallel_world_size() * cp == 1
        for how in ("sample_mean", "token_mean", "stock", "shadow"):
            chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=per_token))
            hook = installed(how)
            trainer = trainer_of(McaTrainer, chunk, is_packed=is_packed, per_token=per_token)
            gradients, logged, evaluated = stepped(trainer, microbatches(entries[is_packed]))
            yield {
                **sizes,
                "alone": alone,
                "per_token": per_token,
                "packed": is_packed,
                "how": how,
                "gradients": gradients,
                "logged": logged,
                "evaluated": evaluated,
                "steps": hook and hook.num_steps,
            }


def refusal():
    """Return what a trainer of DPO says."""
    installed("sample_mean")
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    trainer = trainer_of(DPOTrainer, chunk, is_packed=False, per_token=False)
    trainer.train_config = SimpleNamespace(use_ref_model=False)
    try:
        trainer.training_step([chunk], iter([]), WIDTH)
    except ContractError as error:
        return str(error)
    return ""


def main(output):
    """Write every row, next to the reference of one process."""
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rows = []
    for cp in (1, 2) if dist.get_world_size() == 2 else (2,):
        mpu.initialize_model_parallel(context_parallel_size=cp)
        tiny_gpt.model_parallel_cuda_manual_seed(1)
        rows += rows_of(cp)
        refused = refusal()
        mpu.destroy_model_parallel()
    mpu.initialize_model_parallel()
    plain = tiny_gpt.gpt(config := tiny_gpt.config_of(), cpu.gpt_layer_spec(config))
    wanted = {packed: by_hand(plain, them) for packed, them in conversations().items()}
    for row in rows:
        found = row.pop("gradients")
        row["to"] = {
            mode: difference(found, gradient)
            for mode, (_, gradient) in wanted[row["packed"]].items()
        }
        row["losses"] = {mode: loss for mode, (loss, _) in wanted[row["packed"]].items()}
    if dist.get_rank() == 0:
        written = {"rows": rows, "refused": refused}
        numbers = functools.partial(json.dumps, default=float)
        Path(output).write_text(numbers(written))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
