"""What StepBuffer replays of microbatches whose memory, or objects, a loader uses again."""

import copy
import itertools
import math
import tempfile
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import PlanError
from megatron_lossagg.loop.buffer import StepBuffer


def values(data):
    """Return what a microbatch holds, as lists, whatever its containers are."""
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return values(data.tolist())
    if isinstance(data, dict):
        return {name: values(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [values(value) for value in data]
    if hasattr(data, "__dict__"):
        return values(vars(data))
    return data


def replayed(source, num_microbatches=3):
    buffer = StepBuffer(source, num_microbatches)
    buffer.plan(Aggregation("token_mean"), lambda data: [1])
    return [microbatch.data for microbatch in buffer]


@dataclass
class Batch:
    tokens: Any


class Plain:
    def __init__(self, tokens):
        self.tokens = tokens


class Slotted:
    __slots__ = ("tokens",)


def one_slotted_object():
    held = Slotted()
    for number in range(9):
        held.tokens = number
        yield held


Pair = namedtuple("Pair", "tokens name")


def refilled(memory, made):
    """Yield ``made()`` over memory that holds 0, 1, 2, ... as time goes."""
    for number in range(9):
        memory[...] = number
        yield made()


def one_object(held, name):
    for number in range(9):
        if isinstance(held, dict):
            held[name] = torch.tensor([number])
        elif isinstance(held, list):
            held[:] = [torch.tensor([number])]
        else:
            setattr(held, name, torch.tensor([number]))
        yield held


class Refills(Dataset):
    """A data set that keeps one array for all of its entries."""

    def __init__(self):
        self.entry = np.zeros(4)

    def __len__(self):
        return 9

    def __getitem__(self, number):
        self.entry[:] = number
        return {"tokens": self.entry}


T, A = torch.zeros(2, 4), np.zeros((2, 4))
REUSED = {
    "one tensor": lambda: refilled(T, lambda: T),
    "fresh dicts over one tensor": lambda: refilled(T, lambda: {"a": T[0], "b": T.T}),
    "lists in dicts": lambda: refilled(T, lambda: {"a": [T.view(-1), "x"], "b": None}),
    "a tuple of a tuple": lambda: refilled(T, lambda: (1, (T,))),
    "a named tuple": lambda: refilled(T, lambda: Pair(T.detach(), "x")),
    "a dataclass": lambda: refilled(T, lambda: Batch([T])),
    "an object": lambda: refilled(T, lambda: Plain([T])),
    "a NumPy array": lambda: refilled(A, lambda: {"a": A}),
    "views of a NumPy array": lambda: refilled(A, lambda: {"a": A[::-1], "b": A[:, ::2]}),
    "tensors over a NumPy array": lambda: refilled(A, lambda: torch.from_numpy(A)),
    "an array of objects": lambda: refilled(T, lambda: np.array([T, None], dtype=object)[:1]),
    "a DataLoader without a collation": lambda: iter(DataLoader(Refills(), batch_size=None)),
    "one dict": lambda: one_object({}, "tokens"),
    "one list": lambda: one_object([], ""),
    "one dataclass": lambda: one_object(Batch(None), "tokens"),
    "an object in a dict": lambda: refilled(T, lambda: {"a": Plain(T)}),
    "one object in a dict": lambda: ({"a": one} for one in one_object(Plain(None), "tokens")),
    "one object": lambda: one_object(Plain(None), "tokens"),
}


def memory_map():
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(range(100)))
        file.flush()
        yield from np.memmap(file.name, mode="r+", shape=(10, 10))


SOURCES = REUSED | {
    "slices of a memory map": memory_map,
    "text": lambda: iter("a microbatch each"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_microbatches_are_replayed_as_they_were_read(name):
    wanted = [copy.deepcopy(values(data)) for data in itertools.islice(SOURCES[name](), 6)]
    source = SOURCES[name]()
    for step in range(2):
        assert [values(data) for data in replayed(source)] == wanted[3 * step : 3 * step + 3]
    assert wanted[0] != wanted[1]


def test_an_object_of_another_kind_in_a_microbatch_is_not_copied():
    lock, dataset = threading.Lock(), Plain(T)
    sample = Plain(T)
    sample.dataset = dataset
    (data,) = replayed(iter([{"sample": sample}]), 1)
    assert data["sample"].tokens is not T
    assert data["sample"].dataset is dataset
    (data,) = replayed(iter([{"tokenizer": math, "locks": [lock], "a": T}]), 1)
    assert data["tokenizer"] is math
    assert data["locks"][0] is lock
    assert data["a"] is not T


def test_a_meta_tensor_stands_for_a_device():
    held = torch.zeros(4, device="meta")
    copied = replayed(iter([{"a": held}, {"a": held[2:]}, {"a": held[:2]}]))
    assert all(data["a"].is_meta and data["a"] is not held for data in copied)


def test_a_microbatch_that_cannot_be_copied_is_refused():
    with pytest.raises(PlanError, match=r"copying a microbatch.* raised TypeError.*after 1 of 2"):
        replayed(iter(["text", threading.Lock()]), 2)
    assert [values(data.tokens) for data in replayed(one_slotted_object())] == [0, 1, 2]
