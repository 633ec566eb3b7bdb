"""Watches a script of Megatron-LM in this process, and computes its steps by the reference.

Events: one per training step, ``{"step": losses by name, "grad_norm"}``, and one per evaluation,
``{"evaluate": losses by name}``; of :func:`compute_too`, on one process, ``{"wanted", "grad_norm",
"sequences"}`` per step, and ``{"of_evaluation"}``, all that it reads as one step. Weights do not
depend on the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

import megatron_lossagg.cpu as cpu
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.job import Event

_Write = Callable[[Event], None]


def watch(training: Any, write: _Write) -> None:
    """Write what steps and evaluations of ``megatron.training.training`` return."""
    train_step, evaluate = training.train_step, training.evaluate
    evaluate_and_print, evaluated = training.evaluate_and_print_results, []
    setup = training.setup_model_and_optimizer

    def values(losses: Any) -> dict[str, float]:
        return {name: float(value) for name, value in (losses or {}).items()}

    @functools.wraps(train_step)
    def watched_step(*args: Any, **kwargs: Any) -> Any:
        out = train_step(*args, **kwargs)
        write({"step": values(out[0]), "grad_norm": float(out[5])})
        return out

    @functools.wraps(evaluate)
    def watched_evaluate(*args: Any, **kwargs: Any) -> Any:
        out = evaluate(*args, **kwargs)
        evaluated.append(out[0])
        return out

    @functools.wraps(evaluate_and_print)
    def watched_print(*args: Any, **kwargs: Any) -> Any:
        evaluated.clear()
        out = evaluate_and_print(*args, **kwargs)
        for losses in evaluated:  # as they are printed: a wrapper of evaluate may change them
            write({"evaluate": values(losses)})
        return out

    @functools.wraps(setup)
    def setup_with_own_weights(*args: Any, **kwargs: Any) -> Any:
        options = training.get_args()
        is_sharded = getattr(options, "use_megatron_fsdp", False)
        with own_weights_wrapped() if is_sharded else nullcontext():
            out = setup(*args, **kwargs)
        # A float32 optimizer has no copies of the weights.
        if options.iteration == 0 and not (options.finetune or is_sharded):
            cpu.initialize_weights(out[0], seed=5)
        return out

    training.train_step, training.evaluate = watched_step, watched_evaluate
    training.evaluate_and_print_results = watched_print
    training.setup_model_and_optimizer = setup_with_own_weights


@contextmanager
def own_weights_wrapped() -> Iterator[None]:
    """Let Megatron-FSDP, which copies a model's weights while it wraps it, wrap our own.

    No collective.
    """
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    name = "FullyShardedDataParallel"  # after 0.19 a function
    wrapper = getattr(adapter, f"{name}V1", None) or getattr(adapter, name)
    wrap = wrapper.__init__

    @functools.wraps(wrap)
    def wrap_own(
        self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        cpu.initialize_weights([module], seed=5)
        wrap(self, config, ddp_config, module, *args, **kwargs)

    wrapper.__init__ = wrap_own
    try:
        yield
    finally:
        wrapper.__init__ = wrap


def compute_too(training: Any, write: _Write, keywords: dict[str, Any]) -> None:
    """Compute steps and evaluations by the reference, from the batches that the script reads."""
    get_schedule, evaluate = training.get_forward_backward_func, training.evaluate
    evaluated: list[dict[str, Any]] = []

    def get(*args: Any, **kwargs: Any) -> Any:
        schedule = get_schedule(*args, **kwargs)

        def run(**call: Any) -> Any:
            batches: list[dict[str, Any]] = []

            def recorded(data_iterator: Any) -> Iterator[dict[str, Any]]:
                for batch in data_iterator:
                    batches.append(batch)
                    yield dict(batch)

            result = schedule(**{**call, "data_iterator": recorded(call["data_iterator"])})
            if call.get("forward_only"):
                evaluated.extend(batches)
            else:
                write(wanted(call["model"][0], batches, keywords))
            return result

        return run

    @functools.wraps(evaluate)
    def evaluate_too(
        forward_step: Any, data_iterator: Any, model: Any, *args: Any, **more: Any
    ) -> Any:
        evaluated.clear()
        out = evaluate(forward_step, data_iterator, model, *args, **more)
        write({"of_evaluation": wanted(model[0], evaluated, keywords)["wanted"]})
        return out

    training.get_forward_backward_func, training.evaluate = get, evaluate_too


def wanted(
    model: torch.nn.Module, batches: Sequence[dict[str, Any]], keywords: dict[str, Any]
) -> dict[str, float]:
    """Compute a step's loss and its gradient's norm, one sequence at a time."""
    sequences: list[dict[str, Any]] = []
    for index, batch in enumerate(batches):
        batch = {
            name: values[None] if values.dim() == 1 else values for name, values in batch.items()
        }
        offsets = batch.get("cu_seqlens", batch.get("cu_seqlens_q"))
        offsets = batch.get("cu_seqlens_padded", offsets)
        for entry, whole in enumerate(batch["tokens"]):
            cuts = [0, len(whole)] if offsets is None else offsets[entry].tolist()
            for start, end in pairwise(cuts):
                if start == end:  # padding of the offsets
                    continue
                tokens, labels, mask, positions = (
                    batch[name][entry, start:end]
                    for name in ("tokens", "labels", "loss_mask", "position_ids")
                )
                losses = model(tokens[None], positions[None], None, labels=labels[None])[0]
                flags = [int(value) for value in mask.tolist()]
                sequences.append(
                    {
                        "x": list(losses.double().unbind()),
                        "counted": flags,
                        "trained": flags,
                        "sample": len(sequences),
                        "microbatch": (0, index),
                    }
                )
    options = {**keywords, "microbatches": [len(batches)]}
    loss = reference_loss.step_loss(sequences=sequences, **options)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    return {"wanted": loss.item(), "grad_norm": norm.item(), "sequences": len(sequences)}
