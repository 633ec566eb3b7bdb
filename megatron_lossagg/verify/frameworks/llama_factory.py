"""LLaMA-Factory with mcore_adapter (``USE_MCA=1``): its collator, from conversations to the loss.

The collator of ``run_sft`` runs as it is, in the wrapper that moves the labels, on padded and on
packed entries (``neat_packing``). What ``McaIntegration`` counts of its batches weighs the losses
at the labels that it keeps. The model is a table: the logits of a token are its row, and no token
occurs twice. With Megatron-Bridge LLaMA-Factory calls Bridge's own loop: ``--framework bridge``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.verify.drivers.drawn import aggregations
from megatron_lossagg.verify.drivers.outcome import FrameworkError
from megatron_lossagg.verify.frameworks.check import Check, Comparison, compare, loop_not_run
from megatron_lossagg.verify.frameworks.drawn_step import Step

_MCA = "llamafactory.train.mca"
_COLLATOR = f"{_MCA}.workflow._data_collator_wrapper"
_IGNORED = -100
_STEP = (((0, 1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11)),)
_ENTRIES = {False: (1, 1, 1, 1, 1, 1, 1), True: (3, 1, 3)}
"""How many conversations the entries of a batch have: padded, and packed."""


def checks(_: Aggregation) -> list[Check]:
    """List the checks; imports its workflow for mcore_adapter."""
    from llamafactory.train.mca import workflow

    listed = [
        Check(
            f"run_sft's collator{', packed' * packs}, {name}",
            _COLLATOR,
            partial(_collated, workflow, aggregation, packs=packs),
        )
        for packs in (False, True)
        for name, aggregation in aggregations().items()
        if aggregation.mode != "prompt_mean"  # it has no prompt ids
    ]
    trainer = Check("its trainer keeps the loss", f"{_MCA}.trainer.CustomMcaTrainer", _keeps_loss)
    return [*listed, trainer, loop_not_run("LLaMA-Factory", "llamafactory.train.tuner.run_exp")]


def _keeps_loss() -> None:
    """Raise if its trainer has a loss of its own, which the integration would refuse."""
    from llamafactory.train.mca.trainer import CustomMcaTrainer
    from mcore_adapter.trainer import McaTrainer

    from megatron_lossagg.integrations.mcore_adapter import others_than

    if others := others_than(McaTrainer, CustomMcaTrainer):
        raise FrameworkError(f"got {', '.join(others)} of CustomMcaTrainer, expected McaTrainer's")


def _collated(workflow: Any, aggregation: Aggregation, *, packs: bool) -> Comparison:
    """Train the drawn step with what the collator returns for each microbatch."""
    from mcore_adapter.trainer import McaTrainer

    from megatron_lossagg.integrations.mcore_adapter import McaIntegration

    step = Step(_STEP)
    ends = [*itertools.accumulate(len(one.tokens) for one in step.drawn)]
    size = ends[-1]
    ids = [torch.arange(end - len(x.tokens), end) for x, end in zip(step.drawn, ends, strict=True)]
    draw = torch.Generator().manual_seed(17)
    table = torch.randn(size + 1, size, generator=draw).requires_grad_()  # the last row: padding's
    collator = _collator(workflow, padding=size)
    integration = McaIntegration(McaTrainer)
    integration._trainer = SimpleNamespace(args=SimpleNamespace(sequence_packing=packs))

    batches = [collator(list(_entries(step, ids, mb.sequences, packs))) for mb in step.microbatches]
    counted = [integration.sequences(batch).listed() for batch in batches]
    plan = plan_step(aggregation, Sequences.of_microbatches(counted, len(batches)))
    loss, first = torch.zeros(()), 0
    for batch, one in zip(batches, counted, strict=True):
        labels = batch["labels"].flatten()
        mask = labels != _IGNORED
        log_probs = table[batch["input_ids"].flatten()].log_softmax(-1)
        x = -log_probs.gather(-1, labels.where(mask, 0)[:, None])[:, 0]
        is_sequence = ~np.asarray(one.is_padding, dtype=bool)
        end = first + int(is_sequence.sum())
        places = np.full(len(is_sequence), -1)
        places[is_sequence] = range(first, end)
        lengths = torch.tensor([0, *np.asarray(one.lengths)])
        layout = Layout.thd_zigzag(lengths.cumsum(0), cp_size=1, cp_rank=0)
        loss = loss + plan.reducer(places, mask, layout)(x)
        first = end
    wanted = step.wanted(aggregation, _losses(step, ids, table))
    return compare(loss, wanted, [table])


def _collator(workflow: Any, *, padding: int) -> Any:
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
            pad_to_multiple_of=64,
            label_pad_token_id=_IGNORED,
            tokenizer=tokenizer,
        )
    )


def _entries(
    step: Step, ids: Sequence[Tensor], sequences: Sequence[int], packs: bool
) -> Iterator[dict[str, list[int]]]:
    """Write conversations as ``neat_packing`` does: numbered in ``attention_mask`` from 1."""
    left = list(sequences)
    for size in itertools.chain(_ENTRIES[packs], itertools.repeat(1)):
        own, left = left[:size], left[size:]
        if not own:
            return
        entry: dict[str, list[int]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for number, place in enumerate(own, 1):
            tokens, mask = ids[place].tolist(), step.drawn[place].mask
            trained = [0] * (len(tokens) - len(mask)) + mask
            entry["input_ids"] += tokens
            entry["labels"] += [t if m else _IGNORED for t, m in zip(tokens, trained, strict=True)]
            entry["attention_mask"] += [number] * len(tokens)
        if packs:  # to the cutoff length
            entry["input_ids"].append(0)
            entry["labels"].append(_IGNORED)
            entry["attention_mask"].append(0)
        yield entry


def _losses(step: Step, ids: Sequence[Tensor], table: Tensor) -> list[Tensor]:
    """Compute the response tokens' losses of each microbatch in float64, ``[b, s]``."""
    losses = []
    for one, tokens in zip(step.drawn, ids, strict=True):
        log_probs = table.double()[tokens[:-1]].log_softmax(-1).gather(-1, tokens[1:, None])
        losses.append(-log_probs[-len(one.mask) :, 0])
    of = [losses[mb.sequences.start : mb.sequences.stop] for mb in step.microbatches]
    return [pad_sequence(own, batch_first=True) for own in of]
