"""What coefficients say of a call of loss_func: functions over numbers, without processes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lossagg import Aggregation
from megatron_lossagg.guards.gradient_audit import (
    Call,
    GradientAudit,
    TrainedTerm,
    fault_of,
    warn_of,
)
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.step_state import Term

K = 8.0
MODE, OTHER = Aggregation("sample_mean"), Aggregation("token_mean")


def a_term(*coefficients, value=2.0, losses="x", mode=MODE, scale=None, dtype=torch.float32):
    """Return a partial loss that arrived with each of the coefficients."""
    held = torch.tensor(value, dtype=dtype)
    scales = () if scale is None else (torch.tensor(scale),)
    factor = K if scale is None else K * scale
    return TrainedTerm(
        Term(
            aggregation=mode,
            is_recomputed=False,
            num_returned=0,
            losses=(losses,),
            version=held._version,
        ),
        held,
        is_own=mode == MODE,
        is_late=False,
        arrived=[(torch.tensor(c * factor), *scales) for c in coefficients],
    )


def a_call(*terms, loss=None, coefficient=1.0):
    """Return a call of these terms, whose loss is their sum if none is passed."""
    if loss is None:
        arrived = [float(one) / K for term in terms for one, *_ in term.arrived]
        loss = sum(c * float(term.value) for c, term in zip(arrived, terms, strict=False))
    held = torch.tensor(loss)
    line = SimpleNamespace(
        coefficient=coefficient,
        version=held._version,
        known=SimpleNamespace(sequences=np.array([0])),
    )
    return Call(3, line, held, list(terms))


def take(call):
    """Read a call; whether its coefficients say something."""
    return call.take([float(one) for one in call.tensors()], K)


def read(*terms, **more):
    call = a_call(*terms, **more)
    assert take(call)
    return call


def fault(*terms, **more):
    return fault_of(read(*terms, **more))


@pytest.mark.parametrize("c", [1.0, 1 + 5e-6, 1 - 5e-6])
def test_a_coefficient_of_1_is_right(c):
    assert not fault(a_term(c))


@pytest.mark.parametrize("c", [0.5, 2.0, -1.0, 1 + 3e-5, 1 - 3e-5, float("nan"), float("inf")])
def test_any_other_is_named(c):
    message = fault(a_term(c), loss=2.0)
    assert (
        f"call 3 of loss_func arrived in the backward pass with the coefficient {c:.6g}" in message
    )
    assert "expected 1: divide it by nothing" in message


def test_a_declared_coefficient_is_expected_in_its_place():
    assert not fault(a_term(0.5), coefficient=0.5)
    assert "coefficient 1, expected 0.5" in fault(a_term(1.0), coefficient=0.5)


def test_one_of_several_terms_is_enough_in_any_order():
    policy, entropy = a_term(1.0), a_term(0.01, losses="y")
    assert not fault(policy, entropy)
    assert not fault(entropy, policy)
    assert not fault(policy, a_term(1.0, losses="y"))
    assert "coefficient 0.5 and 0.01" in fault(a_term(0.5), entropy)


def test_a_term_under_another_aggregation_is_not_enough():
    assert "coefficient 2" in fault(a_term(2.0), a_term(1.0, mode=OTHER))


def test_the_rounding_of_the_partial_loss_is_tolerated():
    assert not fault(a_term(1.004, dtype=torch.bfloat16))
    assert "coefficient 1.004" in fault(a_term(1.004))
    assert "coefficient 1.02" in fault(a_term(1.02, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "terms",
    [
        [a_term(1.0), a_term(1.0)],
        [a_term(1.0), a_term(0.1)],
        [a_term(1.0, 1.0)],
    ],
    ids=["one tensor", "one tensor, smaller", "one partial loss"],
)
def test_what_is_trained_twice_is_named(terms):
    assert "losses of sequences 0 were trained twice in call 3" in fault(*terms, loss=4.0)


def test_one_tensor_may_be_trained_under_two_aggregations_or_not_arrive():
    assert not fault(a_term(1.0), a_term(0.1, mode=OTHER))
    assert not fault(a_term(1.0), a_term())
    assert not fault(a_term(1.0), a_term(0.0))


def test_a_loss_of_0_may_have_the_coefficient_0():
    assert not fault(a_term(0.0), loss=0.0)
    message = fault(a_term(0.0), loss=3.0)
    assert "the loss of call 3 of loss_func is 3, and its partial loss arrived" in message


@pytest.mark.parametrize("scale", [512.0, 2.0**-8])
def test_a_loss_scale_is_divided_out(scale):
    assert not fault(a_term(1.0, scale=scale), loss=2.0)
    assert "coefficient 2," in fault(a_term(2.0, scale=scale), loss=4.0)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0.0])
def test_a_call_whose_loss_scale_is_none_is_not_judged(scale):
    assert not take(a_call(a_term(2.0, scale=scale), loss=4.0))


@pytest.mark.parametrize("c", [float("inf"), float("nan")])
def test_a_gradient_that_overflows_is_judged_only_without_a_loss_scale(c):
    assert not take(a_call(a_term(c, scale=512.0), loss=4.0))
    assert "with the coefficient" in fault(a_term(c), loss=4.0)


def test_a_loss_that_is_more_than_its_terms_is_warned_of_with_the_difference():
    faults._warned.clear()
    one = read(a_term(1.0), loss=3.0)
    assert not fault_of(one)
    with pytest.warns(RuntimeWarning, match=r"is 3, which differs by 0\.2 of it from the sum"):
        warn_of(one)


@pytest.mark.parametrize("changed", ["loss", "term"])
def test_values_that_were_changed_in_place_are_not_compared(changed):
    faults._warned.clear()
    one = read(a_term(1.0), loss=3.0)
    (one.loss if changed == "loss" else one.terms[0].value).mul_(2)
    warn_of(one)


def test_a_second_arrival_is_warned_of():
    faults._warned.clear()
    one = read(a_term(0.5, 1.0), loss=2.0)
    assert not fault_of(one)
    with pytest.warns(RuntimeWarning, match="was reached by more than one backward pass"):
        warn_of(one)


def test_terms_are_read_in_their_order():
    call = read(a_term(1.0, value=3.0, scale=512.0), a_term(0.1, 0.2, value=5.0, losses="y"))
    assert [term.read for term in call.terms] == [3, 5]
    assert [term.coefficients for term in call.terms] == [[1], pytest.approx([0.1, 0.2])]
    assert call.loss_scales == [512]


def test_a_loss_scale_that_changes_inside_a_step_is_warned_of(monkeypatch, recwarn):
    monkeypatch.setattr(faults, "_warned", set())

    def describe(*scales):
        audit = GradientAudit()
        for scale in scales:
            call = a_call(a_term(1.0, scale=scale), loss=2.0)
            values = [float(one) for one in call.tensors()]
            assert not audit._describe(call, K, values)

    for same in ([1024.0, 1024.0], [1024.0, None], []):
        describe(*same)
    assert not recwarn.list
    for _ in range(2):
        describe(1024.0, 1024.0, 512.0)
    (told,) = recwarn.list
    assert "the loss scale was 512 and 1024 in one step" in str(told.message)
