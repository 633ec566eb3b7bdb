"""What this package raises and says: one base, and a class for each thing that can be wrong.

Commands have a few more, which refine these.

Every class also inherits the standard type it refines, so ``except ValueError``
keeps working. A message states what was got, what was expected and what to change.
"""

import sys
from collections.abc import Iterable
from difflib import get_close_matches


class LossAggregationError(Exception):
    """Base of everything this package raises.

    Examples:
        >>> try:
        ...     Aggregation("constant")
        ... except LossAggregationError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        AggregationError True
    """


class AggregationError(LossAggregationError, ValueError):
    """An invalid aggregation: unknown mode, missing or superfluous divisor."""


class PlanError(LossAggregationError, ValueError):
    """Counts or ids that do not describe one optimizer step."""


class LayoutError(LossAggregationError, ValueError):
    """Lengths, offsets or ranks that do not describe a split of the tokens."""


class ReducerError(LossAggregationError, ValueError):
    """A mask, per-token loss or custom partial loss that does not fit its microbatch."""


class ReducerPathError(LossAggregationError, ImportError):
    """A path of a custom reducer or a weights function that does not lead to a callable."""


class ContractError(LossAggregationError, RuntimeError):
    """A Megatron-Core, configuration or call sequence whose scaling cannot be compensated."""


class ProofError(LossAggregationError, ValueError):
    """Parallel sizes or options that cannot be verified."""


def message_of(error: BaseException) -> str:
    """Return what another rank is told: a message of this package, or any error with its type."""
    return str(error) if isinstance(error, LossAggregationError) else repr(error)


def meant(name: str, names: Iterable[str]) -> str:
    """Ask for the near one of some names; empty if none is. Not for losses, whose near names differ
    in formula: ``reduction/modes.py`` has theirs.
    """
    near = get_close_matches(name, [*names], n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def say(text: str) -> None:
    """Print a line about the progress, to standard error: the result is on standard output."""
    print(f"lossagg: {text}", file=sys.stderr, flush=True)
