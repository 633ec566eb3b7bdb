"""A rank of the user's own ``pretrain_gpt.py`` under ``lossagg run --cpu``, watched.

``python -m megatron_lossagg.verify.frameworks.megatron_lm_rank FILE MODE SCRIPT ...``: the last
rank
appends one JSON line per training step to FILE, ``{"loss", "grad_norm"}``. MODE: JSON keywords of
the oracle, by which each step is computed too, on one process: ``{"wanted_loss",
"wanted_grad_norm"}``; ``null`` for none.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import megatron_lossagg.cpu as cpu
from megatron_lossagg.cpu.training import install_training
from megatron_lossagg.verify import reference_loss

__all__ = ["main"]

_SEED = 5
_Write = Callable[[dict[str, float]], None]


def main(file: str, mode: str, script: str, *options: str) -> None:
    """Run the script by ``lossagg run`` in this process."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    install_training()
    import torch.distributed as dist
    from megatron.training import training

    def write(event: dict[str, float]) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            with Path(file).open("a") as out:
                out.write(json.dumps(event) + "\n")

    _watch(training, write)
    keywords = json.loads(mode)
    if keywords is not None:
        _compute_too(training, write, keywords)
    sys.argv = ["lossagg", "run", "--cpu", script, *options]
    runpy.run_module("megatron_lossagg", run_name="__main__", alter_sys=True)


def _watch(training: Any, write: _Write) -> None:
    """Write what each step returns; give the model weights that do not depend on the layout."""
    train_step, setup = training.train_step, training.setup_model_and_optimizer

    @functools.wraps(train_step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        out = train_step(*args, **kwargs)
        write({"loss": float(out[0]["lm loss"]), "grad_norm": float(out[5])})
        return out

    @functools.wraps(setup)
    def with_own_weights(*args: Any, **kwargs: Any) -> Any:
        out = setup(*args, **kwargs)
        cpu.initialize_weights(out[0], seed=_SEED)
        return out

    training.train_step, training.setup_model_and_optimizer = watched, with_own_weights


def _compute_too(training: Any, write: _Write, keywords: dict[str, Any]) -> None:
    """Compute each training step by the oracle, from the batches that the script reads."""
    get_schedule = training.get_forward_backward_func

    def get(*args: Any, **kwargs: Any) -> Any:
        schedule = get_schedule(*args, **kwargs)

        def run(**call: Any) -> Any:
            batches: list[dict[str, Any]] = []

            def recorded(data_iterator: Any) -> Any:
                for batch in data_iterator:
                    batches.append(batch)
                    yield dict(batch)

            result = schedule(**{**call, "data_iterator": recorded(call["data_iterator"])})
            if not call.get("forward_only"):
                write(_wanted(call["model"][0], batches, keywords))
            return result

        return run

    training.get_forward_backward_func = get


def _wanted(
    model: torch.nn.Module, batches: Sequence[dict[str, Any]], keywords: dict[str, Any]
) -> dict[str, float]:
    """Compute a step's loss and its gradient's norm; each entry goes through the model alone."""
    sequences: list[reference_loss.StepSequence] = []
    for index, batch in enumerate(batches):
        for tokens, labels, mask, positions in zip(
            *(batch[name] for name in ("tokens", "labels", "loss_mask", "position_ids")),
            strict=True,
        ):
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
    loss = reference_loss.step_loss(sequences=sequences, microbatches=[len(batches)], **keywords)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    return {"wanted_loss": loss.item(), "wanted_grad_norm": norm.item()}


if __name__ == "__main__":
    main(*sys.argv[1:])
