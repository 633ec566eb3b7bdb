"""Memory that microbatches refer to, that is not copied, and that is filled again."""

import functools
import re
import types

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import PlanError
from megatron_lossagg.guards import refilled
from megatron_lossagg.loop.buffer import StepBuffer
from megatron_lossagg.reduction import faults

M, TOKENS = 3, 8


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Every test is a process of its own: its first step, and it has warned of nothing."""
    refilled.begin_run()
    monkeypatch.setattr(faults, "_warned", set())


def replayed(source, *, active_tokens=TOKENS, num_microbatches=M):
    buffer = StepBuffer(source, num_microbatches)
    buffer.plan(Aggregation("token_mean"), lambda data: [active_tokens])
    return [microbatch.data for microbatch in buffer]


class Plain(types.SimpleNamespace):
    """An object that is not copied, unless it has an array as an attribute."""


class Handle:
    """Copies nothing of itself, as a handle of shared memory."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __deepcopy__(self, memo):
        return self


class Slotted:
    __slots__ = ("tokens",)

    def __init__(self, tokens):
        self.tokens = tokens


def filling(memory, made):
    """Yield ``made()`` over memory that holds 0, 1, 2, ... as time goes."""
    for number in range(99):
        memory[...] = number
        yield made()


def after(change, made):
    """Yield ``made()``, with ``change(0)``, ``change(1)``, ... before each."""
    for number in range(99):
        change(number)
        yield made()


def closure_over(tokens):
    return lambda: tokens


T, A = torch.zeros(2, TOKENS // 2), np.zeros(TOKENS)
HALF, LARGE = torch.zeros(2, 4, dtype=torch.bfloat16), np.zeros(5_000_000)


def two_levels_down(memory):
    return filling(memory, lambda: {"mask": [1], "batch": Plain(held={"ids": memory[:]})})


FILLED = {
    "a dict in an object": (lambda: two_levels_down(T), "Plain.held['ids']"),
    "a NumPy array there": (lambda: two_levels_down(A), "Plain.held['ids']"),
    "a bfloat16 tensor there": (lambda: two_levels_down(HALF), "Plain.held['ids']"),
    "a large array there": (lambda: two_levels_down(LARGE), "Plain.held['ids']"),
    "an object in an object": (
        lambda: filling(T, lambda: {"a": Plain(held=Plain(held=[T]))}),
        "Plain.held.held[0]",
    ),
    "a closure": (lambda: filling(T, lambda: {"a": closure_over(T)}), "function.tokens"),
    "a partial": (lambda: filling(T, lambda: {"a": functools.partial(max, T)}), "partial.args[0]"),
    "a partial by name": (
        lambda: filling(T, lambda: {"a": functools.partial(max, key=T)}),
        "partial.keywords['key']",
    ),
    "a key that is no name": (
        lambda: filling(T, lambda: {"a": Plain(held={(0, 1): T})}),
        "Plain.held[...]",
    ),
    "a handle": (lambda: filling(T, lambda: {"a": Handle(T)}), "Handle.tokens"),
    "an object with slots": (
        lambda: filling(T, lambda: {"a": Slotted([T])}),
        "Slotted.tokens[0]",
    ),
    "by NumPy": (lambda: filling(T.numpy(), lambda: {"a": Slotted([T])}), "Slotted.tokens[0]"),
}


@pytest.mark.parametrize("name", FILLED)
def test_memory_that_is_filled_again_and_not_copied_is_refused_by_name(name):
    source, path = FILLED[name]
    with pytest.raises(PlanError, match=re.escape(f"{path} of microbatch 0 was filled again")):
        replayed(source())
    replayed(source(), num_microbatches=1)  # nothing was read after it


def test_a_ring_of_buffers_is_refused():
    ring = [T.clone(), T.clone()]

    def source():
        for number in range(9):
            yield {"a": Plain(held=Plain(held=ring[number % 2].fill_(number)))}

    replayed(source(), num_microbatches=2)
    with pytest.raises(PlanError, match=r"Plain\.held\.held of microbatch 0 was filled again"):
        replayed(source())


class Packer:
    """Packs what is pending."""

    def __init__(self):
        self.pending = [torch.full((TOKENS,), float(number)) for number in range(99)]

    def pack(self):
        """Return nothing; microbatches hold the method."""


def packed():
    packer = Packer()
    return after(lambda _: packer.pending.pop(0), lambda: {"tokens": T, "pack": packer.pack})


def seeded():
    collator = Plain()

    def draw(number):
        collator.state = torch.Generator().manual_seed(number).get_state()

    return after(draw, lambda: {"tokens": T, "loader": Plain(collator=collator)})


def cached():
    cache = Plain(slots=[T.clone(), T.clone()])

    def replace(number):
        cache.slots[number % 2] = torch.full((TOKENS,), float(number))

    return after(replace, lambda: {"tokens": T, "loader": Plain(cache=cache)})


def written_alike():
    table = torch.arange(64.0)
    held = Plain(tables={"rotary": table, "same": table.numpy(), "empty": [table * torch.nan]})
    return after(lambda _: table.copy_(torch.arange(64.0)), lambda: {"tokens": T, "of": held})


RIGHT = {
    "a packer whose pending list shrinks": packed,
    "a collator that keeps its generator's state": seeded,
    "a cache whose tensors are replaced": cached,
    "a table that is written with its numbers": written_alike,
}


@pytest.mark.parametrize("name", RIGHT)
def test_memory_that_is_replaced_or_written_alike_is_right(name):
    source = RIGHT[name]()
    for _ in range(4):
        assert len(replayed(source)) == M


@pytest.mark.parametrize("made", [torch.zeros, np.zeros])
def test_an_array_with_fewer_numbers_than_active_tokens_is_warned_of_once(made):
    """Of 4 domains; as a mixer counts them, or as the bounds of sequences are."""
    counts = made(4)
    mixer = Plain(of=Plain(counts=counts))

    def add(number):
        counts[number % 4] += 1

    source = after(add, lambda: {"tokens": T, "mixer": Plain(mixer=mixer)})
    with pytest.warns(RuntimeWarning, match=r"mixer\.of\.counts of micro.*0, 4 numbers.*Ignore th"):
        replayed(source)
    replayed(source)
    replayed(source)  # step 3, which is not looked at
    with pytest.raises(PlanError, match="filled again"):
        replayed(after(add, lambda: {"mixer": Plain(mixer=mixer)}), active_tokens=4)


def test_an_object_that_all_microbatches_share_is_warned_of_if_its_arrays_are_replaced():
    """It may be a cache, or each microbatch's data of which all get the last."""
    one = Plain(held={})

    def replace(number):
        one.held["ids"] = torch.full((TOKENS,), float(number))

    source = after(replace, lambda: {"mask": [1], "batch": one})
    with pytest.warns(RuntimeWarning, match=r"held\['ids'\] of microbatch 0.* or replaced after"):
        replayed(source)


class Refills(Dataset):
    """A data set that keeps one array for all of its entries."""

    def __init__(self):
        self.entry = A

    def __len__(self):
        return 9

    def __getitem__(self, number):
        self.entry[:] = number
        return {"tokens": self.entry}


def test_what_is_shared_copied_one_number_or_a_source_is_not_looked_at():
    seen, counter = [], torch.zeros(1)

    class Reader:  # of which the microbatch has the copied part
        def __init__(self):
            self.buffers = {"tokens": T}

    reader = Reader()
    for made in (
        lambda: {"tokens": T, "cache": Plain(of=Plain(seen=seen.append(torch.zeros(1)) or seen))},
        lambda: {"tokens": T, "metrics": Plain(of=Plain(counter=counter.add_(1)))},
        lambda: {"tokens": T, "reader": Plain(of=reader), "model": Plain(of=torch.nn.Linear(2, 2))},
        lambda: {"tokens": T, "reader": reader},
    ):
        found = replayed(filling(T, made))
        assert [data["tokens"][0, 0].item() for data in found] == [0, 1, 2]
    source = Refills()
    sources = source, DataLoader(source), (number for number in A), re, Plain(of=Dataset)
    for held in sources:
        replayed(filling(A, lambda held=held: {"held": Plain(of=Plain(of=held)), "tokens": [1]}))


def test_a_table_that_is_written_alike_on_a_device_is_right(monkeypatch):
    """Its numbers stay there, and are compared if its version says that it was written."""
    reads, table = [], torch.arange(float(TOKENS))
    held = {"a": Plain(tables=[table])}
    monkeypatch.setattr(refilled, "_sample", lambda array: reads.append(1) or array.clone())
    replayed(iter([held] * M))
    assert len(reads) == 1
    replayed(after(lambda _: table.copy_(table.clone()), lambda: held))
    assert len(reads) == 3
    replayed(iter([held] * M))  # step 3
    with pytest.raises(PlanError, match=r"tables\[0\] of microbatch 0 was filled again"):
        replayed(filling(table, lambda: held))


def test_what_was_written_on_a_device_but_cannot_be_read_is_warned_of():
    table = torch.zeros(TOKENS, device="meta")
    held = Plain(tables=[table])
    replayed(iter([{"a": held}, {"a": held}]), num_microbatches=2)
    with pytest.warns(RuntimeWarning, match=re.escape("Plain.tables[0] of microbatch 0")):
        replayed(filling(table, lambda: {"a": held}))


@pytest.mark.parametrize(
    "array",
    [
        torch.sparse_coo_tensor(size=(9,), check_invariants=True),
        torch.zeros(3, 3).T,
        torch.zeros(3, dtype=torch.complex128),
        np.zeros((3, 3)).T,
        np.zeros(9, "U3"),
    ],
)
def test_an_array_of_any_kind_may_be_shared(array):
    replayed(iter([{"a": Plain(held=[array])}] * M))


def test_memory_is_looked_at_in_steps_1_2_4_and_8():
    refused = []
    for step in range(1, 9):
        try:
            replayed(two_levels_down(T))
        except PlanError:
            refused.append(step)
    assert refused == [1, 2, 4, 8]


def test_a_run_that_numbers_its_steps_is_looked_at_from_its_first_one():
    replayed(iter([{"a": [1]}] * M))
    replayed(iter([{"a": [1]}] * M))  # the third step of this process is looked at in no run
    with pytest.raises(PlanError, match="was filled again"):
        StepBuffer(two_levels_down(T), M, step_number=1).plan(
            Aggregation("token_mean"), lambda data: [TOKENS]
        )
    StepBuffer(two_levels_down(T), M, step_number=3).plan(
        Aggregation("token_mean"), lambda data: [TOKENS]
    )


def test_a_step_looks_at_few_values_and_bytes(monkeypatch):
    """However much microbatches refer to, and each object and array once."""
    looked, parts, sample = [0, 0], refilled._parts, refilled._sample

    def counted_parts(value):
        looked[0] += 1
        return parts(value)

    def counted_sample(array):
        found = sample(array)
        looked[1] += found.nbytes
        return found

    monkeypatch.setattr(refilled, "_parts", counted_parts)
    monkeypatch.setattr(refilled, "_sample", counted_sample)
    shared = Plain(of={"table": [np.zeros(1 << 20)] * 9})
    replayed(iter([{"a": shared, "b": Plain(of=shared)}] * 64), num_microbatches=64)
    assert looked[0] == 4  # the two objects, the dict and the list
    assert looked[1] == 2 << 19  # the one array at both looks, each 16th number
    looked[:] = 0, 0
    ids = [*range(9999)]

    def source():
        while True:
            arrays = [[np.zeros(1 << 15)] for _ in range(64)]
            yield {"a": [Plain(of=Plain(arrays=one, ids=list(ids))) for one in arrays]}

    refilled.begin_run()
    replayed(source(), num_microbatches=64)
    assert looked[0] < 4096
    assert looked[1] < 2.1 * (1 << 24)
