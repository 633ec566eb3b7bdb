"""What this package raises: one base, and one class for each thing that can be wrong.

Every class also inherits the standard type it refines, so ``except ValueError``
keeps working. A message says what was got, what was wanted and what to change.
"""


class LossAggregationError(Exception):
    """Base of everything this package raises."""


class AggregationError(LossAggregationError, ValueError):
    """An aggregation that names no loss: unknown mode, missing or superfluous divisor."""


class PlanError(LossAggregationError, ValueError):
    """Counts or ids that do not describe one optimizer step."""


class LayoutError(LossAggregationError, ValueError):
    """Lengths, offsets or ranks that describe no split of the tokens."""


class ReducerError(LossAggregationError, ValueError):
    """A mask, per-token loss or custom share that does not fit its microbatch."""


class ReducerPathError(LossAggregationError, ImportError):
    """A custom reducer path that leads to no callable."""


class ContractError(LossAggregationError, RuntimeError):
    """A Megatron-Core, configuration or call sequence whose scaling cannot be undone."""


class ProofError(LossAggregationError, ValueError):
    """Parallel sizes or options under which no proof can run."""
