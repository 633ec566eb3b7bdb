"""What a run may do differently from the defaults, next to its aggregation."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.reduction.aggregation import Aggregation, parsed_aggregation

EmptyStep = Literal["zero", "error"]
SideLosses = Literal["stock", "follow"]
Guards = Literal["error", "warn"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run, the same on every rank; :class:`AggregationError` if one is invalid.

    The flag of each field is ``--loss-aggregation-`` and its name.

    Examples:
        >>> Options(rejects_tokens=True, shadow="token_mean,constant:4096").shadow
        ('token_mean', 'constant:4096')
    """

    empty_step: EmptyStep = "zero"
    """A step with no active tokens: zero weights and one warning, or an error."""
    probe: bool = True
    """Whether to measure at startup what Megatron does to a loss."""
    rejects_tokens: bool = False
    """Whether loss masks may select fewer tokens than were counted (rejection sampling).

    Such a mask is an error otherwise.
    """
    record: str | None = None
    """A file to which each training step appends one line of JSON; None: none is written."""
    shadow: tuple[str, ...] = ()
    """Modes whose loss over the same tokens is reported next to the trained one; no gradient.

    A mode with a number is written with it: ``constant:4096``, ``length_power:0.5``. A string is
    split at its commas.
    """
    side_losses: SideLosses = "stock"
    """Whether MoE and MTP losses keep Megatron's scale, or are multiplied by the sum of weights.

    With ``follow`` their coefficients mean the same under every mode. From megatron-core 0.19 on.
    """

    guards: Guards = "error"
    """Whether what a guard finds ends the step, or is warned of once and recorded.

    Checks of values stay errors: a loss that is not finite, a mask that is not 0 or 1, counts.
    """

    def __post_init__(self) -> None:
        for name, kinds in (
            ("empty_step", EmptyStep),
            ("side_losses", SideLosses),
            ("guards", Guards),
        ):
            first, second = get_args(kinds)
            if getattr(self, name) not in (first, second):
                got = getattr(self, name)
                raise AggregationError(f"got {name} {got!r}, expected {first} or {second}")
        for name in ("probe", "rejects_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise AggregationError(f"got {name} {getattr(self, name)!r}, expected a bool")
        if self.record is not None:
            object.__setattr__(self, "record", _checked_path(self.record))
        object.__setattr__(self, "shadow", _checked_names(self.shadow))
        self.shadows  # noqa: B018  a name that is not known is refused here

    @property
    def shadows(self) -> dict[str, Aggregation]:
        """The aggregation of each name in :attr:`shadow`."""
        found = {}
        for name in self.shadow:
            try:
                found[name] = parsed_aggregation(name)
            except AggregationError as error:
                raise AggregationError(
                    f"--loss-aggregation-shadow (Options.shadow): {error}"
                ) from None
        return found

    def of_step(self, forward_only: bool) -> Options:
        """Return the options of a step: an evaluation without an active token is no error."""
        return replace(self, empty_step="zero") if forward_only else self

    @staticmethod
    def from_args(args: argparse.Namespace) -> Options:
        """Read the flags; one that ``args`` lacks, or has as None, has its default."""
        given = {
            field.name: getattr(args, f"loss_aggregation_{field.name}", None)
            for field in fields(Options)
        }
        return Options(**{name: value for name, value in given.items() if value is not None})


def _checked_path(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise AggregationError(f"got record {path!r}, expected the path of a file")
    return str(os.fspath(path))


def _checked_names(names: object) -> tuple[str, ...]:
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) and n for n in names):
        raise AggregationError(
            f"got shadow {names!r}, expected names of modes: write such as token_mean,constant:4096"
        )
    if len(set(names)) < len(names):
        raise AggregationError(f"got shadow {names!r}, expected each name once")
    return tuple(names)
