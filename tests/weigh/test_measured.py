"""f of gradients by hand: what is a multiple within rounding, and what is none."""

import numpy as np
import pytest

from megatron_lossagg.weigh.causes import Added, measure

RNG = np.random.default_rng(1)
OWN = [RNG.normal(size=64) for _ in range(2)]
"""What the backward passes of two ranks added."""
SUM = OWN[0] + OWN[1]


def heard(*after, own=OWN, before=0.0, eps=2**-23, name="norm", **more):
    return [
        Added(
            place=(0, 0),
            name=name,
            added=added,
            size=np.abs(added),
            before=np.full(len(added), before),
            after=values,
            eps=eps,
            **more,
        )
        for added, values in zip(own, after, strict=True)
    ]


@pytest.mark.parametrize("f", [1.0, 0.5, 1 / 12, -3.0, 0.0])
def test_f_is_the_gradient_over_what_was_added(f):
    found = measure(heard(f * SUM, f * SUM))
    assert (found.value, found.fault) == (pytest.approx(f), "")


def test_ranks_of_a_distributed_optimizer_have_a_part_each():
    first = np.arange(64) < 20
    parts = np.where(first, 0.5 * SUM, np.nan), np.where(first, np.nan, 0.5 * SUM)
    assert measure(heard(*parts)).value == pytest.approx(0.5)
    assert measure(heard(parts[0], parts[0])) is None  # nobody has the others


@pytest.mark.parametrize(("eps", "off", "agrees"), [(2**-23, 1e-3, False), (2**-7, 1e-2, True)])
def test_within_the_rounding_of_the_dtype_it_is_what_was_read(eps, off, agrees):
    found = measure(heard(*(2 * [0.5 * (1 + off) * SUM]), eps=eps))
    assert found.agrees(0.5) == agrees
    assert not found.agrees(0.25)


def test_a_gradient_that_was_rounded_on_its_way_is_known_as_well_as_that():
    rounded = 0.5 * SUM * (1 + RNG.normal(size=64) * 1e-3)  # a comm hook in bf16
    found = measure(heard(rounded, rounded))
    assert found.agrees(0.5)
    assert not found.agrees(0.51)


def test_own_gradients_were_not_reduced_and_others_are_no_multiple():
    assert measure(heard(*OWN)).fault.startswith("nothing was reduced")
    assert measure(heard(SUM, OWN[1])).fault.startswith("the gradients are no multiple")
    assert measure(heard(SUM, SUM, before=0.1)).fault.startswith("the gradient buffer was not zero")


def test_a_parameter_without_a_gradient_or_with_rounding_only_is_passed_by():
    nothing = heard(*(2 * [np.zeros(64)]), own=2 * [np.zeros(64)], name="frozen")
    assert measure(nothing) is None
    assert measure([*nothing, *heard(SUM, SUM)]).value == pytest.approx(1.0)
    left = [OWN[0], -OWN[0] * (1 + 1e-7)]  # they cancel but for rounding
    assert measure(heard(*(2 * [left[0] + left[1]]), own=left)) is None
    assert measure(heard(np.full(64, np.inf), SUM)) is None
