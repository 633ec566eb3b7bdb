"""What loaders and microbatches may be under the schedule hook; the gradient is that by loops."""

import collections
import functools
import threading
import types
from dataclasses import replace

import torch
import torch.distributed as dist
from hooked_loop import (
    SAMPLE_MEAN,
    OfDicts,
    a_batch,
    assert_trains_by_hand,
    forward_step,
    framework_loss,
    of_both_ranks,
    run,
    run_worker,
    with_loss,
)

from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.sequences import Sequences


class Slots:
    """An object without a dict."""

    __slots__ = ("batch",)

    def __init__(self, batch):
        self.batch = batch


class Holder(types.SimpleNamespace):
    """A plain object."""


def fields_of(holder):
    return {name: value for name, value in vars(holder).items() if name != "batch"}


KINDS = {
    "a dict": (dict, dict),
    "a UserDict": (collections.UserDict, dict),
    "a tuple of a dict": (lambda batch: (batch,), lambda found: dict(found[0])),
    "an object with slots": (Slots, lambda found: dict(found.batch)),
    "tensors one plain object deep": (
        lambda batch: {"of": Holder(**batch)},
        lambda found: fields_of(found["of"]),
    ),
    "a plain object": (lambda batch: Holder(**batch), fields_of),
    "a plain object with a dict": (
        lambda batch: Holder(batch=batch),
        lambda found: dict(found.batch),
    ),
    "a list of plain objects": (
        lambda batch: {"of": [Holder(**batch)]},
        lambda found: fields_of(found["of"][0]),
    ),
}
"""How a microbatch holds a batch, and how the framework reads it."""


def fresh(data, hold):
    """Yield microbatches with tensors of their own."""
    for batch in data:
        yield hold({name: value.clone() for name, value in batch.items()})


def refilling_one(data, hold):
    """Yield one microbatch, whose tensors are filled anew."""
    kept = {name: value.clone() for name, value in data[0].items()}
    microbatch = hold(kept)
    for batch in data:
        for name, value in batch.items():
            kept[name].copy_(value)
        yield microbatch


def refilling_storage(data, hold):
    """Yield microbatches of their own over one storage."""
    kept = {name: value.clone() for name, value in data[0].items()}
    for batch in data:
        for name, value in batch.items():
            kept[name].copy_(value)
        yield hold({name: value.view(value.shape) for name, value in kept.items()})


def refilling_the_mask(data, hold):
    """Yield microbatches whose masks share a storage."""
    mask = data[0]["loss_mask"].clone()
    for batch in data:
        mask.copy_(batch["loss_mask"])
        yield hold({**{name: value.clone() for name, value in batch.items()}, "loss_mask": mask})


LOADERS = (fresh, refilling_one, refilling_storage, refilling_the_mask)


class Reading(OfDicts):
    """The integration over microbatches of another kind."""

    def __init__(self, read):
        super().__init__()
        self._read = read

    def sequences(self, data):
        return super().sequences(self._read(data))


class Floats(OfDicts):
    """An integration that counts in floats."""

    def sequences(self, data):
        found = super().sequences(data)
        counts = torch.as_tensor(found.active_tokens).float()
        return Sequences(active_tokens=counts, lengths=found.lengths)


class Rejecting(OfDicts):
    """An integration whose counts are those before a rejection."""

    def sequences(self, data):
        found = super().sequences(data)
        lengths = torch.as_tensor(found.lengths)
        return Sequences(active_tokens=lengths, lengths=lengths)


def of_data(read):
    """Return a forward_step that reads microbatches of a kind."""

    def step(iterator, model):
        return forward_step(iter([read(next(iterator))]), model)

    return step


def hooked(stock, integration=None, **options):
    hook = ScheduleHook(
        SAMPLE_MEAN, integration or OfDicts(), options=Options(probe=False, **options)
    )
    return hook.wrap(stock)


def assert_trains(chunk, stock, *, hold, read, loader):
    of_ranks = of_both_ranks()
    data = loader(of_ranks[dist.get_rank()], hold)
    step = of_data(read)
    schedule = hooked(stock, Reading(read))
    assert_trains_by_hand(schedule, chunk, of_ranks, data, forward_step_func=step)


def check_microbatches_of_any_kind_by_loaders_that_use_memory_again(chunk, stock):
    for name, (hold, read) in KINDS.items():
        for loader in LOADERS:
            try:
                assert_trains(chunk, stock, hold=hold, read=read, loader=loader)
            except BaseException as error:
                error.add_note(f"{name}, {loader.__name__}")
                raise


def check_microbatches_that_hold_what_cannot_be_copied(chunk, stock):
    weight = torch.ones(2, requires_grad=True)
    others = {
        "a lock": threading.Lock,
        "a generator": lambda: (one for one in (1, 2)),
        "a tensor with a graph": lambda: weight * 2,
    }
    for name, other in others.items():

        def hold(batch, other=other):
            return {"batch": batch, "other": other()}

        try:
            assert_trains(
                chunk, stock, hold=hold, read=lambda found: dict(found["batch"]), loader=fresh
            )
        except BaseException as error:
            error.add_note(name)
            raise


def check_counts_in_floats(chunk, stock):
    assert_trains_by_hand(hooked(stock, Floats()), chunk, of_both_ranks())


def check_a_mask_that_rejects_tokens_where_it_was_declared(chunk, stock):
    """Each sequence of 8 tokens was counted whole; its mean is over the 8."""
    of_ranks = of_both_ranks()
    schedule = hooked(stock, Rejecting(), rejects_tokens=True)
    run(schedule, chunk, of_ranks[dist.get_rank()])
    expected = torch.cat([one.flatten() for one in rejected_by_hand(chunk, of_ranks)])
    got = torch.cat([one.main_grad.flatten() for one in chunk.module.parameters()])
    assert (got - expected).norm() < 1e-5 * expected.norm()


def rejected_by_hand(chunk, of_ranks):
    num_sequences = sum(len(batch["tokens"]) for of_rank in of_ranks for batch in of_rank)
    total = 0.0
    for batch in (batch for of_rank in of_ranks for batch in of_rank):
        losses = chunk.module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        total = total + (losses * batch["loss_mask"]).sum() / losses.shape[1] / num_sequences
    return torch.autograd.grad(total, list(chunk.module.parameters()))


class WithoutSum(OfDicts):
    """An integration that leaves the framework's loss out of the comparison."""

    def loss(self, loss_func, output):
        return replace(super().loss(loss_func, output), masked_sum=None)


def check_a_loss_func_that_changes_the_output_in_place(chunk, stock):
    def in_place(mask, output):
        output.view(-1).mul_(mask.view(-1))
        return framework_loss(mask, output)

    step = with_loss(lambda mask: functools.partial(in_place, mask))
    for integration in (None, WithoutSum()):
        schedule = hooked(stock, integration)
        assert_trains_by_hand(schedule, chunk, of_both_ranks(), forward_step_func=step)


def check_a_loader_that_reads_ahead_by_itself(chunk, stock):
    """Two microbatches of the next step are in its queue."""
    data = [a_batch(10 * dist.get_rank() + number) for number in range(2)]
    queue = collections.deque(map(dict, [*data, *data]))
    ahead = iter(queue.popleft, None)
    assert_trains_by_hand(hooked(stock), chunk, of_both_ranks(), ahead)
    assert len(queue) == 2


if __name__ == "__main__":
    run_worker(globals())
