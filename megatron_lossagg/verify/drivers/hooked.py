"""What the drivers share whose framework looks up Megatron's schedule, and trains a loss per token.

The loss is weighed where the model returns it, around the schedule; a mode of ours is trained by
the framework's integration, which rebinds the schedule too.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_lossagg.integrations._shared import HOOK, replaced
from megatron_lossagg.integrations.weigh_script import ScriptWeighing, rebind_schedule
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import Drawn, Driver
from megatron_lossagg.verify.drivers.outcome import FrameworkError
from megatron_lossagg.weigh.weighing import LOSS

_SIZES = (1, 2, 3)
"""Sequences of a rank's microbatches, over and over."""


class HookedDriver(Driver):
    """A loop whose module looks up the schedule by its name."""

    schedule: ClassVar[str]
    """The module."""
    terms: ClassVar[Mapping[str, tuple[str, float]]] = {LOSS: ("nll", 1.0)}
    lacks = frozenset(("prompt_mean",))  # its data has no prompts

    def start(self) -> None:
        """Build a model for each loss scaling."""
        self.chunks = {one: self.wrapped(per_token=one) for one in (False, True)}

    def microbatches(self) -> list[list[Drawn]]:
        """Return this rank's sequences, as microbatches of unequal sizes."""
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        return cut(self.drawn[rank :: self.parallelism.dp])

    def listen(self, report: Any) -> ScriptWeighing:
        """Listen to what the model returns."""
        weighing = ScriptWeighing(1, sys.maxsize, stop=False, report=report)
        rebind_schedule(self.schedule, weighing, expected=f"a loop of {self.function}")
        return weighing

    @contextmanager
    def trained_by(self, trained: str | Aggregation) -> Iterator[Any]:
        """Rebind the schedule for a step of a mode of ours; give what looks it up."""
        module = import_module(self.schedule)
        with replaced(module, **{HOOK: getattr(module, HOOK)}):
            if isinstance(trained, Aggregation):
                self.install(trained)
            yield getattr(module, HOOK)

    @abstractmethod
    def install(self, aggregation: Aggregation) -> None:
        """Install the framework's integration."""


def loss_of(returned: Sequence[Any]) -> dict[str, float]:
    """Return the loss that a ``train_step`` of Megatron's logs, from what it returns.

    Raises :class:`FrameworkError` if it logs none.
    """
    logged, _, _, ends, exit_code, *_ = returned
    if ends:
        raise FrameworkError(
            f"got exit code {exit_code} from train_step and no loss: after the first step it ends "
            "a run whose loss is NaN or infinite; run this setting or mode alone to see its weights"
        )
    if "lm loss" not in logged:
        raise FrameworkError(f"got {[*logged]} in the log of train_step, expected 'lm loss'")
    return {"loss": float(logged["lm loss"])}


def packed(drawn: Sequence[Drawn], *, multiple: int) -> dict[str, Tensor]:
    """Put sequences into one pack, each padded to a multiple: flat tensors, and offsets."""
    columns: dict[str, list[int]] = {"tokens": [], "labels": [], "loss_mask": [], "positions": []}
    offsets = [0]
    for one in drawn:
        tokens, n = one.tokens.tolist(), len(one.tokens) - 1
        padding = [0] * (-n % multiple)
        columns["tokens"] += tokens[:-1] + padding
        columns["labels"] += tokens[1:] + padding
        columns["loss_mask"] += [0] * (n - len(one.mask)) + one.mask + padding
        columns["positions"] += range(n + len(padding))
        offsets.append(offsets[-1] + n + len(padding))
    made = {name: torch.tensor(values) for name, values in columns.items()}
    return {**made, "offsets": torch.tensor(offsets, dtype=torch.int32)}


def cut(drawn: Sequence[Drawn]) -> list[list[Drawn]]:
    """Cut a rank's sequences into microbatches of unequal sizes."""
    left, made, sizes = list(drawn), [], cycle(_SIZES)
    while left:
        size = next(sizes)
        made.append(left[:size])
        left = left[size:]
    return made
