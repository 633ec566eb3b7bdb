"""With which coefficient partial losses arrive, by Megatron's own schedule; two ranks.

Prints a line for each case of ``audit_cases`` in each layout and loss scaling.
"""

import functools
import re
import warnings
from contextlib import nullcontext

import pytest
from audit_cases import LAYOUTS, cases_of
from ranks import begin, each_told
from training_steps import Training, returning

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.outcome import WeighedSteps
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify.world import split_world


def trained(training, loss_func):
    """Train a step as the first of a run; return the gradient and the warnings."""
    faults._warned.clear()
    training.aggregator._weighed_steps = WeighedSteps()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradient = training.step(loss_func)
    own = [str(one.message) for one in caught if one.category is RuntimeWarning]
    return gradient, [one for one in own if "the mask is 1 at the last" not in one]


def check(training, plain, case):
    """Train a case: its refusal, or the gradient of the plain program and its warnings."""
    loss_func = returning(case.loss, **case.declared)
    is_last = training.aggregator.groups.is_last_stage
    if case.refused:
        with pytest.raises(ContractError, match=case.refused) if is_last else nullcontext():
            trained(training, loss_func)
        return
    expected = plain(case.plain)
    found, warned = trained(training, loss_func)
    tolerance = 2e-2 if training.layout.bf16 else case.tolerance
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert len(warned) == bool(case.warned and is_last), warned
    assert all(re.search(case.warned, one) for one in warned), warned


def main():
    begin()
    for layout_name, layout in LAYOUTS.items():
        with split_world(layout):
            for per_token in (False, True):
                training = Training(layout, per_token=per_token)
                plain = functools.cache(training.plain)  # several cases have one plain program
                scaling = training.aggregator.loss_scaling
                for name, case in cases_of(layout).items():
                    each_told(
                        f"{layout_name} | {scaling} | {name}",
                        functools.partial(check, training, plain, case),
                    )


if __name__ == "__main__":
    main()
