"""One run of an unmodified Megatron-LM script, with the numbers that tests compare in full.

``megatron_lm_worker.py FILE [--by-hand] SCRIPT ...``: appends one JSON line per training step
(loss by name, grad norm) and per evaluation to FILE, from the last rank. Weights do not depend
on the layout, and change with ``SEED``. ``--by-hand``: on one process, also each step's
``sample_mean`` and its gradient's norm, by loops over conversations that go through the model one
by one, unpacked. ``--plain``: the script by ``runpy`` alone, without ``lossagg run``.
``KILL_AFTER=n``: every rank kills itself in step n + 1. ``WITHOUT=name``: one stand-in of
``megatron_lossagg.cpu.training`` is taken away.
"""

import functools
import json
import os
import pkgutil
import runpy
import signal
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_lossagg.cpu as cpu
from megatron_lossagg.cli.main import main
from megatron_lossagg.cpu import stand_ins
from megatron_lossagg.cpu.training import install_training

SEED = int(os.environ.get("SEED", "5"))
KILL_AFTER = int(os.environ.get("KILL_AFTER", "-1"))


def watch(training, write):
    """Wrap the functions of ``megatron.training.training`` whose results are compared."""
    train_step, evaluate = training.train_step, training.evaluate
    setup = training.setup_model_and_optimizer

    @functools.wraps(train_step)
    def watched_step(*args, **kwargs):
        if training.get_args().curr_iteration == KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        out = train_step(*args, **kwargs)
        write({"step": values(out[0]), "grad_norm": float(out[5])})
        return out

    @functools.wraps(evaluate)
    def watched_evaluate(*args, **kwargs):
        out = evaluate(*args, **kwargs)
        write({"evaluate": values(out[0] or {})})
        return out

    @functools.wraps(setup)
    def setup_with_own_weights(*args, **kwargs):
        out = setup(*args, **kwargs)
        if training.get_args().iteration == 0:  # a float32 optimizer has no copies of the weights
            cpu.initialize_weights(out[0], seed=SEED)
        return out

    training.train_step, training.evaluate = watched_step, watched_evaluate
    training.setup_model_and_optimizer = setup_with_own_weights


def values(losses):
    return {name: float(value) for name, value in losses.items()}


def watch_by_hand(training, write):
    """Compute each training step by hand, from the batches that the script reads."""
    get_schedule = training.get_forward_backward_func

    def get(*args, **kwargs):
        schedule = get_schedule(*args, **kwargs)

        def run(**call):
            batches = []

            def recorded(data_iterator):
                while True:
                    batches.append(next(data_iterator))
                    yield dict(batches[-1])

            result = schedule(**{**call, "data_iterator": recorded(call["data_iterator"])})
            if not call.get("forward_only"):
                write({"by_hand": by_hand(call["model"][0], batches)})
            return result

        return run

    training.get_forward_backward_func = get


def by_hand(model, batches):
    """Return the mean over conversations of their mean token loss, and its gradient's norm."""
    means, num_sequences = [], 0
    for batch in batches:
        offsets = batch.get("cu_seqlens")
        size = batch["tokens"].size(1)
        for entry in range(len(batch["tokens"])):
            cuts = [0, size] if offsets is None else offsets[0].tolist()
            for start, end in pairwise(cuts):
                if start == end:
                    continue
                num_sequences += 1
                tokens, labels, mask, positions = (
                    batch[name][entry, start:end]
                    for name in ("tokens", "labels", "loss_mask", "position_ids")
                )
                if not mask.any():
                    continue
                losses = model(tokens[None], positions[None], None, labels=labels[None])[0]
                active = [losses[t] for t in range(len(mask)) if mask[t] == 1]
                means.append(sum(active) / len(active))
    loss = sum(means) / num_sequences
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = sum((g.double() ** 2).sum() for g in gradients) ** 0.5
    return {"sample_mean": loss.item(), "grad_norm": norm.item(), "sequences": num_sequences}


def run(file, arguments):
    install_training()
    if name := os.environ.get("WITHOUT"):
        owner, _, attribute = name.rpartition(".")
        setattr(pkgutil.resolve_name(owner), attribute, stand_ins._originals[name])
    from megatron.training import training

    def write(event):
        if dist.get_rank() == dist.get_world_size() - 1:
            with Path(file).open("a") as out:
                out.write(json.dumps(event) + "\n")

    watch(training, write)
    option = arguments[0]
    if option == "--plain":
        del arguments[0]
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
        dist.barrier()
        dist.destroy_process_group()
        return 0
    if option == "--by-hand":
        del arguments[0]
        watch_by_hand(training, write)
    return main(["run", "--cpu", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
