"""What a run may do differently from the defaults, next to its aggregation."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Literal

from megatron_lossagg.errors import AggregationError

__all__ = ["EmptyStep", "Options"]

EmptyStep = Literal["zero", "error"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run, the same on every rank; :class:`AggregationError` if one is invalid.

    The flag of each field is ``--loss-aggregation-`` and its name.
    """

    empty_step: EmptyStep = "zero"
    """A step with no active tokens: zero weights and one warning, or an error."""
    probe: bool = True
    """Whether to measure at startup what Megatron does to a loss."""
    rejects_tokens: bool = False
    """Whether loss masks may select fewer tokens than were counted (rejection sampling).

    Such a mask is an error otherwise.
    """

    def __post_init__(self) -> None:
        if self.empty_step not in ("zero", "error"):
            raise AggregationError(f"got empty_step {self.empty_step!r}, expected zero or error")
        for name in ("probe", "rejects_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise AggregationError(f"got {name} {getattr(self, name)!r}, expected a bool")

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
