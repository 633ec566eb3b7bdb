"""A framework's loop as Megatron-LM's, the schedule hook around it, and its loss by hand."""

import functools
import itertools
import re

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lossagg import Aggregation
from megatron_lossagg.integrations.megatron_lm import MaskedSumIntegration
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.step_data import VOCABULARY

SAMPLE_MEAN = Aggregation("sample_mean")

M, LENGTH = 2, 8


class OfDicts(MaskedSumIntegration):
    """Megatron-LM's data, without ``megatron.training``, which is not here."""

    def iteration(self):
        return None


def refused(kind, *words):
    return pytest.raises(kind, match=".*".join(re.escape(word) for word in words))


def a_batch(seed, *, cuts=None, entries=2):
    """Make what Megatron-LM's data loader gives; ``cuts``: offsets of one packed entry."""
    draw = torch.Generator().manual_seed(seed)
    shape = (1 if cuts else entries, LENGTH)
    tokens = torch.randint(VOCABULARY, (shape[0], LENGTH + 1), generator=draw)
    mask = (torch.rand(shape, generator=draw) < 0.6).float()
    mask[:, 0] = 1
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": mask,
        "position_ids": torch.arange(LENGTH).expand(shape),
    }
    if cuts:
        mask[0, cuts[-1] :] = 0
        batch["cu_seqlens"] = torch.tensor([cuts], dtype=torch.int32)
    return batch


def batches(rank, **options):
    return [a_batch(10 * rank + number, **options) for number in range(M)]


def of_both_ranks(**options):
    return [batches(rank, **options) for rank in (0, 1)]


def framework_loss(mask, output):
    losses, mask = output.view(-1).float(), mask.view(-1)
    loss, num_tokens = (losses * mask).sum(), mask.sum().int()
    report = torch.stack([loss.detach(), num_tokens.float()])
    return loss, num_tokens, {"lm loss": report, "accuracy": report.clone()}


def forward_step(iterator, model):
    data = next(iterator)
    for name in list(data):
        data[name] = data[name].clone()  # as a framework that moves its dict to a device in place
    offsets = data.get("cu_seqlens", data.get("cu_seqlens_q"))
    packed = None if offsets is None else tiny_gpt.packed_at(packed_offsets(offsets))
    output = model(
        data["tokens"],
        data["position_ids"],
        None,
        labels=data["labels"],
        packed_seq_params=packed,
    )
    data["tokens"] = None
    return output, functools.partial(framework_loss, data["loss_mask"])


def with_loss(loss_func_of):
    """Return a forward_step whose loss_func is ``loss_func_of(mask)``."""

    def step(iterator, model):
        output, loss_func = forward_step(iterator, model)
        return output, loss_func_of(*loss_func.args)

    return step


def packed_offsets(offsets):
    """Return where sequences lie, and the tail of the entry as a sequence of its own, as a list."""
    return sorted({*offsets.flatten().tolist(), LENGTH} - {-1})


def run(schedule, chunk, data, **more):
    chunk.zero_grad_buffer()
    return schedule(
        **{
            "forward_step_func": forward_step,
            "data_iterator": data if hasattr(data, "__next__") else map(dict, data),
            "model": [chunk],
            "num_microbatches": M,
            "seq_length": LENGTH,
            "micro_batch_size": 2,
            **more,
        }
    )


def gradient(chunk):
    return chunk.buffers[0].grad_data.clone()


def by_hand(chunk, of_ranks):
    """Return the mean over sequences of their weighted mean loss, and its gradient, by loops.

    ``of_ranks``: all ranks' data.
    """
    model, means, num_sequences = chunk.module, [], 0
    for data in (data for rank in of_ranks for data in rank):
        offsets = data.get("cu_seqlens")
        cuts = [0, LENGTH] if offsets is None else sorted(set(offsets.flatten().tolist()))
        for entry in range(len(data["tokens"])):
            for start, end in itertools.pairwise(cuts):
                names = ("tokens", "labels", "loss_mask", "position_ids")
                at = {name: data[name][entry, start:end] for name in names}
                positions = at["position_ids"][None]
                losses = model(at["tokens"][None], positions, None, labels=at["labels"][None])[0]
                weights = at["loss_mask"].tolist()
                weighed = [v * losses[t] for t, v in enumerate(weights) if v]
                num_sequences += 1
                if weighed:
                    means.append(sum(weighed) / sum(weights))
    loss = sum(means) / num_sequences
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def assert_trains_by_hand(schedule, chunk, of_ranks, data=None, **more):
    """Run a step and compare loss and gradient with those of all ranks' data; returns the reports.

    ``data``: what this rank reads, its part of ``of_ranks`` by default.
    """
    own = of_ranks[dist.get_rank()] if data is None else data
    reports = run(schedule, chunk, own, **more)
    loss, gradients = by_hand(chunk, of_ranks)
    assert abs(tiny_gpt.reported(reports, "lm loss") - loss) < 1e-6 * abs(loss)
    for parameter, wanted in zip(chunk.module.parameters(), gradients, strict=True):
        scale = 1e-5 * wanted.norm() + 1e-7
        assert (parameter.main_grad - wanted).norm() < scale
    return reports


def a_hook(**options):
    return ScheduleHook(SAMPLE_MEAN, OfDicts(), options=Options(**options))


def with_weights(rank, **options):
    """Make batches whose loss_mask holds token weights, one of them 0 for a whole sequence."""
    found = batches(rank, **options)
    for number, batch in enumerate(found):
        draw = torch.Generator().manual_seed(100 * rank + number)
        batch["loss_mask"] = batch["loss_mask"] * torch.rand(
            batch["loss_mask"].shape, generator=draw
        )
    found[0]["loss_mask"][0, :3] = 0
    return found


def run_worker(namespace):
    """Run a worker's checks, each on the model and Megatron's schedule."""
    tiny_gpt.start(dtype=torch.float32)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    stock = get_forward_backward_func()
    run_checks(namespace, chunk, stock)
    dist.destroy_process_group()
