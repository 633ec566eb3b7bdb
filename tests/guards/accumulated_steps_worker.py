"""Optimizer steps of several schedule calls that do not go as they were begun; two ranks."""

import contextlib
import functools
import warnings

import pytest
from audit_cases import LAYOUTS, own
from check_runner import run_checks
from legal_worker import made, same
from ranks import begin
from torch.cuda import OutOfMemoryError
from training_steps import returning, right

from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify.world import split_world

other = returning(lambda mb, x: mb.reduce(x * x))


def raising(step, batch, x):
    raise OutOfMemoryError


@contextlib.contextmanager
def told(times):
    """Expect a number of warnings of gradients that were zeroed early."""
    faults._warned.discard("schedule calls")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(one.message) for one in caught if "gradients were zeroed" in str(one.message)]
    assert len(found) == times, found


def gradients_of(training):
    """Return the gradients of both calls' losses by the plain program."""
    return training.plain(own), training.plain(lambda x, w, t: own(x * x, w, t))


def train(training, first, second, n=2):
    """Train an optimizer step of two of ``n`` calls."""
    same(training.step(right, accumulates=n), first / n)
    same(training.kept_step(other, accumulates=n), (first + second) / n)


def check_an_optimizer_step_is_skipped_after_one_of_two_calls(make):
    training = make()
    first, second = gradients_of(training)
    with told(1):
        training.step(right, accumulates=2)
        train(training, first, second)
        train(training, first, second)


def check_an_optimizer_step_of_fewer_calls_than_declared_is_told(make):
    training = make()
    first, second = gradients_of(training)
    with told(1):
        train(training, first, second, n=3)
        train(training, first, second, n=3)
        same(training.kept_step(right, accumulates=3), (2 * first + second) / 3)


def check_a_call_alone_is_repeated_on_the_gradients_of_the_one_before(make):
    training = make()
    first, second = gradients_of(training)
    with told(0):
        training.step(right, accumulates=2)
        with contextlib.suppress(OutOfMemoryError):
            training.kept_step(raising, accumulates=2)
        training.aggregator._latest.end()
        same(training.kept_step(other, accumulates=2), (first + second) / 2)
        train(training, first, second)


def check_gradients_are_zeroed_before_the_step_is_left(make):
    training = make()
    faults._warned.discard("zero gradients")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        with training.plan() as step:
            training.run(functools.partial(right, step))
            for chunk in training.chunks:
                chunk.zero_grad_buffer()


def check_a_further_call_is_refused(make):
    training = make()
    for n in (1, 2):
        training.step(right, accumulates=n)
        for _ in range(n - 1):
            training.kept_step(right, accumulates=n)
        after = ", after 2 schedule calls" if n > 1 else ""
        with pytest.raises(ContractError, match=f"loss was returned{after}. In a loop"):
            training.kept_step(right, accumulates=n)


def main():
    begin()
    for name in ("DP 2", "CP 2"):
        with split_world(LAYOUTS[name]):
            run_checks(globals(), functools.partial(made, LAYOUTS[name], False))


if __name__ == "__main__":
    main()
